"""ReplaceActivation: replaces an activation by a similar one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.errors import ConfigError, did_you_mean
from optexport.transformations.rule import Match, ReversibleRule, Skip

aten = torch.ops.aten

# For each activation: its operator, the in-place operator, and its options.
_ACTIVATIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gelu": (aten.gelu.default, aten.gelu_.default, {}),
    "gelu-tanh": (aten.gelu.default, aten.gelu_.default, {"approximate": "tanh"}),
    "silu": (aten.silu.default, aten.silu_.default, {}),
    "hardswish": (aten.hardswish.default, aten.hardswish_.default, {}),
    "sigmoid": (aten.sigmoid.default, aten.sigmoid_.default, {}),
    "hardsigmoid": (aten.hardsigmoid.default, aten.hardsigmoid_.default, {}),
}
# Only similar activations may replace each other.
_SIMILAR = (("gelu", "gelu-tanh"), ("silu", "hardswish"), ("sigmoid", "hardsigmoid"))


@dataclass(frozen=True)
class ReplaceActivation(ReversibleRule):
    """Replaces an activation by a similar one.

    old(x)  ->  new(x)

    This does not preserve the computation; parity.atol and parity.rtol limit the error. gelu-tanh differs from gelu by
    up to 5e-4, hardswish from silu by up to 0.14, and hardsigmoid from sigmoid by up to 0.07. Activations that are
    written as separate operations, such as 0.5 * x * (1 + tanh(...)), do not match.

    Skips:   inputs that are not known to be floating-point numbers.
    Exact:   no.
    Inverse: exact; the options of the old activation are recorded.

    Attributes:
        old: The activation to replace: "gelu", "gelu-tanh", "silu", "hardswish", "sigmoid" or "hardsigmoid".
        new: The other activation of the same pair: gelu and gelu-tanh, silu and hardswish, sigmoid and hardsigmoid.

    Raises:
        ConfigError: An activation is unknown, or the two are not similar.
    """

    preserves_computation = False

    old: str = "gelu"
    new: str = "gelu-tanh"

    def __post_init__(self) -> None:
        for name in (self.old, self.new):
            if name not in _ACTIVATIONS:
                hint = did_you_mean(name, list(_ACTIVATIONS))
                raise ConfigError(f'unknown activation "{name}"', location="replace-activation", hint=hint)
        if (self.old, self.new) not in _SIMILAR and (self.new, self.old) not in _SIMILAR:
            pairs = ", ".join(f"{a} and {b}" for a, b in _SIMILAR)
            raise ConfigError(
                f"{self.new} cannot replace {self.old}",
                location="replace-activation",
                hint=f"Use one of these pairs: {pairs}.",
            )

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        *operators, options = _ACTIVATIONS[self.old]
        if node.target not in operators or _options(node) != options:
            return None
        (x,) = node.args
        value = x.meta.get("val") if isinstance(x, Node) else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return Skip(f"{x} is not known to be floating-point")  # some activations do not support integers
        return Match((node,))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        record = {"options": dict(node.kwargs)}
        _, _, options = _ACTIVATIONS[self.new]
        _replace(node, self.old, self.new, options)
        return [(node, record)]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        _replace(node, self.new, self.old, record["options"])


def _replace(node: Node, old: str, new: str, options: dict[str, Any]) -> None:
    in_place = node.target is _ACTIVATIONS[old][1]
    operator, in_place_operator, _ = _ACTIVATIONS[new]
    node.target = in_place_operator if in_place else operator
    node.kwargs = dict(options)


def _options(node: Node) -> dict[str, Any]:
    """Returns the options of a call that differ from the defaults."""
    return {key: value for key, value in node.kwargs.items() if (key, value) != ("approximate", "none")}
