"""RemoveNoOps: removes operations that return their input unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport._utils import aten_ops
from optexport.transformations.analysis import axes, bounds, folding, memory, modes, modules, usage
from optexport.transformations.rule import Match, Rule, Skip

aten = torch.ops.aten

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPOUT_OPERATORS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default)
_COPIES = (aten._to_copy.default, aten.clone.default)
# Views with all elements of their input in the same order. They are no-ops if the shape stays the same.
_SAME_ORDER = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim)
_SAME_SHAPE = (*_SAME_ORDER, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.alias.default)
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_CONJUNCTIONS = ("__and__", "bitwise_and", "logical_and")
_CONTIGUOUS = (torch.contiguous_format, 0)  # a schema stores the default as a number


@dataclass(frozen=True)
class NoOp(Match):
    """A node that returns the same as another one.

    Attributes:
        source: The other node.
    """

    source: Node


@dataclass(frozen=True)
class RemoveNoOps(Rule):
    """Removes operations that return their input unchanged.

    f(x)  ->  x

    f is an inactive dropout; ``nn.Identity``; a cast to the dtype and device of x; ``contiguous`` or ``clone`` of a
    contiguous x; a view, reshape, expansion, slice or permutation with the same result, at all sizes; two of them that
    cancel; or a conjunction of a mask with an all-true one that only attention reads. Without its casts, the graph is
    valid only for the dtype of the trace. If an axis of unknown size is squeezed, all views stay, because the trace
    does not know their shape.

    Skips:   a dropout in train mode; a module with hooks, of a subclass or with another forward; a view or copy in
             memory that is changed in place; a copy that becomes an output; an output that would then be an input, a
             parameter, or the same tensor as another output.
    Exact:   bit-exact.
    Inverse: none, because the nodes are removed, with their names and positions.
    """

    def match(self, graph_module: GraphModule, node: Node) -> NoOp | Skip | None:
        result = find_no_op(graph_module, node)
        if not isinstance(result, NoOp):
            return result
        source = result.source
        for user in node.users:
            if user.op == "output" and (source.op in ("placeholder", "get_attr") or user in source.users):
                return Skip(f"{node.name} is an output, and {source.name} cannot be one in its place")
        return result

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, NoOp)
        node, between = match.nodes[-1], match.nodes[:-1]
        node.replace_all_uses_with(match.source)
        for unused in (node, *between):
            graph_module.graph.erase_node(unused)
        if node.op == "call_module":
            uses, target = usage.uses(graph_module), str(node.target)
            shared = folding.find_sharing_problem(graph_module, target, graph_module.get_submodule(target))
            if not shared and not uses.calls_of(target):
                modules.remove_module(graph_module, target)
        return []


def find_no_op(graph_module: GraphModule, node: Node) -> NoOp | Skip | None:
    """Returns the no-op if a node returns the same as another node, a near miss, or None."""
    result = _find_no_op(graph_module, node)
    # For example, a view without gradients is not a no-op.
    reason = modes.find_mode_problem(graph_module, (result.source, node)) if isinstance(result, NoOp) else None
    return Skip(reason) if reason else result


def find_local_no_op(graph_module: GraphModule, node: Node) -> NoOp | None:
    """Returns a no-op whose nodes directly follow its source, or None."""
    result = find_no_op(graph_module, node)
    is_local = isinstance(result, NoOp) and result.source in result.nodes[0].all_input_nodes
    return result if isinstance(result, NoOp) and is_local else None


def _find_no_op(graph_module: GraphModule, node: Node) -> NoOp | Skip | None:
    if node.op == "call_module":
        return _match_module(graph_module, node)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if modules.operator_name(node) in _CONJUNCTIONS:
        return _match_conjunction(graph_module, node)
    arguments = aten_ops.arguments(node)
    if node.target in _DROPOUT_OPERATORS:
        return Skip("the dropout is in train mode") if arguments["train"] is not False else NoOp((node,), source)
    if node.target is aten.contiguous.default and arguments.get("memory_format") in _CONTIGUOUS:
        return NoOp((node,), source) if _is_contiguous(graph_module, source) else None
    value, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    if node.target in axes.PERMUTATIONS or node.target in _SAME_SHAPE:
        return _match_view(graph_module, node, source)
    kind, kind_before = ((tensor.dtype, tensor.device, tensor.layout) for tensor in (value, before))
    if kind != kind_before or arguments.get("pin_memory"):
        return None
    return _match_cast_or_copy(graph_module, node, source, arguments)


def _match_cast_or_copy(
    graph_module: GraphModule, node: Node, source: Node, arguments: dict[str, Any]
) -> NoOp | Skip | None:
    memory_format = arguments.get("memory_format")
    copies = node.target in _COPIES or (node.target in _CASTS and arguments.get("copy"))
    if node.target in _CASTS and memory_format in (None, torch.preserve_format) and not copies:
        return NoOp((node,), source)
    if copies and memory_format in (None, torch.preserve_format, *_CONTIGUOUS):
        return _match_copy(graph_module, node, source)
    return None


def _match_module(graph_module: GraphModule, node: Node) -> NoOp | Skip | None:
    module = modules.called_module(graph_module, node)
    if not isinstance(module, (*_DROPOUTS, nn.Identity)):
        return None
    (cls,) = {cls for cls in (*_DROPOUTS, nn.Identity) if isinstance(module, cls)}
    source = modules.sole_input(node)
    if reason := folding.find_plain_problem(module, cls):
        return Skip(f"{node.target}: {reason}")
    if source is None:
        return Skip(f"{node.target}: the module is not called with a single tensor")
    if module.training and cls is not nn.Identity:
        return Skip(f"{node.target}: the dropout is in train mode")
    return NoOp((node,), source)


def _match_conjunction(graph_module: GraphModule, node: Node) -> NoOp | None:
    """Matches the conjunction of a mask with one that hides nothing."""
    for mask in _effective_masks(graph_module, node):
        if _same_shape(node, mask) or (_broadcasts_alike(node, mask) and _only_masks_attention(graph_module, node)):
            return None if memory.changed_in_place(graph_module, node) else NoOp((node,), mask)
    return None


def _effective_masks(graph_module: GraphModule, node: Node) -> list[Node]:
    """Returns the operands of a conjunction that equal its result, except for the shape."""
    masks = node.all_input_nodes
    values = [operand.meta.get("val") for operand in (node, *masks)]
    if len(masks) != 2 or modules.operator_name(node) not in _CONJUNCTIONS:
        return []
    if any(not isinstance(value, torch.Tensor) or value.dtype != torch.bool for value in values):
        return []
    pairs = (masks, masks[::-1])
    return [mask for mask, partner in pairs if bounds.bounds(graph_module, partner) == (1, 1)]


def _broadcasts_alike(node: Node, mask: Node) -> bool:
    """Returns True if attention accepts a mask instead of another, which may have more rows."""
    shape, mask_shape = node.meta["val"].shape, mask.meta["val"].shape
    return len(shape) == len(mask_shape) and statically_known_true(shape[-1] == mask_shape[-1])


def _only_masks_attention(graph_module: GraphModule, node: Node) -> bool:
    """Returns True if all users of a mask are attention, or no-ops whose users are."""
    attention = aten.scaled_dot_product_attention.default
    return all(
        node not in (*user.args[:3], *user.args[4:])
        if user.target is attention
        else isinstance(_find_no_op(graph_module, user), NoOp) and _only_masks_attention(graph_module, user)
        for user in node.users
    )


def _match_view(graph_module: GraphModule, node: Node, source: Node) -> NoOp | Skip | None:
    """Matches a view that equals its input, or that cancels the view before it."""
    before = source.args[0] if source.op == "call_function" and source.args else None
    squeezes = (
        squeeze for target in _SQUEEZES for squeeze in graph_module.graph.find_nodes(op="call_function", target=target)
    )
    if any(map(_may_squeeze, squeezes)):
        return None  # after it, shapes may differ from the traced shapes
    if _changes_nothing(graph_module, node, source):
        result = NoOp((node,), source)
    elif isinstance(before, Node) and _cancels(node, source, before):
        result = NoOp((source, node) if len(source.users) == 1 else (node,), before)
    else:
        return None
    # An in-place change may affect the shape of one view only.
    return Skip(f"{node.name} is changed in place") if memory.changed_in_place(graph_module, node) else result


def _may_squeeze(node: Node) -> bool:
    """Returns True if a squeeze removes an axis at some sizes only.

    The trace assumes unknown sizes to be 2 or more.
    """
    x, *removed = cast(tuple[Node, int | list[int]], node.args)
    value = x.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    squeezed = range(len(sizes)) if not removed else [removed[0]] if isinstance(removed[0], int) else removed[0]
    return any(not modules.is_fixed(sizes[axis]) for axis in squeezed if sizes)


def _changes_nothing(graph_module: GraphModule, node: Node, source: Node) -> bool:
    is_mask = node.target is aten.expand.default and source.meta["val"].dtype == torch.bool
    if is_mask and _broadcasts_alike(node, source):
        return _same_shape(node, source) or _only_masks_attention(graph_module, node)
    if order := axes.permutation(node):
        return order == sorted(order)
    return node.target in _SAME_SHAPE and _same_shape(node, source)


def _cancels(node: Node, source: Node, before: Node) -> bool:
    """Returns True if a view of a view equals the original value."""
    if (order := axes.permutation(node)) and (order_before := axes.permutation(source)):
        return [order_before[axis] for axis in order] == sorted(order)
    return node.target in _SAME_ORDER and source.target in _SAME_ORDER and _same_shape(node, before)


def _match_copy(graph_module: GraphModule, node: Node, source: Node) -> NoOp | Skip | None:
    if not _is_contiguous(graph_module, source):
        return None
    if memory.changed_in_place(graph_module, node) or memory.changed_in_place(graph_module, source):
        return Skip(f"{node.name} or {source.name} is changed in place")
    if memory.reaches_output(graph_module, node):
        return Skip(f"{node.name} is an output, or shares memory with one")
    return NoOp((node,), source)


def _is_contiguous(graph_module: GraphModule, node: object) -> bool:
    """Returns True if a result is always contiguous.

    The strides in ``meta`` are wrong for some slices.
    """
    if not isinstance(node, Node):
        return False
    module = modules.called_module(graph_module, node)
    if module is not None:
        plain = not modules.has_hooks(module) and "forward" not in vars(module)
        return type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding) and plain
    if node.target is aten.contiguous.default:
        return aten_ops.arguments(node).get("memory_format") in _CONTIGUOUS
    return node.target in (*_SAME_ORDER, aten.dropout.default) and _is_contiguous(graph_module, node.args[0])


def _same_shape(a: Node, b: Node) -> bool:
    shapes = [n.meta["val"].shape if isinstance(n.meta.get("val"), torch.Tensor) else None for n in (a, b)]
    if shapes[0] is None or shapes[1] is None or len(shapes[0]) != len(shapes[1]):
        return False
    return all(statically_known_true(x == y) for x, y in zip(*shapes, strict=True))
