"""CastPrecision: computes layers and products in half precision."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from optexport.errors import ConfigError, did_you_mean
from optexport.transformations.analysis import folding, memory, modules, usage
from optexport.transformations.rule import Match, Rule, Skip

aten = torch.ops.aten

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LAYERS: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_PRODUCTS = (
    *(operator.matmul, aten.matmul.default, aten.bmm.default, aten.mm.default, aten.addmm.default, aten.linear.default),
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.scaled_dot_product_attention.default),
)
# In bfloat16 alone: sums of residuals may exceed the range of float16. The statistics of the kernels are in float32.
_NORMS = (nn.LayerNorm,)
# Operations that move numbers or change each of them independently. They run in the precision of their inputs.
_PASS_THROUGH = {
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.transpose.int, aten.permute.default),
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int),
    *(aten.contiguous.default, aten.clone.default, aten.dropout.default, aten.cat.default, operator.getitem),
    *(aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.gelu.default, aten.silu.default),
    *(aten.hardswish.default, aten.hardsigmoid.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default),
    *(aten.leaky_relu.default, aten.max_pool2d.default, operator.add, operator.sub, operator.mul),
}
# Key in ``node.meta`` of the casts that this rule inserts. The casts of the model itself do not change.
_CAST = "cast_precision"


@dataclass(frozen=True)
class CastPrecision(Rule):
    """Computes layers and products in half precision.

    y = Layer(x)  ->  y = Layer'(x.to(half)).to(float32)

    For linears, convolutions, embeddings, matrix products and attention in float32. Between two of them, casts are
    left out if only reshapes, activations, and sums or products of such results lie between. In bfloat16, layer norms
    of such results follow. Everything else stays in float32: other norms, softmax, means, arithmetic with numbers, and
    the inputs and outputs of the graph. The softmax in scaled_dot_product_attention is part of the attention.

    This does not preserve the computation; parity.atol and parity.rtol limit the error.

    Skips:   a layer that is shared, tied, hooked, parametrized, of a subclass, called without a single tensor, or of
             mixed dtypes; an embedding that renormalizes its weight; numbers too large for the precision; attention
             with an added mask; inputs that are not known to be float32. If a product has constants with other readers,
             they are cast in every run.
    Exact:   no.
    Inverse: none, because the weights are rounded, and keeping the original ones would use the memory that this saves.

    Attributes:
        dtype: "float16" or "bfloat16". ONNX Runtime does not support the latter on CPU.
        keep: Names of layers, or of modules with their layers, that stay in float32. The name of a product or
            attention consists of its module and node: ``encoder.layer.0.attention.self.scaled_dot_product_attention``.

    Raises:
        ConfigError: The precision or a name is unknown.
    """

    preserves_computation = False

    dtype: str = "float16"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            hint = did_you_mean(self.dtype, list(_DTYPES))
            raise ConfigError(f'unknown precision "{self.dtype}"', location="cast-precision", hint=hint)

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.op == "output":
            self._check_names(graph_module)
        if node.op == "call_module":
            return self._match_layer(graph_module, node)
        if node.target in _PRODUCTS:
            return None if self._keeps(layer_name(node)) else self._match_product(graph_module, node)
        return Match((node,)) if self._passes_through(graph_module, node) else None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        dtype = _DTYPES[self.dtype]
        layer = modules.called_module(graph_module, node)
        if layer is not None and _dtypes(layer) != {dtype}:  # equal if an earlier call of the layer was rewritten
            rounded = {
                name: nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                for name, parameter in layer.named_parameters()
            }
            modules.replace_module(graph_module, str(node.target), modules.with_parameters(layer, **rounded))
        for x in _find_tensors(node) or []:
            if x.meta["val"].dtype is torch.float32:
                node.replace_input_with(x, self._lowered(graph_module, node, x))
                if x.meta.get(_CAST) and not x.users:
                    graph_module.graph.erase_node(x)
        value = node.meta["val"]
        node.meta = {**node.meta, "val": value.to(dtype)}
        if node.users:
            with graph_module.graph.inserting_after(node):
                back = graph_module.graph.call_function(aten.to.dtype, (node, torch.float32))
            back.meta = {"val": value, _CAST: True}
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        return [(node, None)]

    def _keeps(self, target: str) -> bool:
        return any(f"{target}.".startswith(f"{name}.") for name in self.keep)

    def _check_names(self, graph_module: GraphModule) -> None:
        names = [name for name, _ in graph_module.named_modules() if name]
        products = [layer_name(node) for node in graph_module.graph.nodes if node.target in _PRODUCTS]
        for name in self.keep:
            if name not in names and not any(f"{product}.".startswith(f"{name}.") for product in products):
                hint = did_you_mean(name, names)
                raise ConfigError(f'the model has no module "{name}"', location="cast-precision.keep", hint=hint)

    def _match_layer(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        layer, target = modules.called_module(graph_module, node), str(node.target)
        cls = next((cls for cls in (*_LAYERS, *_NORMS) if isinstance(layer, cls)), None)
        if layer is None or cls is None or self._keeps(target):
            return None
        calls, dtypes = usage.uses(graph_module).calls_of(target), _dtypes(layer)
        if len(dtypes) > 1:
            return Skip(f"{target}: the weights differ in dtype")
        half, call_dtypes = _DTYPES[self.dtype], [_dtype(call) for call in calls]
        if cls in _NORMS and not self._norm_reads_half(graph_module, node, calls):
            return None
        # A layer in half precision matches only if this rule cast it at an earlier call.
        if dtypes != {torch.float32} and (dtypes != {half} or half not in call_dtypes):
            return None
        if _dtype(node) not in (None, torch.float32):
            return None
        reason = folding.find_plain_problem(layer, cls) or folding.find_sharing_problem(graph_module, target, layer)
        reason = reason or folding.find_layout_problem(layer) or _find_call_problem(calls)
        reason = reason or self._find_weight_problem(layer)
        return Skip(f"{target}: {reason}") if reason else Match((node,))

    def _norm_reads_half(self, graph_module: GraphModule, node: Node, calls: list[Node]) -> bool:
        """Returns True for the first call of a norm if its input was cast from bfloat16, and then for all its calls."""
        if self.dtype != "bfloat16":
            return False
        if node is not calls[0]:
            return _dtype(calls[0]) is torch.bfloat16
        x = modules.sole_input(node)
        return x is not None and self._find_half(graph_module, x) is not None

    def _find_weight_problem(self, layer: nn.Module) -> str | None:
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            return "the layer renormalizes its weight"
        if any(self._overflows(parameter) for parameter in layer.parameters()):
            return f"the weights are too large for {self.dtype}"
        return None

    def _match_product(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        tensors = _find_tensors(node)
        if tensors is None:
            return Skip(f"{node.name}: dtypes are unknown (trace with example inputs)")
        if node.target is aten.scaled_dot_product_attention.default:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if isinstance(mask, Node) and mask.meta["val"].is_floating_point():
                return Skip(f"{node.name}: the mask is added, and may be too large for {self.dtype}")
            tensors = [x for x in tensors if x is not mask]
        if {x.meta["val"].dtype for x in tensors} != {torch.float32} or any(
            self._keeps(str(x.target)) for x in tensors
        ):
            return None
        for x in tensors:
            if (value := memory.find_constant(graph_module, x)) is not None and self._overflows(value):
                return Skip(f"{x.target}: the numbers are too large for {self.dtype}")
        return Match((node,))

    def _overflows(self, value: torch.Tensor) -> bool:
        return value.numel() > 0 and float(value.detach().abs().max()) > torch.finfo(_DTYPES[self.dtype]).max

    def _passes_through(self, graph_module: GraphModule, node: Node) -> bool:
        """Returns True if a node can run in half precision, and all its inputs were cast from it."""
        if node.target not in _PASS_THROUGH or not (tensors := _find_tensors(node)):
            return False
        if any(self._find_half(graph_module, x) is None for x in tensors):
            return False
        if node.target in (operator.add, operator.sub, operator.mul):
            # A Python number may be too large or too small for half precision.
            return all(isinstance(argument, Node) for argument in node.args)
        if node.target is aten.dropout.default and node.args[2] is not False:
            return False
        # A view in half precision would not see in-place changes of the float32 value, and vice versa.
        return not memory.changed_in_place(graph_module, node)

    def _find_half(self, graph_module: GraphModule, x: Node) -> Node | None:
        """Returns the half-precision value that a value was cast from, if both are still equal."""
        if not x.meta.get(_CAST) or x.args[1] is not torch.float32 or memory.changed_in_place(graph_module, x):
            return None
        (half, _) = x.args
        assert isinstance(half, Node)
        return half if half.meta["val"].dtype is _DTYPES[self.dtype] else None

    def _lowered(self, graph_module: GraphModule, node: Node, x: Node) -> Node:
        """Returns a value in half precision that a node can read."""
        if (half := self._find_half(graph_module, x)) is not None:
            return half
        dtype = _DTYPES[self.dtype]
        if _has_one_reader(graph_module, x):
            parent, name = modules.parent_of(graph_module, str(x.target))
            parameter = parent._parameters[name]
            assert parameter is not None
            cast_copy = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
            parent._parameters = {**parent._parameters, name: cast_copy}
            x.meta = {**x.meta, "val": x.meta["val"].to(dtype)}
            return x
        if not memory.changed_in_place(graph_module, x):
            for user in x.users:
                if user.meta.get(_CAST) and user.args == (x, dtype) and user < node:
                    return user
        with graph_module.graph.inserting_before(node):
            cast = graph_module.graph.call_function(aten.to.dtype, (x, dtype))
        cast.meta = {"val": x.meta["val"].to(dtype), _CAST: True}
        return cast


def layer_name(node: Node) -> str:
    """Returns the name of a layer, or the module and node of a product."""
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    scope = stack[-1][0] if stack else ""
    return f"{scope}.{node.name}" if scope else node.name


def layers_in_half(graph_module: GraphModule) -> list[str]:
    """Returns the names of the layers and products that run in half precision, in graph order.

    Norms are not among them, because they follow the layers that they read.
    """
    nodes = [
        node
        for node in graph_module.graph.nodes
        if node.target in _PRODUCTS
        or (node.op == "call_module" and not isinstance(modules.called_module(graph_module, node), _NORMS))
    ]
    return list(dict.fromkeys(layer_name(node) for node in nodes if _dtype(node) in _DTYPES.values()))


def _find_call_problem(calls: list[Node]) -> str | None:
    for call in calls:
        x = modules.sole_input(call)
        if x is None:
            return "the module is not called with a single tensor"
        if _dtype(call) is None or _dtype(x) is None:
            return "dtypes are unknown (trace with example inputs)"
    return None


def _has_one_reader(graph_module: GraphModule, x: Node) -> bool:
    """Returns True if a node reads a parameter that has one name, one read and one user."""
    value = memory.find_constant(graph_module, x)
    if not isinstance(value, nn.Parameter) or len(x.users) > 1:
        return False
    parameters = graph_module.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter is value]
    return names == [x.target] and len(graph_module.graph.find_nodes(op="get_attr", target=x.target)) == 1


def _find_tensors(node: Node) -> list[Node] | None:
    """Returns the tensor inputs of a node, or None if the type of an input is unknown."""
    tensors = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            tensors.append(source)
        elif not isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
    return tensors


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _dtypes(layer: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in layer.parameters()}
