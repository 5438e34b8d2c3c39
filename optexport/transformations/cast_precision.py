"""Products are computed in half precision."""

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
# What only moves numbers, or changes each by itself, and so goes on in the precision of what it is given.
_ONWARD = {
    *(aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.transpose.int, aten.permute.default),
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int),
    *(aten.contiguous.default, aten.clone.default, aten.dropout.default, aten.cat.default, operator.getitem),
    *(aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.gelu.default, aten.silu.default),
    *(aten.hardswish.default, aten.hardsigmoid.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default),
    *(aten.leaky_relu.default, aten.max_pool2d.default, operator.add, operator.sub, operator.mul),
}
# In ``node.meta`` of a cast that this rule put in: those of the model itself stay as they are.
_CAST = "cast_precision"


@dataclass(frozen=True)
class CastPrecision(Rule):
    """y = Layer(x)  ->  y = Layer'(x.to(half)).to(float32)

    For linears, convolutions, embeddings, matrix products and attention in float32. Where nothing but a reshape, an
    activation, or a sum or product of two such results stands between, no cast does. All else, as norms, softmax,
    means and arithmetic with numbers, stays in float32, and so do the inputs and outputs of the graph; the softmax
    inside of scaled_dot_product_attention is part of that. It does not preserve the computation: how far the outputs
    may go is for parity.atol and parity.rtol to say.

    Skips:   a layer that is shared under two names, tied, hooked, parametrized or of a subclass, is not called on a
             single tensor, renormalises its embeddings, mixes dtypes, or holds a number too large for the precision;
             attention with a mask that is added; what is not known to be float32. A product of constants that others
             read too casts them whenever it runs.
    Exact:   no.
    Inverse: none, because the weights are rounded; keeping the others too would take the memory that this saves.

    Attributes:
        dtype: "float16" or "bfloat16". ONNX Runtime on the CPU refuses the latter.
        keep: Names of layers, or of modules with all layers in them, that stay in float32. A matrix product, or
            attention, goes by its module and node: ``encoder.layer.0.attention.self.scaled_dot_product_attention``.

    Raises:
        ConfigError: There is no such precision, or no such module.
    """

    preserves_computation = False

    dtype: str = "float16"
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            hint = did_you_mean(self.dtype, list(_DTYPES))
            raise ConfigError(f'there is no precision "{self.dtype}"', location="cast-precision", hint=hint)

    def match(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        if node.op == "output":
            self._check_names(graph_module)
        if node.op == "call_module":
            return self._match_layer(graph_module, node)
        if node.target in _PRODUCTS:
            return None if self._keeps(layer_name(node)) else self._match_product(graph_module, node)
        return Match((node,)) if self._goes_on(graph_module, node) else None

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        (node,) = match.nodes
        dtype = _DTYPES[self.dtype]
        layer = modules.called_module(graph_module, node)
        if layer is not None and _dtypes(layer) != {dtype}:  # which they are where it is called a second time
            rounded = {
                name: nn.Parameter(own.detach().to(dtype), requires_grad=own.requires_grad)
                for name, own in layer.named_parameters()
            }
            modules.replace_module(graph_module, str(node.target), modules.with_parameters(layer, **rounded))
        for x in _tensors(node) or []:
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
        known = [name for name, _ in graph_module.named_modules() if name]
        products = [layer_name(node) for node in graph_module.graph.nodes if node.target in _PRODUCTS]
        for name in self.keep:
            if name not in known and not any(f"{product}.".startswith(f"{name}.") for product in products):
                raise ConfigError(
                    f'there is no module "{name}"',
                    location="cast-precision.keep",
                    hint=did_you_mean(name, known),
                )

    def _match_layer(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        layer, target = modules.called_module(graph_module, node), str(node.target)
        cls = next((cls for cls in _LAYERS if isinstance(layer, cls)), None)
        if layer is None or cls is None or self._keeps(target):
            return None
        uses, dtypes = usage.uses(graph_module), _dtypes(layer)
        if len(dtypes) > 1:
            return Skip(f"{target}: it mixes dtypes")
        half, known = _DTYPES[self.dtype], [_dtype(call) for call in uses.calls_of(target)]
        # In half precision by this rule, at an earlier call of the same layer, or else from the start.
        if dtypes != {torch.float32} and (dtypes != {half} or half not in known):
            return None
        if _dtype(node) not in (None, torch.float32):
            return None
        reason = folding.why_not_plain(layer, cls) or folding.why_shared(graph_module, target, layer)
        if reason := reason or folding.why_not_dense(layer):
            return Skip(f"{target}: {reason}")
        for call in uses.calls_of(target):
            x = modules.sole_input(call)
            if x is None:
                return Skip(f"{target}: it is not called on a single tensor")
            if _dtype(call) is None or _dtype(x) is None:
                return Skip(f"{target}: dtypes are not known: trace with example inputs")
        if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            return Skip(f"{target}: it renormalises its weight")
        if any(self._overflows(parameter) for parameter in layer.parameters()):
            return Skip(f"{target}: it holds numbers that {self.dtype} does not")
        return Match((node,))

    def _match_product(self, graph_module: GraphModule, node: Node) -> Match | Skip | None:
        tensors = _tensors(node)
        if tensors is None:
            return Skip(f"{node.name}: dtypes are not known: trace with example inputs")
        if node.target is aten.scaled_dot_product_attention.default:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if isinstance(mask, Node) and mask.meta["val"].is_floating_point():
                return Skip(f"{node.name}: its mask is added, and may hold numbers that {self.dtype} does not")
            tensors = [x for x in tensors if x is not mask]
        if {x.meta["val"].dtype for x in tensors} != {torch.float32} or any(
            self._keeps(str(x.target)) for x in tensors
        ):
            return None
        for x in tensors:
            if (value := memory.constant(graph_module, x)) is not None and self._overflows(value):
                return Skip(f"{x.target}: it holds numbers that {self.dtype} does not")
        return Match((node,))

    def _overflows(self, value: torch.Tensor) -> bool:
        return value.numel() > 0 and float(value.detach().abs().max()) > torch.finfo(_DTYPES[self.dtype]).max

    def _goes_on(self, graph_module: GraphModule, node: Node) -> bool:
        """Whether a node can take what it is given in half precision, and all of it is there so."""
        if node.target not in _ONWARD or not (tensors := _tensors(node)):
            return False
        if any(self._half_of(graph_module, x) is None for x in tensors):
            return False
        if node.target in (operator.add, operator.sub, operator.mul):
            # Another number may be too large or too small for half precision.
            return all(isinstance(argument, Node) for argument in node.args)
        if node.target is aten.dropout.default and node.args[2] is not False:
            return False
        # A view of what was cast would not see what is changed in the other.
        return not memory.changed_in_place(graph_module, node)

    def _half_of(self, graph_module: GraphModule, x: Node) -> Node | None:
        """What a value was cast from, if that is in half precision and the two are still the same."""
        if not x.meta.get(_CAST) or x.args[1] is not torch.float32 or memory.changed_in_place(graph_module, x):
            return None
        (half, _) = x.args
        assert isinstance(half, Node)
        return half if half.meta["val"].dtype is _DTYPES[self.dtype] else None

    def _lowered(self, graph_module: GraphModule, node: Node, x: Node) -> Node:
        """A value in half precision, to be read by a node."""
        if (half := self._half_of(graph_module, x)) is not None:
            return half
        dtype = _DTYPES[self.dtype]
        if _is_read_once(graph_module, x):
            parent, name = modules.parent_of(graph_module, str(x.target))
            own = parent._parameters[name]
            assert own is not None
            cast_copy = nn.Parameter(own.detach().to(dtype), requires_grad=own.requires_grad)
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
    """What a layer or a product goes by: its module, or the module that it is computed in and its node."""
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    scope = stack[-1][0] if stack else ""
    return f"{scope}.{node.name}" if scope else node.name


def layers_in_half(graph_module: GraphModule) -> list[str]:
    """The layers and products of a graph that are computed in half precision, in its order."""
    found = [node for node in graph_module.graph.nodes if node.op == "call_module" or node.target in _PRODUCTS]
    return list(dict.fromkeys(layer_name(node) for node in found if _dtype(node) in _DTYPES.values()))


def _is_read_once(graph_module: GraphModule, x: Node) -> bool:
    """Whether a node reads a parameter that nothing else reads or changes, and only one user reads it from there."""
    value = memory.constant(graph_module, x)
    if not isinstance(value, nn.Parameter) or len(x.users) > 1:
        return False
    names = [name for name, own in graph_module.named_parameters(remove_duplicate=False) if own is value]
    return names == [x.target] and len(graph_module.graph.find_nodes(op="get_attr", target=x.target)) == 1


def _tensors(node: Node) -> list[Node] | None:
    """The inputs of a node that are tensors; None where that is not known of one."""
    found = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.append(source)
        elif not isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            return None
    return found


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _dtypes(layer: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in layer.parameters()}
