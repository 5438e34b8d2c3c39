"""Format passes of TorchScript and ``.pt2``: other operators for the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport._utils import aten_ops
from optexport.exporters import channels_last

aten = torch.ops.aten

_ONEDNN = torch.ops.mkldnn._linear_pointwise.default
_ONEDNN_SUM = torch.ops.mkldnn._linear_pointwise.binary


def apply_passes(program: ExportedProgram, names: Sequence[str], file_format: str) -> ExportedProgram:
    """Applies the graph's format passes to a copy that shares most weights.

    `freeze` applies to the compiled module instead.

    Args:
        program: Not changed.
        file_format: Format of the file to write: "torchscript" or "pt2".
    """
    if not {"shared-masks", "onednn-linear", "channels-last"} & set(names):
        return program
    changed = copy.copy(program)
    changed._graph_module = copy.copy(program.graph_module)
    changed._graph_module.graph = copy.deepcopy(program.graph)
    for node, copied in zip(program.graph.nodes, changed.graph.nodes, strict=True):
        copied.name = node.name  # a copy renames a node like `input`, and the signature names it
    # TorchScript rejects [0.0] as a list of another type, and torch.export.save cannot write [].
    scalars = [] if file_format == "torchscript" else [0.0]
    has_onednn = torch.backends.mkldnn.is_available()
    if "shared-masks" in names:
        _share_masks(changed.graph)
    if "onednn-linear" in names and has_onednn:
        _call_onednn(changed, scalars)
    if "channels-last" in names and has_onednn:
        _move_channels(changed, scalars)
    changed.graph_module.recompile()
    return changed


def restore_aten(program: ExportedProgram) -> None:
    """Restores the ATen layers in place of oneDNN calls, so that a file can be a source."""
    graph = program.graph
    channels_last.restore_aten(graph)
    for node in graph.find_nodes(op="call_function", target=_ONEDNN):
        x, weight, bias, post, _, algorithm = node.args
        if post == "gelu":
            node.args, node.kwargs = (_insert_linear(node, x, weight, bias),), {"approximate": algorithm}
            node.target = aten.gelu.default
        else:
            node.target, node.args = aten.linear.default, (x, weight, bias)
    for node in graph.find_nodes(op="call_function", target=_ONEDNN_SUM):
        x, other, weight, bias, _ = node.args
        node.target, node.args = aten.add.Tensor, (_insert_linear(node, x, weight, bias), other)
    program.graph_module.recompile()


def _insert_linear(node: fx.Node, *arguments: Any) -> fx.Node:
    """Inserts a linear layer before a node whose result has the same shape and dtype."""
    with node.graph.inserting_before(node):
        linear = node.graph.call_function(aten.linear.default, arguments)
    linear.meta = dict(node.meta)
    return linear


def freeze(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """Turns a scripted module's weights into constants and folds constant expressions."""
    frozen: torch.jit.ScriptModule = torch.jit.freeze(module.eval())
    return frozen


def _share_masks(graph: fx.Graph) -> None:
    """Converts a boolean mask of several attentions to numbers once; otherwise, each attention does it."""
    attentions: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        arguments = aten_ops.arguments(node)
        mask, dtype = arguments["attn_mask"], arguments["query"].meta["val"].dtype
        if isinstance(mask, fx.Node) and mask.meta["val"].dtype == torch.bool:
            attentions.setdefault((mask, dtype), []).append(node)
    is_written = _is_written(graph)
    for (mask, dtype), nodes in attentions.items():
        if len(nodes) < 2 or is_written:  # another operator may change the mask between two attentions
            continue
        with graph.inserting_before(nodes[0]):
            zeros = graph.call_function(aten.zeros_like.default, (mask,), {"dtype": dtype})
            hidden = graph.call_function(aten.logical_not.default, (mask,))
            added = graph.call_function(aten.masked_fill.Scalar, (zeros, hidden, float("-inf")))
        value = mask.meta["val"]
        zeros.meta["val"] = added.meta["val"] = value.to(dtype)
        hidden.meta["val"] = value
        for node in nodes:
            node.args = tuple(added if argument is mask else argument for argument in node.args)
            node.kwargs = {key: added if argument is mask else argument for key, argument in node.kwargs.items()}


def _is_written(graph: fx.Graph) -> bool:
    """Returns True if an operator of a graph writes into a tensor."""
    return any(node.target._schema.is_mutable for node in graph.nodes if isinstance(node.target, OpOverload))


def _move_channels(program: ExportedProgram, scalars: Sequence[float]) -> None:
    """Calls oneDNN for convolutions of images, with results in channels-last memory format."""
    parameters, state = program.graph_signature.inputs_to_parameters, dict(program.state_dict)
    weights = {node: weight for node, weight in _weights(program).items() if node.name in parameters}
    for node in channels_last.lay_out(program.graph, weights, scalars):
        laid_out = weights[node].detach().contiguous(memory_format=torch.channels_last)
        state[parameters[node.name]] = nn.Parameter(laid_out, weights[node].requires_grad)
    program._state_dict = state
    program._graph_signature = copy.deepcopy(program.graph_signature)
    for spec, returned in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):
        if isinstance(returned, fx.Node):  # may be a copy with another name
            spec.arg.name = returned.name


def _call_onednn(program: ExportedProgram, scalars: Sequence[float]) -> None:
    """Calls oneDNN for linear layers in float32 or bfloat16, fused with a GELU or a sum that is their only user.

    In float32, ``aten.linear`` calls torch's BLAS, usually MKL, which is slow on processors that are not from Intel. In
    bfloat16 it calls oneDNN too, but copies the bias to every row first. ReLU is not fused, because oneDNN's ReLU turns
    NaN into 0.
    """
    graph = program.graph
    weights = _weights(program)
    dtypes = {torch.float32} | ({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set())
    is_written = _is_written(graph)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight, bias = aten_ops.arguments(node).values()
        dtype = x.meta["val"].dtype
        if dtype not in dtypes or not _is_supported(dtype, weights.get(weight), bias, weights.get(bias)):
            continue
        contained, reader = _find_reader(node, is_written)
        if reader is not None and reader.target is aten.gelu.default:
            algorithm = reader.kwargs.get("approximate", "none")
            _replace(reader, _ONEDNN, (x, weight, bias, "gelu", scalars, algorithm), contained)
        elif reader is not None and (other := _find_addend(reader, contained[-1])) is not None:
            _replace(reader, _ONEDNN_SUM, (x, other, weight, bias, "add"), contained)
        else:
            _replace(node, _ONEDNN, (x, weight, bias, "none", scalars, ""))


def _find_reader(node: fx.Node, is_written: bool) -> tuple[list[fx.Node], fx.Node | None]:
    """Returns a node with the dropouts after it that do nothing, and the only reader of the last one, if it has one.

    Args:
        is_written: Whether operators of the graph write into tensors. Then the nodes must follow each other directly,
            because one between them could change an input of the first one.
    """
    path = [node]
    while len(path[-1].users) == 1:
        (user,) = path[-1].users
        if is_written and user is not path[-1].next:
            break
        if user.target is not aten.dropout.default or aten_ops.arguments(user)["train"]:
            return path, user
        path.append(user)
    return path, None


def _find_addend(reader: fx.Node, result: fx.Node) -> fx.Node | None:
    """Returns the other tensor of a plain sum with a layer's result, if both have the same shape and dtype."""
    if reader.target is not aten.add.Tensor or aten_ops.arguments(reader)["alpha"] != 1:
        return None
    addends = [argument for argument in reader.args if argument is not result]
    if len(addends) != 1 or not isinstance(addends[0], fx.Node):
        return None
    ours, theirs = result.meta["val"], addends[0].meta["val"]
    if not isinstance(theirs, torch.Tensor) or (theirs.dim(), theirs.dtype) != (ours.dim(), ours.dtype):
        return None
    same = all(statically_known_true(a == b) for a, b in zip(ours.shape, theirs.shape, strict=True))
    return addends[0] if same else None


def _replace(node: fx.Node, target: OpOverload, arguments: tuple[Any, ...], before: Sequence[fx.Node] = ()) -> None:
    """Makes a node another call, and removes nodes that it contains. The node stays, as outputs are found by name."""
    node.target, node.args, node.kwargs = target, arguments, {}
    for contained in reversed(before):
        node.graph.erase_node(contained)


def _weights(program: ExportedProgram) -> dict[Any, torch.Tensor]:
    """Returns the tensors that a program contains, by their placeholders."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    tensors = {**program.state_dict, **program.constants}
    constants = signature.inputs_to_lifted_tensor_constants
    weights = {}
    for node in program.graph.find_nodes(op="placeholder"):
        value = tensors.get((names | constants).get(node.name))
        if isinstance(value, torch.Tensor):
            weights[node] = value
    return weights


def _is_supported(
    dtype: torch.dtype, weight: torch.Tensor | None, bias: fx.Node | None, bias_value: torch.Tensor | None
) -> bool:
    """Returns True if oneDNN computes a linear layer of one dtype as torch does.

    oneDNN rejects layers without features, and misreads a bias that is not a contiguous vector.
    """
    return (
        weight is not None
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dtype == dtype
        and weight.dim() == 2
        and weight.shape[1] > 0
        and (
            bias is None
            or (
                bias_value is not None
                and bias_value.dtype == dtype
                and bias_value.shape == weight.shape[:1]
                and bias_value.is_contiguous()
            )
        )
    )
