"""One activation takes the place of another that is nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from optexport.errors import ConfigError, did_you_mean
from optexport.transformations.rule import Match, ReversibleRule, Skip

aten = torch.ops.aten

# The operators of each activation, as it is and in place, and its options.
_ACTIVATIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gelu": (aten.gelu.default, aten.gelu_.default, {}),
    "gelu-tanh": (aten.gelu.default, aten.gelu_.default, {"approximate": "tanh"}),
    "silu": (aten.silu.default, aten.silu_.default, {}),
    "hardswish": (aten.hardswish.default, aten.hardswish_.default, {}),
    "sigmoid": (aten.sigmoid.default, aten.sigmoid_.default, {}),
    "hardsigmoid": (aten.hardsigmoid.default, aten.hardsigmoid_.default, {}),
}
# Each of these may stand for its neighbour; between others, nothing of the model would be left.
_ALIKE = (("gelu", "gelu-tanh"), ("silu", "hardswish"), ("sigmoid", "hardsigmoid"))


@dataclass(frozen=True)
class ReplaceActivation(ReversibleRule):
    """old(x)  ->  new(x)

    This does not preserve the computation: how far the outputs may go is for parity.atol and parity.rtol to say. The
    tanh of GELU is up to 5e-4 away from it, hardswish up to 0.14 from SiLU, and hardsigmoid up to 0.07 from sigmoid.
    An activation that is written out, as 0.5 * x * (1 + tanh(...)), is not seen.

    Skips:   an activation of what is not known to be floating-point numbers.
    Exact:   no.
    Inverse: exact; which one it was is recorded.

    Attributes:
        old: The activation that goes: "gelu", "gelu-tanh", "silu", "hardswish", "sigmoid" or "hardsigmoid".
        new: The one that comes: in this list, the neighbour of the old one.

    Raises:
        ConfigError: There is no such activation, or the two are nothing alike.
    """

    preserves_computation = False

    old: str = "gelu"
    new: str = "gelu-tanh"

    def __post_init__(self) -> None:
        for name in (self.old, self.new):
            if name not in _ACTIVATIONS:
                known = list(_ACTIVATIONS)
                raise ConfigError(
                    f'there is no activation "{name}"', location="replace-activation", hint=did_you_mean(name, known)
                )
        if (self.old, self.new) not in _ALIKE and (self.new, self.old) not in _ALIKE:
            pairs = ", ".join(f"{one} and {other}" for one, other in _ALIKE)
            raise ConfigError(
                f"{self.new} cannot stand for {self.old}", location="replace-activation", hint=f"Alike are {pairs}."
            )

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        *operators, options = _ACTIVATIONS[self.old]
        if node.target not in operators or _options(node) != options:
            return None
        (x,) = node.args
        value = x.meta.get("val") if isinstance(x, Node) else None
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return Skip(f"{x} is not known to hold floating-point numbers")  # of whole ones, some take none
        return Match((node,))

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        record = {"options": dict(node.kwargs)}
        _, _, options = _ACTIVATIONS[self.new]
        self._put(node, self.old, self.new, options)
        return [(node, record)]

    def restore(self, graph_module: GraphModule, node: Node, record: Any) -> None:
        self._put(node, self.new, self.old, record["options"])

    def _put(self, node: Node, old: str, new: str, options: dict[str, Any]) -> None:
        in_place = node.target is _ACTIVATIONS[old][1]
        as_it_is, changing, _ = _ACTIVATIONS[new]
        node.target = changing if in_place else as_it_is
        node.kwargs = dict(options)


def _options(node: Node) -> dict[str, Any]:
    """The options of a call that are not those by default."""
    return {key: value for key, value in node.kwargs.items() if (key, value) != ("approximate", "none")}
