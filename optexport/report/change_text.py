"""What a rule changed, in a few words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from optexport.bundle.manifest import ChangeRecord

_MAX_OPERATORS, _MAX_OPERATOR_NAME = 2, 16


def changed_text(changes: Sequence[ChangeRecord]) -> str:
    """Returns how many nodes became how many: ``18 linear -> 6``."""
    return f"{_replaced_text(changes)} -> {sum(len(change.nodes) for change in changes)}"


def is_function(target: str) -> bool:
    """Returns True if the target of a change is a function, not a module."""
    return target.startswith(("operator.", "torch."))


def short_target(target: str) -> str:
    """Returns a module's path, or the name of a function: ``select`` for ``torch._ops.aten.select.int``."""
    return function_name(target) if is_function(target) else target


def function_name(target: str) -> str:
    """Returns the name of a function without its module and overload."""
    parts = target.split(".")
    return parts[3] if parts[:2] in (["torch", "ops"], ["torch", "_ops"]) and len(parts) > 3 else parts[-1]


def _replaced_text(changes: Sequence[ChangeRecord]) -> str:
    """Returns how many nodes were replaced, by operator if they have the names that torch gives: linear, linear_1."""
    operators = Counter(re.sub(r"_\d+$", "", name) for change in changes for name in change.replaced)
    if len(operators) <= _MAX_OPERATORS and all(len(name) <= _MAX_OPERATOR_NAME for name in operators):
        return " and ".join(f"{count} {name}" for name, count in operators.items())
    return f"{operators.total()} {'node' if operators.total() == 1 else 'nodes'}"
