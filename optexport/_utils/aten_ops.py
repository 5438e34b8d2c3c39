"""Calls of ATen operators, which are overloads with a schema."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call by the names in the operator's schema, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}
