"""Meaning of input values, read from the graph: embedding ids, sizes or masks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from optexport.config.inputs import TensorConfig
from optexport.signature.signature import Signature

# Operators that pass ids through, changing only their shape and dtype.
_SHAPING = {"expand", "flatten", "permute", "reshape", "select", "slice", "squeeze", "t", "transpose", "unflatten"}
_PASSES_ON = {*_SHAPING, "unsqueeze", "view", "alias", "clone", "contiguous", "detach", "int", "long", "to"}


def vocabularies(graph_module: fx.GraphModule, signature: Signature) -> dict[str, int]:
    """Returns the number of valid ids per input: the rows of its smallest embedding.

    Only inputs that reach an embedding directly, or through casts and shape changes, are included. The range of
    computed positions is unknown.
    """
    counts: dict[str, int] = {}
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for spec, placeholder in zip(signature.inputs, placeholders, strict=True):
        if spec.torch_dtype.is_floating_point:
            continue
        rows = [_rows(graph_module, node) for node in _embeddings(graph_module, placeholder)]
        if rows:
            counts[spec.name] = min(rows)
    return counts


def describe_unchecked_ids(counts: Mapping[str, int], declared: Mapping[str, TensorConfig]) -> tuple[str, ...]:
    """Describes the declared ids that an embedding does not have, so that no case contains them.

    Args:
        counts: The result of `vocabularies`.
        declared: Tables of inputs with generated values.
    """
    return tuple(
        f"{name} from {count:,}: the model has {count:,} ids, from 0 to {count - 1:,}"
        for name, count in counts.items()
        if name in declared and math.ceil(declared[name].high or 0) > count
    )


def has_value_dependent_sizes(graph_module: fx.GraphModule) -> bool:
    """Returns True if sizes depend on input values, for example by ``repeat_interleave``."""
    return any(free_unbacked_symbols(node.meta.get("val")) for node in graph_module.graph.nodes)


def attention_masks(graph_module: fx.GraphModule, signature: Signature) -> set[str]:
    """Returns the inputs that reach only attention operators, as masks added to scores do."""
    masks = set()
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    for spec, placeholder in zip(signature.inputs, placeholders, strict=True):
        if {_operator(user) for user in _uses(placeholder)} - {"sym_size"} == {"scaled_dot_product_attention"}:
            masks.add(spec.name)
    return masks


def _embeddings(graph_module: fx.GraphModule, placeholder: fx.Node) -> list[fx.Node]:
    """Returns the embeddings that use a placeholder as ids."""
    modules = [user for user in _uses(placeholder) if user.op == "call_module"]
    return [user for user in modules if isinstance(graph_module.get_submodule(str(user.target)), nn.Embedding)]


def _uses(placeholder: fx.Node) -> Iterator[fx.Node]:
    """Yields the users of a placeholder, following casts and shape changes."""
    visited, waiting = {placeholder}, [placeholder]
    while waiting:
        node = waiting.pop()
        for user in [user for user in node.users if user not in visited]:
            visited.add(user)
            if user.op != "call_module" and _operator(user) in _PASSES_ON and user.args and user.args[0] is node:
                waiting.append(user)
            else:
                yield user


def _rows(graph_module: fx.GraphModule, node: fx.Node) -> int:
    embedding = graph_module.get_submodule(str(node.target))
    assert isinstance(embedding, nn.Embedding)
    return embedding.num_embeddings


def _operator(node: fx.Node) -> str:
    """Returns the bare operator name: ``view`` for ``aten.view.default`` and for the method."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(node.target if packet is None else packet.__name__)
