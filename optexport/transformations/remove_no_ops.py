"""What hands its input on as it is goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexport._utils import aten_ops
from optexport.transformations.analysis import bounds, folding, memory, modes, modules, usage
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
# Views that give every element of their input, in its order: they change nothing where the shape stays.
_SAME_ORDER = (aten.view.default, aten.unsqueeze.default, aten.squeeze.dim)
_SAME_SHAPE = (*_SAME_ORDER, aten.reshape.default, aten.expand.default, aten.slice.Tensor, aten.alias.default)
_PERMUTATIONS = (aten.transpose.int, aten.permute.default, aten.t.default)
_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_CONJUNCTIONS = ("__and__", "bitwise_and", "logical_and")
_CONTIGUOUS = (torch.contiguous_format, 0)  # as it is given, and as a schema writes it


@dataclass(frozen=True)
class Pass(Match):
    """A node that gives what another one gives already.

    Attributes:
        source: That other node.
    """

    source: Node


@dataclass(frozen=True)
class RemoveNoOps(Rule):
    """f(x)  ->  x, where f changes nothing

    Dropout outside of training; ``nn.Identity``; casts to the dtype and device that the value has; ``contiguous`` and
    ``clone`` of what is contiguous; views, reshapes, expansions, slices and permutations that give what they got, also
    at sizes that are not known; two of them that cancel; and conjunctions of a mask with one that is true throughout,
    where attention, which broadcasts masks, is all that reads them. A graph that lost a cast is one for the dtype that
    it was traced in.

    Views stay where the trace cannot know their shape: where an axis of unknown size is squeezed, which may be 1.

    Skips:   a dropout in train mode; a module with hooks, of a subclass or with another forward; a view or copy in
             memory that is changed in place, and a copy that becomes an output; an output that would then be an input,
             a parameter, or the same tensor as another output.
    Exact:   to the bit.
    Inverse: none, because nodes that are gone could only be made anew, under other names.
    """

    def match(self, graph_module: GraphModule, node: Node) -> Pass | Skip | None:
        found = hands_on(graph_module, node)
        if not isinstance(found, Pass):
            return found
        for user in node.users:
            source = found.source
            if user.op == "output" and (source.op in ("placeholder", "get_attr") or user in source.users):
                return Skip(f"{node.name} is an output, and {source.name} would be it in its place")
        return found

    def rewrite(self, graph_module: GraphModule, match: Match) -> list[tuple[Node, Any]]:
        assert isinstance(match, Pass)
        node, between = match.nodes[-1], match.nodes[:-1]
        node.replace_all_uses_with(match.source)
        for unused in (node, *between):
            graph_module.graph.erase_node(unused)
        if node.op == "call_module":
            uses, target = usage.uses(graph_module), str(node.target)
            shared = folding.why_shared(graph_module, target, graph_module.get_submodule(target))
            if not shared and not uses.calls_of(target):
                modules.remove_module(graph_module, target)
        return []


def hands_on(graph_module: GraphModule, node: Node) -> Pass | Skip | None:
    """Whether a node gives just what another one does: its input, mostly."""
    found = _found(graph_module, node)
    # A view or a copy without gradients is more than its input.
    reason = modes.why_apart(graph_module, (found.source, node)) if isinstance(found, Pass) else None
    return Skip(reason) if reason else found


def _found(graph_module: GraphModule, node: Node) -> Pass | Skip | None:
    if node.op == "call_module":
        return _module(graph_module, node)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if modules.operator_name(node) in _CONJUNCTIONS:
        return _conjunction(graph_module, node)
    given = aten_ops.arguments(node)
    if node.target in _DROPOUT_OPERATORS:
        return Skip("it is in train mode") if given["train"] is not False else Pass((node,), source)
    layout = given.get("memory_format")
    if node.target is aten.contiguous.default and layout in _CONTIGUOUS:
        return Pass((node,), source) if _is_contiguous(graph_module, source) else None
    value, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    if node.target in _PERMUTATIONS or node.target in _SAME_SHAPE:
        return _view(graph_module, node, source)
    kinds = [(tensor.dtype, tensor.device, tensor.layout) for tensor in (value, before)]
    if kinds[0] != kinds[1] or given.get("pin_memory"):
        return None
    copies = node.target in _COPIES or (node.target in _CASTS and given.get("copy"))
    if node.target in _CASTS and layout in (None, torch.preserve_format) and not copies:
        return Pass((node,), source)
    if copies and layout in (None, torch.preserve_format, *_CONTIGUOUS):
        return _copy(graph_module, node, source)
    return None


def handed_through(graph_module: GraphModule, node: Node) -> Pass | None:
    """The same, where the nodes of the match are all that stands between a node and that other one."""
    found = hands_on(graph_module, node)
    whole = isinstance(found, Pass) and found.source in found.nodes[0].all_input_nodes
    return found if isinstance(found, Pass) and whole else None


def _module(graph_module: GraphModule, node: Node) -> Pass | Skip | None:
    module = modules.called_module(graph_module, node)
    if not isinstance(module, (*_DROPOUTS, nn.Identity)):
        return None
    (cls,) = {cls for cls in (*_DROPOUTS, nn.Identity) if isinstance(module, cls)}
    source = modules.sole_input(node)
    if reason := folding.why_not_plain(module, cls):
        return Skip(f"{node.target}: {reason}")
    if source is None:
        return Skip(f"{node.target}: it is not called on a single tensor")
    if module.training and cls is not nn.Identity:
        return Skip(f"{node.target}: it is in train mode")
    return Pass((node,), source)


def _conjunction(graph_module: GraphModule, node: Node) -> Pass | None:
    """A mask that is joined with one that hides nothing."""
    for mask in _kept_masks(graph_module, node):
        if _same_shape(node, mask) or (_broadcasts_alike(node, mask) and _only_masks_attention(graph_module, node)):
            return None if memory.changed_in_place(graph_module, node) else Pass((node,), mask)
    return None


def _kept_masks(graph_module: GraphModule, node: Node) -> list[Node]:
    """The operands that a conjunction is the same as, but for its shape; none of any other node."""
    masks = node.all_input_nodes
    values = [operand.meta.get("val") for operand in (node, *masks)]
    if len(masks) != 2 or modules.operator_name(node) not in _CONJUNCTIONS:
        return []
    if any(not isinstance(value, torch.Tensor) or value.dtype != torch.bool for value in values):
        return []
    return [mask for mask, other in (masks, masks[::-1]) if bounds.bounds(graph_module, other) == (1, 1)]


def _broadcasts_alike(node: Node, mask: Node) -> bool:
    """Whether attention takes the one mask as well as the other, which may have one row in place of many."""
    one, other = node.meta["val"].shape, mask.meta["val"].shape
    return len(one) == len(other) and statically_known_true(one[-1] == other[-1])


def _only_masks_attention(graph_module: GraphModule, node: Node) -> bool:
    """Whether attention is all that reads a mask, or what goes too, and that attention alone reads."""
    attention = aten.scaled_dot_product_attention.default
    return all(
        node not in (*user.args[:3], *user.args[4:])
        if user.target is attention
        else isinstance(_found(graph_module, user), Pass) and _only_masks_attention(graph_module, user)
        for user in node.users
    )


def _view(graph_module: GraphModule, node: Node, source: Node) -> Pass | Skip | None:
    """A view that gives what it got, or two that do together."""
    before = source.args[0] if source.op == "call_function" and source.args else None
    squeezes = (
        squeeze for target in _SQUEEZES for squeeze in graph_module.graph.find_nodes(op="call_function", target=target)
    )
    if any(map(_may_squeeze, squeezes)):
        return None  # from there on shapes are not those of the trace
    if _changes_nothing(graph_module, node, source):
        found = Pass((node,), source)
    elif isinstance(before, Node) and _cancels(node, source, before):
        found = Pass((source, node) if len(source.users) == 1 else (node,), before)
    else:
        return None
    # What is changed in place may be more than the numbers: the shape of one view, and not that of another.
    return Skip(f"{node.name} is changed in place") if memory.changed_in_place(graph_module, node) else found


def _may_squeeze(node: Node) -> bool:
    """Whether a result has an axis less at some sizes than in the trace, which takes an unknown one to be 2 or more."""
    x, *axes = cast(tuple[Node, int | list[int]], node.args)
    value = x.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    squeezed = range(len(sizes)) if not axes else [axes[0]] if isinstance(axes[0], int) else axes[0]
    return any(not modules.is_fixed(sizes[axis]) for axis in squeezed if sizes)


def _changes_nothing(graph_module: GraphModule, node: Node, source: Node) -> bool:
    if (
        node.target is aten.expand.default
        and source.meta["val"].dtype == torch.bool
        and _broadcasts_alike(node, source)
    ):
        return _same_shape(node, source) or _only_masks_attention(graph_module, node)
    if order := _permutation(node):
        return order == sorted(order)
    return node.target in _SAME_SHAPE and _same_shape(node, source)


def _cancels(node: Node, source: Node, before: Node) -> bool:
    """Whether a view gives again what another one was made of."""
    if (order := _permutation(node)) and (order_before := _permutation(source)):
        return [order_before[axis] for axis in order] == sorted(order)
    return node.target in _SAME_ORDER and source.target in _SAME_ORDER and _same_shape(node, before)


def _copy(graph_module: GraphModule, node: Node, source: Node) -> Pass | Skip | None:
    if not _is_contiguous(graph_module, source):
        return None
    if memory.changed_in_place(graph_module, node) or memory.changed_in_place(graph_module, source):
        return Skip(f"{node.name} or {source.name} is changed in place")
    if memory.reaches_output(graph_module, node):
        return Skip(f"{node.name} is an output, or one lies in its memory")
    return Pass((node,), source)


def _is_contiguous(graph_module: GraphModule, node: object) -> bool:
    """Whether a node's result is contiguous for sure; the strides in ``meta`` say so of slices that are not, too."""
    if not isinstance(node, Node):
        return False
    module = modules.called_module(graph_module, node)
    if module is not None:
        plain = not modules.has_hooks(module) and "forward" not in vars(module)
        return type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding) and plain
    if node.target is aten.contiguous.default:
        return aten_ops.arguments(node).get("memory_format") in _CONTIGUOUS
    return node.target in (*_SAME_ORDER, aten.dropout.default) and _is_contiguous(graph_module, node.args[0])


def _permutation(node: Node) -> list[int]:
    """The axis of its input that each axis of a permutation's result is; empty where a node is none."""
    value, args = node.meta.get("val"), list[Any](node.args)
    if node.target not in _PERMUTATIONS or not isinstance(value, torch.Tensor) or node.kwargs or not value.dim():
        return []
    rank = value.dim()
    if node.target is aten.permute.default:
        return [axis % rank for axis in args[1]]
    one, other = (axis % rank for axis in args[1:] or (0, -1))
    axes = list(range(rank))
    axes[one], axes[other] = axes[other], axes[one]
    return axes


def _same_shape(node: Node, other: Node) -> bool:
    shapes = [n.meta["val"].shape if isinstance(n.meta.get("val"), torch.Tensor) else None for n in (node, other)]
    if shapes[0] is None or shapes[1] is None or len(shapes[0]) != len(shapes[1]):
        return False
    return all(statically_known_true(one == two) for one, two in zip(*shapes, strict=True))
