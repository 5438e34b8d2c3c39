"""Reconstructs the modules and Python operators of a model from a graph of ATen calls.

``torch.export`` writes ``aten.linear.default(x, weight, bias)``. Here it becomes a ``call_module`` node on an
``nn.Linear`` with the qualified name of the original module, which shares its parameters. ``aten.add.Tensor`` becomes
``operator.add``. The same operators run on the same tensors, so results are bit-exact.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from optexport._utils import aten_ops
from optexport.errors import TraceError
from optexport.signature.program_arguments import take_tensors
from optexport.tracing.regions import inline_regions
from optexport.transformations.analysis.module_builders import KINDS, Kind, find_owner

aten = torch.ops.aten

_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
}


@dataclass(frozen=True)
class _Call:
    """An ATen call with its arguments by name, including the schema's defaults."""

    node: fx.Node
    arguments: dict[str, Any]

    @classmethod
    def of(cls, node: fx.Node) -> _Call:
        return cls(node, aten_ops.arguments(node))


def unlift(program: ExportedProgram) -> fx.GraphModule:
    """Returns a program as a GraphModule that takes every tensor by name.

    Raises:
        TraceError: A module's name is a Python keyword.
    """
    try:
        module = program.module(check_guards=False)
    except SyntaxError as error:  # torch.export accepts a module named like a keyword and writes it unquoted
        raise TraceError(
            "a module has a name that cannot be part of Python code",
            location=(error.text or "").strip() or None,
            hint="Rename modules and parameters that are named like Python keywords, and export again.",
        ) from error
    assert isinstance(module, fx.GraphModule)
    # A new GraphModule does not have the hook that checks how inputs are passed.
    graph_module = fx.GraphModule(module, module.graph).eval()
    take_tensors(graph_module, program)
    return graph_module


def reconstruct_modules(program: ExportedProgram) -> fx.GraphModule:
    """Reconstructs the modules of a program, which share its parameters."""
    graph_module = unlift(program)
    graph = _copy_graph(graph_module)
    _erase_replacements(graph, graph_module)
    _erase_unused_attributes(graph)
    attributes = {n.target: _attribute(graph_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    root: dict[str, Any] = {**attributes, **_call_modules(graph, attributes)}
    _call_operators(graph)
    if torch.get_default_dtype() is not torch.float32:
        _write_dtypes(graph)
    for node in [n for n in graph.nodes if n.target is aten._assert_tensor_metadata.default]:
        graph.erase_node(node)  # asserts the traced dtypes; TorchScript does not have this operator
    _erase_unused_attributes(graph)
    targets = {n.target for n in graph.nodes if n.op in ("get_attr", "call_module")}
    return _assemble({name: value for name, value in root.items() if name in targets}, graph, program)


def _copy_graph(graph_module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    output = graph.graph_copy(graph_module.graph, {})
    graph.output(output)
    graph.set_codegen(graph_module.graph._codegen)
    inline_regions(graph, graph_module)
    for node in graph.nodes:  # graph_copy shares the meta dictionaries
        node.meta = dict(node.meta)
    return graph


def _erase_replacements(graph: fx.Graph, graph_module: fx.GraphModule) -> None:
    """Erases writes to buffers that the model replaces by a tensor of another shape.

    A table of positions may grow with the sequence: the graph computes it in every call. ``torch.export`` writes the
    new table back to the buffer of the old size, or to an input if the buffer was None, which no call can do.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = node.args[:2]
        if node.users or "val" not in value.meta:
            continue
        written = _attribute(graph_module, target.target) if target.op == "get_attr" else target.meta.get("val")
        if written is not None and not _fits(value.meta["val"].shape, written.shape):
            graph.erase_node(node)


def _fits(shape: Sequence[Any], target: Sequence[Any]) -> bool:
    """Returns True if a tensor of one shape can be written to a tensor of another one, at every size."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(statically_known_true(a == b) or a == 1 for a, b in pairs)


def _erase_unused_attributes(graph: fx.Graph) -> None:
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)


def _call_modules(graph: fx.Graph, attributes: dict[str, Any]) -> dict[str, nn.Module]:
    """Replaces, in place, ATen calls by calls of modules; returns the modules by path."""
    modules: dict[str, nn.Module] = {}
    candidates = _candidates(graph.nodes)
    for path, (kind, calls) in candidates.items():
        own = {f"{path}.{name}" for name in kind.tensors}
        if any(name.startswith(f"{path}.") and name not in own for name in (*attributes, *candidates)):
            continue  # the module, a subclass, has other tensors or modules, which nn.Linear has no place for
        module = _build(kind, calls, attributes)
        if module is None:
            continue
        modules[path] = module
        for call in calls:
            call.node.op, call.node.target = "call_module", path
            call.node.args, call.node.kwargs = (call.arguments[kind.input],), {}
    return modules


def _call_operators(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _OPERATORS and len(node.args) == 2 and not node.kwargs:
            node.target = _OPERATORS[node.target]


def _write_dtypes(graph: fx.Graph) -> None:
    """Writes the dtype into calls that create tensors, as the default dtype is not float32."""
    for node in graph.nodes:
        has_input = any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
        if not has_input and isinstance(node.target, torch._ops.OpOverload):
            arguments = aten_ops.arguments(node)
            if "dtype" in arguments and arguments["dtype"] is None:
                node.update_kwarg("dtype", node.meta["val"].dtype)


def _attribute(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)


def _candidates(nodes: Iterable[fx.Node]) -> dict[str, tuple[Kind, list[_Call]]]:
    """Returns the calls that may become module calls, by the path of their module."""
    calls_by_path: dict[str, list[_Call]] = defaultdict(list)
    for node in nodes:
        kind = KINDS.get(node.target) if node.op == "call_function" else None
        path = find_owner(node, kind.module) if kind else None
        if path:
            calls_by_path[path].append(_Call.of(node))
    return {
        path: (KINDS[calls[0].node.target], calls)
        for path, calls in calls_by_path.items()
        if len({call.node.target for call in calls}) == 1
    }


def _build(kind: Kind, calls: list[_Call], attributes: dict[str, Any]) -> nn.Module | None:
    """Builds the module for the calls of a path; None if calls differ or compute weights."""
    first = calls[0].arguments
    constants = {k: v for k, v in first.items() if k != kind.input and k not in kind.tensors}
    if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(constants)):
        return None  # an argument is computed at run time
    for call in calls:
        if any(call.arguments[name] != value for name, value in constants.items()):
            return None
    tensors: dict[str, torch.Tensor | None] = {}
    for name in kind.tensors:
        sources = {call.arguments[name].target if isinstance(call.arguments[name], fx.Node) else None for call in calls}
        reads = [call.arguments[name] for call in calls if call.arguments[name] is not None]
        if len(sources) != 1 or any(not isinstance(node, fx.Node) or node.op != "get_attr" for node in reads):
            return None
        tensors[name] = attributes[reads[0].target] if reads else None
    module = kind.build({**first, **constants}, tensors)
    if module is None:
        return None
    for name, tensor in tensors.items():
        if name in module._buffers:
            module._buffers[name] = tensor
        elif tensor is not None and not isinstance(tensor, nn.Parameter):
            return None  # the weight is a buffer, but nn.Linear and similar modules need parameters
        else:
            module._parameters[name] = tensor
    return module.eval()


def _assemble(root: dict[str, Any], graph: fx.Graph, program: ExportedProgram) -> fx.GraphModule:
    """Returns a GraphModule whose state_dict has the original model's keys and order."""
    rank: dict[str, int] = {}
    for position, key in enumerate(program.state_dict):
        while key:  # a module has the position of its first tensor
            rank.setdefault(key, position)
            key = key.rpartition(".")[0]
    # Filled here: GraphModule(module, graph) would lose the order of modules and which buffers are persistent.
    graph_module = fx.GraphModule({}, fx.Graph())
    for target, value in sorted(root.items(), key=lambda item: rank.get(item[0], len(rank))):
        path, _, name = target.rpartition(".")
        parent: nn.Module = graph_module
        for part in path.split(".") if path else []:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            parent.register_buffer(name, value, persistent=target in program.state_dict)
        else:
            setattr(parent, name, value)
    graph_module.graph = graph
    return graph_module.eval()
