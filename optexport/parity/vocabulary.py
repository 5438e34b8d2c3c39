"""What the values of inputs stand for: ids of an embedding, whose number is known, sizes, or a mask."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from optexport.signature.signature import Signature

# What hands ids on as they are, but for their shape and dtype.
_SHAPING = {"expand", "flatten", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose", "unflatten"}
_PASSES_ON = {*_SHAPING, "unsqueeze", "view", "alias", "clone", "contiguous", "detach", "int", "long", "to"}


def vocabularies(graph_module: fx.GraphModule, signature: Signature) -> dict[str, int]:
    """The number of ids that each input may hold: the rows of the smallest embedding that it goes into.

    Only what goes there directly, or through casts and changes of shape, counts: of positions that the model computes
    from an input nothing is known.
    """
    found: dict[str, int] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for spec, placeholder in zip(signature.inputs, placeholders, strict=True):
        if spec.torch_dtype.is_floating_point:
            continue
        rows = [_rows(graph_module, node) for node in _embeddings(graph_module, placeholder)]
        if rows:
            found[spec.name] = min(rows)
    return found


def sized_by_values(graph_module: fx.GraphModule) -> bool:
    """Whether sizes hang on the values of inputs, as those of ``repeat_interleave`` and of what ``item`` gives."""
    return any(free_unbacked_symbols(node.meta.get("val")) for node in graph_module.graph.nodes)


def attention_masks(graph_module: fx.GraphModule, signature: Signature) -> set[str]:
    """The inputs that go into attentions alone, as a mask does that is added to their scores."""
    found = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for spec, placeholder in zip(signature.inputs, placeholders, strict=True):
        if {_operator(user) for user in _uses(placeholder)} - {"sym_size"} == {"scaled_dot_product_attention"}:
            found.add(spec.name)
    return found


def _embeddings(graph_module: fx.GraphModule, placeholder: fx.Node) -> list[fx.Node]:
    """The embeddings that a placeholder goes into as their ids."""
    modules = [user for user in _uses(placeholder) if user.op == "call_module"]
    return [user for user in modules if isinstance(graph_module.get_submodule(str(user.target)), nn.Embedding)]


def _uses(placeholder: fx.Node) -> Iterator[fx.Node]:
    """What takes a placeholder, through casts and changes of shape, but for these."""
    seen, waiting = {placeholder}, [placeholder]
    while waiting:
        node = waiting.pop()
        for user in [user for user in node.users if user not in seen]:
            seen.add(user)
            if user.op != "call_module" and _operator(user) in _PASSES_ON and user.args and user.args[0] is node:
                waiting.append(user)
            else:
                yield user


def _rows(graph_module: fx.GraphModule, node: fx.Node) -> int:
    embedding = graph_module.get_submodule(str(node.target))
    assert isinstance(embedding, nn.Embedding)
    return embedding.num_embeddings


def _operator(node: fx.Node) -> str:
    """The bare name of what a node calls: ``view`` of ``aten.view.default``, and of a tensor's method ``view``."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(node.target if packet is None else packet.__name__)
