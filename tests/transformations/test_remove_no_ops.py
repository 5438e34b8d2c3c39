"""RemoveNoOps removes no-ops only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from optexport import symbolic_trace
from optexport.testing import assert_same, check_applied, check_laws, check_refused, copy_sharing_modules, outputs
from optexport.transformations import MergeLinears, RemoveNoOps, compose
from optexport.transformations.analysis import modules
from optexport.transformations.rule import run
from tests._helpers import models
from tests._helpers.graphs import Program, by_export, by_fx
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
aten = torch.ops.aten


def _fixed(body: Any, **children: nn.Module | nn.Parameter) -> GraphModule:
    """Traces with fixed sizes."""
    program = randomise(Program(body, **children))
    return symbolic_trace(program, example_inputs={"x": X}, dynamic={})


def _called(graph_module: GraphModule) -> list[str]:
    calls = [node for node in graph_module.graph.nodes if node.op.startswith("call")]
    return [getattr(node.target, "__name__", node.target) for node in calls]


def _left(graph_module: GraphModule) -> list[str]:
    """Applies the rule and returns the names of the remaining operations."""
    return _called(run(RemoveNoOps(), copy_sharing_modules(graph_module))[0])


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: F.dropout(x.tanh(), 0.5, training=False),
        lambda m, x: F.dropout2d(x.tanh(), 0.5, training=False),
        lambda m, x: F.alpha_dropout(x.tanh(), 0.5, training=False),
        lambda m, x: x.tanh().float(),
        lambda m, x: x.tanh().to("cpu", torch.float32),
        lambda m, x: x.tanh().expand(2, 3, 4),
        lambda m, x: x.tanh().expand(-1, -1, 4),
        lambda m, x: x.tanh().view(2, -1, 4),
        lambda m, x: x.tanh().reshape(x.shape),
        lambda m, x: x.tanh()[:, :, 0:],
        lambda m, x: x.tanh()[:, :3],
        lambda m, x: x.tanh().permute(0, 1, 2),
        lambda m, x: x.tanh().transpose(1, -2),
        lambda m, x: x.tanh().transpose(1, 2).transpose(2, 1),
        lambda m, x: x.tanh().transpose(0, 2).permute(2, 1, 0),
        lambda m, x: x.tanh().permute(1, 2, 0).permute(2, 0, 1),
        lambda m, x: x.tanh().view(6, 4).view(2, 3, 4),
        lambda m, x: x.tanh().unsqueeze(1).squeeze(1),
        lambda m, x: F.dropout(F.dropout(x.tanh().view(2, 3, 4), 0.1, training=False).float()[:], training=False),
    ],
)
def test_no_ops_are_removed(body: Any) -> None:
    graph_module = _fixed(body)
    check_laws(RemoveNoOps(), graph_module, X, exact=True)
    assert _left(graph_module) == ["tanh.default"]


@pytest.mark.slow
def test_no_ops_are_removed_at_unknown_sizes() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = (x * 2).view(batch, -1, width)[:, :length].expand(batch, length, width)
        return y.view(batch * length, width).view(batch, length, width).reshape(batch, length, -1)

    graph_module = symbolic_trace(Program(body), example_inputs={"x": X}, dynamic={"x": {0: "batch", 1: "length"}})
    check_laws(RemoveNoOps(), graph_module, X, exact=True)
    assert not {"view.default", "reshape.default", "slice.Tensor", "expand.default"} & set(_left(graph_module))
    larger = torch.ones(5, 7, 4)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    assert_same(outputs(changed, larger), outputs(graph_module, larger), "another size")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: x.tanh().double(),
        lambda m, x: x.tanh()[:, :2],
        lambda m, x: x.tanh()[:, ::2],
        lambda m, x: x.tanh().view(2, 12),
        lambda m, x: x.tanh().view(4, 3, 2),
        lambda m, x: x.tanh().transpose(1, 2),
        lambda m, x: x.tanh().permute(1, 2, 0).permute(1, 2, 0),
        lambda m, x: x.tanh().transpose(1, 2).reshape(2, 3, 4),
        lambda m, x: x.tanh().transpose(1, 2).contiguous().transpose(1, 2),
        lambda m, x: x.tanh()[:1].expand(2, 3, 4),
        lambda m, x: x.tanh().clone(),  # tanh may keep non-contiguous strides
        lambda m, x: F.dropout(x.tanh(), 0.0, training=False) + F.dropout1d(x[0], 0.5, training=True) * 0,
    ],
)
def test_operations_with_an_effect_stay(body: Any) -> None:
    graph_module = _fixed(body)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    names = [node.name for node in graph_module.graph.nodes if node.target is not aten.dropout.default]
    assert [node.name for node in changed.graph.nodes] == names
    check_laws(RemoveNoOps(), graph_module, X, exact=True)


@pytest.mark.slow
def test_transposition_with_another_reader_stays() -> None:
    graph_module = by_export(X, lambda m, x: (y := x.tanh().transpose(1, 2)).transpose(1, 2) @ y)
    check_applied(RemoveNoOps(), graph_module, X, exact=True)
    assert _left(graph_module) == ["tanh.default", "transpose.int", "matmul.default"]


def test_dropout_and_identity_modules() -> None:
    children = {"drop": nn.Dropout(0.5), "same": nn.Identity(), "layer": nn.Linear(4, 4)}
    graph_module = by_fx(lambda m, x: m.same(m.layer(m.drop(input=x))), **children)
    check_applied(RemoveNoOps(), graph_module, X, count=2, exact=True)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    assert [name for name, _ in changed.named_children()] == ["layer"]


def test_a_module_with_two_calls_or_two_names() -> None:
    drop = nn.Dropout(0.5, inplace=True)
    graph_module = by_fx(lambda m, x: m.one(m.layer(m.one(x))), one=drop, two=drop, layer=nn.Linear(4, 4))
    check_applied(RemoveNoOps(), graph_module, X, count=2, exact=True)


def test_dropout_in_train_mode_stays() -> None:
    graph_module = by_fx(lambda m, x: m.drop(x) * 1, drop=nn.Dropout(0.5))
    graph_module.get_submodule("drop").train()
    check_refused(RemoveNoOps(), graph_module, X, "drop: the dropout is in train mode")
    raised = by_export(X, lambda m, x: F.dropout(x, 0.5, training=True) * 1)
    check_refused(RemoveNoOps(), raised, X, "the dropout is in train mode")


def test_subclassed_or_hooked_dropout_stays() -> None:
    class Louder(nn.Dropout):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return input * 2

    graph_module = by_fx(lambda m, x: m.drop(x) * 1, drop=nn.Dropout())
    graph_module.add_module("drop", Louder().eval())
    check_refused(RemoveNoOps(), graph_module, X, "drop: Louder is a subclass")
    hooked = by_fx(lambda m, x: m.drop(x) * 1, drop=nn.Identity())
    hooked.get_submodule("drop").register_forward_hook(lambda module, args, result: result * 2)
    check_refused(RemoveNoOps(), hooked, X, "drop: the module has hooks")


@pytest.mark.slow
def test_contiguous_and_clone_of_a_layers_result_are_removed() -> None:
    graph_module = _fixed(lambda m, x: m.layer(x).view(6, 4).clone() * 2, layer=nn.Linear(4, 4))
    check_applied(RemoveNoOps(), graph_module, X, exact=True)
    assert _left(graph_module) == ["layer", "view.default", "mul"]
    # torch.export omits contiguous if the input is contiguous.
    graph_module = by_fx(
        lambda m, x: aten.contiguous.default(aten.contiguous.default(m.layer(x))), layer=nn.Linear(4, 4)
    )
    check_applied(RemoveNoOps(), graph_module, X, count=2, exact=True)


@pytest.mark.slow
def test_contiguous_of_a_slice_of_merged_linears_stays() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.q(x).contiguous().view(-1) * m.k(x).contiguous().view(-1)

    graph_module = by_export(X, body, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    check_laws(compose(MergeLinears(), RemoveNoOps()), graph_module, X)
    check_laws(compose(RemoveNoOps(), MergeLinears()), graph_module, X)


@pytest.mark.slow
def test_copy_that_separates_memory_stays() -> None:
    def changed(m: Any, x: torch.Tensor) -> Any:
        y = m.layer(x)
        z = y.clone()
        y.add_(1.0)
        return y * 2, z * 2

    graph_module = by_export(X, changed, layer=nn.Linear(4, 4))
    check_refused(RemoveNoOps(), graph_module, X, "clone or linear is changed in place")
    returned = by_export(X, lambda m, x: ((y := m.layer(x)), y.clone()[0]), layer=nn.Linear(4, 4))
    check_refused(RemoveNoOps(), returned, X, "clone is an output, or shares memory with one")


def test_view_of_memory_changed_in_place_stays() -> None:
    def body(m: Any, x: torch.Tensor) -> Any:
        y = x * 2
        z = y.view(2, 3, 4)
        z.add_(1.0)
        return y + z

    check_refused(RemoveNoOps(), by_export(X, body), X, "view is changed in place")


@pytest.mark.slow
def test_outputs_do_not_become_inputs_or_other_outputs() -> None:
    same = by_export(X, lambda m, x: (x.view(2, 3, 4), x * 2))
    check_refused(RemoveNoOps(), same, X, "view is an output, and x cannot be one in its place")
    parameter = by_export(X, lambda m, x: (m.p.expand(4), x * 2), p=nn.Parameter(torch.ones(4)))
    check_refused(RemoveNoOps(), parameter, X, "expand is an output, and p cannot be one in its place")
    twice = by_export(X, lambda m, x: ((y := x.tanh()), y.view(2, 3, 4)))
    check_refused(RemoveNoOps(), twice, X, "view is an output, and tanh cannot be one in its place")


def test_output_may_become_a_computed_tensor() -> None:
    graph_module = by_export(X, lambda m, x: F.dropout(x.tanh().view(2, 3, 4), training=False))
    check_applied(RemoveNoOps(), graph_module, X, count=2, exact=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    graph_module = by_export(X.to(dtype), lambda m, x: (x * 2).to(dtype).float() * 2)
    check_applied(RemoveNoOps(), graph_module, X.to(dtype), exact=True)


def test_an_empty_tensor() -> None:
    empty = torch.ones(0, 3)
    check_applied(RemoveNoOps(), by_export(empty, lambda m, x: (x * 2)[:, 0:]), empty, exact=True)


def test_only_shape_independent_no_ops_go_without_shapes() -> None:
    graph_module = by_fx(lambda m, x: m.drop(aten.view.default(x, [2, 3, 4])) * 1, drop=nn.Dropout())
    check_applied(RemoveNoOps(), graph_module, X, exact=True)
    assert _left(graph_module) == ["view.default", "mul"]


def _masked(join: Any) -> Program:
    """Attention with the conjunction of a key mask and a mask with a row per query."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keys = (x[:, :, 0] > 0)[:, None, None, :]
        rows = torch.arange(x.shape[1])[None, None, :, None] + 0
        y = x[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=join(keys, rows))

    return Program(forward)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "join",
    [lambda keys, rows: keys & (rows >= 0), lambda keys, rows: torch.logical_and(rows > -1, keys)],
    ids=["and", "logical_and"],
)
def test_a_mask_that_hides_nothing_is_removed(join: Any) -> None:
    graph_module = symbolic_trace(_masked(join), example_inputs={"x": X}, dynamic={"x": {0: "batch", 1: "sequence"}})
    check_laws(RemoveNoOps(), graph_module, {"x": X}, exact=True)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    (attention,) = changed.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    assert attention.args[3].meta["val"].shape[2] == 1
    for size in (1, 7):
        x = torch.randn(3, size, 4)
        assert torch.equal(changed(x), graph_module(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "join",
    [
        lambda keys, rows: keys & (rows >= 1),
        lambda keys, rows: keys | (rows >= 0),
        lambda keys, rows: (keys & (rows >= 0)) | (rows >= 1),
        lambda keys, rows: keys[..., :1] & (rows.mT >= 0),
    ],
    ids=["it hides a row", "a union", "another reads it", "a column for all keys"],
)
def test_other_masks_stay_joined(join: Any) -> None:
    graph_module = symbolic_trace(_masked(join), example_inputs={"x": X}, dynamic={"x": {0: "batch", 1: "sequence"}})
    joins = [name for name in _called(graph_module) if name in ("__and__.Tensor", "__or__.Tensor")]
    assert joins
    assert [name for name in _left(graph_module) if name in joins] == joins


def test_redundant_mask_of_the_same_shape_is_removed() -> None:
    assert "__and__.Tensor" not in _left(_fixed(lambda m, x: ((x > 0) & (x.new_ones(x.shape) > 0)).float() * x))


def test_a_graph_before_and_after() -> None:
    graph_module = _fixed(lambda m, x: F.dropout(m.layer(x), training=False).float() + x, layer=nn.Linear(4, 4))
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    assert str(changed.graph).strip() == (
        "graph():\n"
        "    %x : [num_users=2] = placeholder[target=x]\n"
        "    %linear : [num_users=1] = call_module[target=layer](args = (%x,), kwargs = {})\n"
        "    %add : [num_users=1] = call_function[target=operator.add](args = (%linear, %x), kwargs = {})\n"
        "    return (add,)"
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "places"), [("bert", 16), ("llama", 32), ("t5", 56), ("vit", 8), ("resnet", 0)])
def test_models(name: str, places: int) -> None:
    _, report = run(RemoveNoOps(), copy_sharing_modules(models.traced(name)))
    assert len(report.changes) == places


@pytest.mark.slow
def test_the_casts_of_a_norm_stay_in_half_precision() -> None:
    config = LlamaConfig(
        vocab_size=60, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = randomise(LlamaForCausalLM(config)).to(torch.bfloat16)
    graph_module = symbolic_trace(model)
    ids = torch.randint(0, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    check_laws(RemoveNoOps(), graph_module, inputs, exact=True)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    assert len(changed.graph.find_nodes(op="call_function", target=aten.to.dtype)) >= 6


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (x * 2).squeeze(0) + 1,
        lambda m, x: (x * 2).squeeze(-2) + 1,
        lambda m, x: (x * 2).unsqueeze(2).squeeze(1).unsqueeze(1) + 1,
        lambda m, x: (x * 2).squeeze(1).view(x.shape) + 1,
        lambda m, x: (x * 2).view(x.shape).squeeze(0) + 1,
        lambda m, x: ((x * 2).squeeze((0, 1)) + 1).view(x.shape),
        lambda m, x: ((x * 2).squeeze() + 1).reshape(x.shape),
    ],
)
def test_an_axis_of_a_size_that_may_be_1_is_still_squeezed(body: Any) -> None:
    graph_module = by_export(X, body)
    changed, _ = run(RemoveNoOps(), copy_sharing_modules(graph_module))
    assert "squeeze" in [modules.operator_name(node) for node in changed.graph.nodes]
    for size in ((2, 3, 4), (1, 3, 4), (1, 1, 4)):
        x = torch.ones(size)
        try:
            want = outputs(graph_module, x)
        except RuntimeError:
            continue
        assert_same(outputs(changed, x), want, str(size))


@pytest.mark.slow
def test_an_axis_that_was_added_is_squeezed_at_any_size() -> None:
    graph_module = by_export(X, lambda m, x: (x * 2).unsqueeze(1).squeeze(1) + 1)
    check_applied(RemoveNoOps(), graph_module, X[:1, :1], exact=True)
    assert _left(graph_module) == ["mul", "add"]


@pytest.mark.slow
def test_views_that_share_only_sizes_do_not_cancel() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y, z = (x * 2).view(batch, length, width), (x * 3).view(batch * length, width)
        return y + z.add_(1.0).view(batch, length, width)

    graph_module = by_export(X, body)
    check_applied(RemoveNoOps(), graph_module, X, exact=True)
