"""KeepOutputs keeps named outputs bit-exact, and removes operations that only other outputs need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from optexport import symbolic_trace
from optexport.errors import ConfigError
from optexport.signature.signature import flatten_outputs
from optexport.testing import assert_same, copy_sharing_modules, model_state, outputs
from optexport.transformations import KeepOutputs
from tests._helpers import models
from tests._helpers.graphs import Program, by_export, by_fx, graph_of, leaves
from tests._helpers.models import randomise

X = torch.randn(3, 4)


def _three(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = m.first(x)
    return {"a": y, "b": m.second(y), "c": m.third(y)}


_CHILDREN = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 3), "third": nn.Linear(4, 2)}


@pytest.mark.sample(7)
@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize("names", [("a",), ("b",), ("c", "a"), ("a", "b", "c")])
def test_only_selected_outputs_and_their_inputs_stay(names: tuple[str, ...], trace: str) -> None:
    original = by_fx(_three, **_CHILDREN) if trace == "fx" else by_export(X, _three, **_CHILDREN)
    before = model_state(original)
    want = dict(zip("abc", outputs(original, X), strict=True))
    changed = KeepOutputs(outputs=names)(copy_sharing_modules(original))
    assert list(flatten_outputs(changed(X))) == sorted(names)
    assert_same(outputs(changed, X), [want[name] for name in sorted(names)], "kept")
    modules = {name for name, _ in changed.named_children()}
    assert modules == {"first"} | ({"second"} if "b" in names else set()) | ({"third"} if "c" in names else set())
    assert model_state(original) == before
    code = changed.code
    assert KeepOutputs(outputs=names)(changed).code == code


def test_all_outputs_stay_without_names() -> None:
    original = by_export(X, _three, **_CHILDREN)
    assert KeepOutputs()(copy_sharing_modules(original)).code == original.code


def test_unknown_output_name_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match='keep-outputs: the graph has no output "pooled"') as caught:
        KeepOutputs(outputs=("a", "pooled"))(by_export(X, _three, **_CHILDREN))
    assert caught.value.exit_code == 2


def test_unnamed_outputs_have_their_usual_names() -> None:
    original = by_export(X, lambda m, x: (m.first(x), m.second(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 3))
    assert list(KeepOutputs(outputs=("output_1",))(original)(X)) == ["output_1"]


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_in_place_changes_for_a_kept_output_stay(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = m.first(x)
        y[:, 0].mul_(0.0)
        return {"a": y, "b": m.second(x)}

    children = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 3)}
    original = by_fx(body, **children) if trace == "fx" else by_export(X, body, **children)
    want = outputs(original, X)[:1]
    assert_same(outputs(KeepOutputs(outputs=("a",))(original), X), want, "kept")


def test_input_that_is_no_longer_read_stays_an_input() -> None:
    model = randomise(Program(lambda m, x: {"a": m.first(x), "b": x + 1}, first=nn.Linear(4, 4)))
    changed = KeepOutputs(outputs=("b",))(symbolic_trace(model, example_inputs={"x": X}))
    assert [node.target for node in changed.graph.find_nodes(op="placeholder")] == ["x"]
    assert not list(changed.parameters())


def test_the_outputs_of_a_model_of_transformers() -> None:
    original = models.traced("bert")
    (name, *_), (want, *_) = zip(*flatten_outputs(original(**models.inputs("bert"))).items(), strict=True)
    got = KeepOutputs(outputs=(name,))(copy_sharing_modules(original))(**models.inputs("bert"))
    assert list(got) == [name]
    assert torch.equal(got[name], want)


class Holding(nn.TransformerEncoderLayer):
    """A leaf layer of torch.fx that contains a container of the caller."""

    def __init__(self) -> None:
        super().__init__(4, 2, 8, batch_first=True)
        self.held = nn.Module()
        self.held.one, self.held.two = nn.Linear(4, 4), nn.Linear(4, 4)


Holding.__module__ = "torch.nn"


@pytest.mark.parametrize(
    ("layer", "body"),
    [
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda m, x: {"a": m.t(x), "b": m.t.linear1(x)}),
        (nn.MultiheadAttention(4, 2), lambda m, x: {"a": m.t(x, x, x)[0], "b": x @ m.t.in_proj_weight.t()}),
        (Holding(), lambda m, x: {"a": m.t(x), "b": m.t.held.one(x)}),
    ],
)
def test_modules_held_by_the_caller_keep_their_parts(layer: nn.Module, body: Any) -> None:
    model = randomise(Program(body, t=layer))
    original = graph_of(model)
    before, want = model_state(model), outputs(model, X)
    assert_same(outputs(KeepOutputs(outputs=("b",))(original), X), want[1:], "kept")
    assert model_state(model) == before
    assert_same(outputs(model, X), want, "the caller's")


@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)])
def test_statistics_updated_for_a_kept_output_stay(norm: nn.Module, trace: str) -> None:
    x = X[:, :, None].expand(3, 4, 2) * torch.tensor([1.0, 2.0])
    model = randomise(Program(lambda m, x: {"y": m.norm(x), "b": x + m.norm.running_mean[:, None]}, norm=norm)).train()
    original = graph_of(model) if trace == "fx" else symbolic_trace(model, example_inputs={"x": x})
    want = outputs(original, x)[1:]
    assert_same(outputs(KeepOutputs(outputs=("b",))(copy_sharing_modules(original)), x), want, "kept")


def test_rows_renormalized_for_a_kept_output_stay() -> None:
    def body(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": m.e(x), "b": x.float() @ m.e.weight}

    ids = torch.tensor([[0, 1, 2]])
    for rescaling in (nn.Embedding(3, 4, max_norm=0.1), nn.Embedding(3, 4)):
        original = graph_of(randomise(Program(body, e=rescaling)))
        changed = KeepOutputs(outputs=("b",))(copy_sharing_modules(original))
        assert_same(outputs(changed, ids), outputs(original, ids)[1:], "kept")
        assert len(changed.graph.find_nodes(op="call_module")) == (rescaling.max_norm is not None)


def _of_chance(draw: Any) -> Any:
    return lambda m, x: {"gone": draw(m, x), "kept": torch.rand_like(x) + F.dropout(x, 0.5, True)}


class _Stirs(nn.Module):
    """A foreign module that draws random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)


def _in_a_region(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.drop(x @ x.mT)


_DRAWS = {
    "dropout in a region": _in_a_region,
    "dropout": lambda m, x: m.drop(x),
    "dropout in a sequence": lambda m, x: m.sequence(x),
    "function": lambda m, x: F.dropout(x, 0.5),
    "noise": lambda m, x: torch.bernoulli(x.sigmoid()),
    "method": lambda m, x: x.sigmoid().bernoulli(),
    "gumbel": lambda m, x: F.gumbel_softmax(x),
    "leaky": lambda m, x: F.rrelu(x, training=True),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "recurrent": lambda m, x: m.recurrent(x[None])[0],
    "foreign": lambda m, x: m.stirs(x),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize("how", _DRAWS)
def test_kept_output_gets_the_same_random_numbers(how: str, trace: str) -> None:
    children = {"drop": nn.Dropout(0.5), "sequence": nn.Sequential(nn.Dropout(0.5)), "stirs": _Stirs()}
    children["recurrent"] = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    program = Program(_of_chance(_DRAWS[how]), **children).train()
    original = leaves(program) if trace == "fx" else symbolic_trace(program, example_inputs={"x": X})
    _, want = outputs(original, X)
    assert_same(outputs(KeepOutputs(outputs=("kept",))(copy_sharing_modules(original)), X), [want], "kept")


_IDLE = {
    "dropout": lambda m, x: m.drop(x),
    "function": lambda m, x: F.dropout(x, 0.5, False),
    "leaky": lambda m, x: F.rrelu(x),
    "attention": lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize("how", _IDLE)
def test_operations_without_random_numbers_are_removed(how: str, trace: str) -> None:
    program = Program(lambda m, x: {"gone": _IDLE[how](m, x), "kept": x + 1}, drop=nn.Dropout(0.5)).eval()
    original = leaves(program) if trace == "fx" else symbolic_trace(program, example_inputs={"x": X})
    changed = KeepOutputs(outputs=("kept",))(original)
    assert [node.op for node in changed.graph.nodes if "sym_size" not in node.name] == [
        *("placeholder", "call_function", "output")
    ]


class _Inner(nn.Module):
    """An inner graph with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):  # type: ignore[no-untyped-def]
        self.seen.add_(x.sum(0))
        return x + self.seen


_STATEFUL: dict[str, Any] = {
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "fake quantiser": FakeQuantize,
    "observer": MinMaxObserver,
    "graph": lambda: torch.fx.symbolic_trace(_Inner()),
}


@pytest.mark.parametrize("how", _STATEFUL)
def test_state_updated_for_a_removed_output_stays(how: str) -> None:
    program = Program(lambda m, x: {"gone": m.layer(x * 3), "kept": m.layer(x)}, layer=_STATEFUL[how]()).train()
    original = leaves(program)
    _, want = outputs(original, X)
    assert_same(outputs(KeepOutputs(outputs=("kept",))(copy_sharing_modules(original)), X), [want], "kept")
    assert len(original.graph.find_nodes(op="call_module")) == 2


def test_parametrization_in_eval_mode_updates_no_state() -> None:
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    program = Program(lambda m, x: {"gone": m.layer(x * 3), "kept": m.layer(x)}, layer=layer).eval()
    changed = KeepOutputs(outputs=("kept",))(leaves(program))
    assert len(changed.graph.find_nodes(op="call_module")) == 1


def test_change_of_an_object_input_stays() -> None:
    class Logs(nn.Module):
        def forward(self, x, log):  # type: ignore[no-untyped-def]
            log.append(x * 2)
            return {"gone": x * 3, "kept": x.sum(0)}

    log: list[torch.Tensor] = []
    KeepOutputs(outputs=("kept",))(torch.fx.symbolic_trace(Logs()))(X, log)
    assert_same(log, [X * 2], "what was appended")


def test_random_integers_stay_if_several_schemas_fit() -> None:
    original = by_fx(lambda m, x: {"gone": torch.randint_like(x, 5), "kept": torch.rand_like(x)})
    _, want = outputs(original, X)
    assert_same(outputs(KeepOutputs(outputs=("kept",))(original), X), [want], "kept")


def test_torch_vmap_is_removed_or_kept_as_a_whole() -> None:
    def body(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gone": x + 1, "kept": torch.vmap(m.layer)(x)}

    original = by_export(X, body, layer=nn.Linear(4, 4))
    want, _ = outputs(original, X)[::-1]
    assert_same(outputs(KeepOutputs(outputs=("kept",))(original), X), [want], "kept")
