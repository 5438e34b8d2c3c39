"""KeepOutputs: removes all other outputs, and what only they need."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen

from optexport.errors import ConfigError, did_you_mean
from optexport.signature.signature import named_outputs
from optexport.transformations.analysis import effects, modules, usage
from optexport.transformations.rule import Match, Rule


@dataclass(frozen=True)
class KeepOutputs(Rule):
    """Removes all outputs except the named ones, and what only they need.

    return {a: ..., b: ..., c: ...}  ->  return {b: ...}

    Calls that draw random numbers, change something in place or switch global state stay, with their inputs. So the
    remaining outputs are the same for the same seed. Code that is not PyTorch's own stays too.

    Skips:   nothing.
    Exact:   bit-exact for the remaining outputs.
    Inverse: none, because the other nodes are removed.

    Attributes:
        outputs: Names of the outputs to keep, in any order; empty for all.

    Raises:
        ConfigError: The graph has no output of that name.
    """

    outputs: tuple[str, ...] = ()

    def match(self, graph_module: GraphModule, node: Node) -> Match | None:
        if node.op != "output" or not self.outputs:
            return None
        names = list(_outputs(graph_module, node))
        for name in self.outputs:
            if name not in names:
                raise ConfigError(
                    f'the graph has no output "{name}"', location="keep-outputs", hint=did_you_mean(name, names)
                )
        return Match((node,)) if len(set(self.outputs)) < len(names) else None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        graph = graph_module.graph
        node.args = ({name: leaf for name, leaf in _outputs(graph_module, node).items() if name in self.outputs},)
        if isinstance(graph._codegen, _PyTreeCodeGen):
            graph.set_codegen(_PyTreeCodeGen(graph._codegen.pytree_info._replace(out_spec=None)))
        # torch.fx considers in-place methods and some random functions pure, and inactive dropouts impure.
        uses = usage.uses(graph_module)
        stay = {*uses.mutations, *uses.switches, *(n for n in graph.nodes if effects.draws(graph_module, n))}
        graph.eliminate_dead_code(lambda candidate: candidate in stay or candidate.is_impure(impure_random=False))
        _remove_unused_modules(graph_module)
        return [(node, None)]


def _remove_unused_modules(graph_module: GraphModule) -> None:
    """Removes unused modules, except from modules that a caller shares."""
    nodes = [node for node in graph_module.graph.nodes if node.op in ("call_module", "get_attr")]
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    needed = {prefix for node in nodes for prefix in _prefixes(str(node.target))}
    for name, _ in list(graph_module.named_modules(remove_duplicate=False))[1:]:
        parent = name.rpartition(".")[0]
        if name not in needed and parent in {*needed, ""} and called.isdisjoint(_prefixes(name)):
            modules.remove_module(graph_module, name)


def _prefixes(target: str) -> Iterable[str]:
    return itertools.accumulate(target.split("."), "{}.{}".format)


def _outputs(graph_module: GraphModule, node: Node) -> dict[str, Node]:
    returned = graph_module.graph._codegen.process_outputs(node.args[0])
    inputs = [str(placeholder.target) for placeholder in graph_module.graph.find_nodes(op="placeholder")]
    return named_outputs(returned, inputs, Node)
