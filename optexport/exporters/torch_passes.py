"""Format passes of TorchScript and ``.pt2``: other operators for the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram

from optexport._utils import aten_ops
from optexport.exporters import channels_last

aten = torch.ops.aten


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
    for node in graph.find_nodes(op="call_function", target=torch.ops.mkldnn._linear_pointwise.default):
        x, weight, bias, post, _, algorithm = node.args
        linear = node
        if post == "gelu":
            with graph.inserting_before(node):
                linear = graph.call_function(aten.linear.default)
            linear.meta = dict(node.meta)
            node.target, node.args, node.kwargs = aten.gelu.default, (linear,), {"approximate": algorithm}
        linear.target, linear.args = aten.linear.default, (x, weight, bias)
    program.graph_module.recompile()


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
    is_written = any(node.target._schema.is_mutable for node in graph.nodes if isinstance(node.target, OpOverload))
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
    """Calls oneDNN for float32 linear layers, fused with a GELU that is their only user.

    ``aten.linear`` calls torch's BLAS, usually MKL, which is slow on processors that are not from Intel. It already
    calls oneDNN for bfloat16. ReLU is not fused, because oneDNN's ReLU turns NaN into 0.
    """
    graph = program.graph
    weights = _weights(program)
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight, bias = aten_ops.arguments(node).values()
        if not _is_supported(x, weights.get(weight), bias, weights.get(bias)):
            continue
        last, post = node, ("none", scalars, "")
        # The GELU must follow directly, because a node between them could change x in place.
        if list(node.users) == [node.next] and node.next.target is aten.gelu.default:
            last, post = node.next, ("gelu", scalars, node.next.kwargs.get("approximate", "none"))
        last.target = torch.ops.mkldnn._linear_pointwise.default  # in place: outputs are found by node name
        last.args, last.kwargs = (x, weight, bias, *post), {}
        if last is not node:
            graph.erase_node(node)


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
    x: fx.Node, weight: torch.Tensor | None, bias: fx.Node | None, bias_value: torch.Tensor | None
) -> bool:
    """Returns True if oneDNN computes a linear layer as torch does.

    oneDNN rejects layers without features, misreads a bias that is not a contiguous vector, and lacks float64.
    """
    return (
        x.meta["val"].dtype == torch.float32
        and weight is not None
        and weight.device.type == "cpu"
        and weight.layout == torch.strided
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.shape[1] > 0
        and (
            bias is None
            or (
                bias_value is not None
                and bias_value.dtype == torch.float32
                and bias_value.shape == weight.shape[:1]
                and bias_value.is_contiguous()
            )
        )
    )
