"""Tracing: signatures, dynamic axes at untraced sizes, and unchanged models."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import fx, nn

from optexport.api import symbolic_trace, trace
from optexport.errors import OptexportError, TraceError
from optexport.loading.loader import Loaded
from optexport.testing import graph_state, model_state, outputs
from optexport.transformations import MergeLinears
from tests._helpers import models
from tests._helpers.graphs import Program, calls
from tests._helpers.models import randomise

X = torch.linspace(-2, 2, 20).reshape(5, 4)


class Two(nn.Module):
    """Two inputs, the second of them optional, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.layer(first)
        return {"sum": y if second is None else y + second, "mean": y.mean(-1)}


def _bert_inputs(batch: int = 2, sequence: int = 5) -> dict[str, torch.Tensor]:
    inputs = models.inputs("bert", batch, sequence)
    return {**inputs, "token_type_ids": torch.ones_like(inputs["input_ids"])}


@pytest.mark.slow
def test_input_names_choose_the_inputs_and_their_order() -> None:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    model = models.model("bert")
    graph_module = symbolic_trace(model, input_names=names)
    assert [node.target for node in graph_module.graph.find_nodes(op="placeholder")] == names
    inputs = _bert_inputs()
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        assert torch.equal(graph_module(**inputs).last_hidden_state, want)
        assert torch.equal(graph_module(**dict(reversed(inputs.items()))).last_hidden_state, want)
        assert torch.equal(graph_module(*(inputs[name] for name in names)).last_hidden_state, want)
        assert torch.equal(graph_module(**inputs)[0], want)


@pytest.mark.slow
def test_single_input_is_enough_if_the_model_needs_no_more() -> None:
    model = models.model("bert")
    graph_module = symbolic_trace(model, input_names=["input_ids"], disable_check=True)
    ids = _bert_inputs(3, 7)["input_ids"]
    with torch.no_grad():
        assert torch.equal(graph_module(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state)


def test_names_of_parameters_and_modules_match_the_model() -> None:
    model, graph_module = models.model("bert"), models.traced("bert")
    assert {n for n, _ in graph_module.named_parameters()} == {n for n, _ in model.named_parameters()}
    own = dict(model.named_modules())
    for node in graph_module.graph.find_nodes(op="call_module"):
        assert type(own[node.target]) is type(graph_module.get_submodule(node.target))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name in models.NAMES if name not in ("resnet", "vit", "groupvit")])
def test_every_batch_and_sequence_size_works(name: str) -> None:
    model, graph_module = models.model(name), models.traced(name)
    options = {"use_cache": False} if name in ("bart", "llama", "t5") else {}
    for batch, sequence in itertools.product((1, 2, 5), (2, 3, 33)):
        inputs = models.inputs(name, batch, sequence)
        with torch.no_grad():
            want, got = model(**inputs, **options), graph_module(**inputs)
        torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)


def test_images_of_another_size_work_if_the_model_takes_them() -> None:
    model, graph_module = models.model("resnet"), models.traced("resnet")
    for batch, height, width in ((1, 32, 32), (3, 48, 64), (2, 96, 33)):
        pixels = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            torch.testing.assert_close(graph_module(pixel_values=pixels)[0], model(pixel_values=pixels)[0])


def test_plain_module_without_inputs_goes_through_torch_fx() -> None:
    graph_module = symbolic_trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    assert [node.op for node in graph_module.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert "val" not in next(iter(graph_module.graph.nodes)).meta


def test_plain_module_with_inputs_is_exported() -> None:
    model = randomise(Two())
    both = {"first": X, "second": torch.randn(5, 3)}
    graph_module = symbolic_trace(model, example_inputs=both)
    assert all("val" in call.meta for call in calls(graph_module, nn.Linear))
    for batch in (2, 3, 11):
        inputs = {"first": torch.randn(batch, 4), "second": torch.randn(batch, 3)}
        want, got = model(**inputs), graph_module(**inputs)
        assert list(got) == ["sum", "mean"]
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_input_names_choose_among_the_example_inputs() -> None:
    both = {"first": X, "second": torch.randn(5, 3)}
    graph_module = symbolic_trace(randomise(Two()), input_names=["first"], example_inputs=both)
    assert [node.target for node in graph_module.graph.find_nodes(op="placeholder")] == ["first"]


def test_name_without_a_tensor_is_an_error_with_the_name() -> None:
    with pytest.raises(TraceError, match="example_inputs: the tensors for third are missing"):
        symbolic_trace(Two(), input_names=["first", "third"], example_inputs={"first": X})


def test_unknown_input_of_a_transformers_model_is_named() -> None:
    with pytest.raises(TraceError, match="input pixel_values: BertModel has no input of this name"):
        symbolic_trace(models.model("bert"), input_names=["pixel_values"])


def test_input_that_is_not_a_tensor_is_named() -> None:
    with pytest.raises(TraceError, match=r"input second: not a tensor \(found int\)"):
        trace(Two(), {"first": X, "second": 3})  # type: ignore[dict-item]
    with pytest.raises(OptexportError, match=r"neither tensors by name.*\n.*inputs of Two: first, second"):
        symbolic_trace(Two(), example_inputs={"first": X, "second": 3})  # type: ignore[dict-item]


def test_example_inputs_may_be_positional() -> None:
    model, second = randomise(Two()), torch.randn(5, 3)
    graph_module = symbolic_trace(model, example_inputs=(X, second))
    assert [node.target for node in graph_module.graph.find_nodes(op="placeholder")] == ["first", "second"]
    assert torch.equal(graph_module(X, second)["sum"], model(X, second)["sum"])


def test_untraceable_module_asks_for_inputs() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(
        TraceError, match=r"Branches: torch\.fx could not trace the model without inputs.*\n.*Pass example_inputs"
    ):
        symbolic_trace(Branches())
    graph_module = symbolic_trace(Branches(), example_inputs={"x": X})
    assert torch.equal(graph_module(-X.abs()), X.abs())


def test_inputs_refused_by_the_model_are_named_as_the_cause() -> None:
    with pytest.raises(TraceError, match=r"the model itself fails on the inputs first \[5, 7\]"):
        symbolic_trace(Two(), example_inputs={"first": torch.randn(5, 7)})


def test_graph_module_is_copied_unchanged() -> None:
    graph_module = fx.symbolic_trace(
        randomise(Program(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(4, 3), k=nn.Linear(4, 3)))
    )
    before, own = graph_state(graph_module), model_state(graph_module)
    copied = symbolic_trace(graph_module)
    assert copied is not graph_module
    assert graph_state(copied) == before
    MergeLinears()(copied)
    assert graph_state(graph_module) == before
    assert model_state(graph_module) == own
    assert copied.graph is not graph_module.graph


def test_copied_graph_module_can_be_undone() -> None:
    layers = {name: nn.Linear(4, 3) for name in "qkv"}
    graph_module = fx.symbolic_trace(randomise(Program(lambda m, x: m.k(x) * m.q(x) * m.v(x), **layers)))
    before = graph_state(graph_module)
    copied = symbolic_trace(MergeLinears()(graph_module))
    assert graph_state(MergeLinears()(copied, reverse=True)) == before


def test_graph_module_with_inputs_is_kept_and_gets_shapes() -> None:
    layers = {name: nn.Linear(4, 3) for name in "qk"}
    graph_module = fx.symbolic_trace(randomise(Program(lambda m, x: m.q(x) * m.k(x) / 3, **layers)))
    text = str(graph_module.graph)
    copied = symbolic_trace(graph_module, example_inputs={"x": X})
    assert str(copied.graph) == text
    assert all(call.meta["val"].dim() == 2 for call in calls(copied, nn.Linear))
    assert torch.equal(outputs(copied, X)[0], outputs(graph_module, X)[0])


def test_exported_program_is_reconstructed() -> None:
    model = randomise(Program(lambda m, x: m.layer(x), layer=nn.Linear(4, 3)))
    program = torch.export.export(model, (), {"x": X}, dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    traced = trace(program, {"x": X})
    assert len(calls(traced.graph_module, nn.Linear)) == 1
    assert [spec.name for spec in traced.signature.inputs] == ["x"]
    assert torch.equal(outputs(traced.graph_module, X[:3])[0], model(X[:3]))


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize("name", models.NAMES)
def test_callers_transformers_model_is_not_changed(name: str) -> None:
    model = models.model(name)
    before, config = model_state(model), copy.deepcopy(model.config.to_dict())
    random_state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    symbolic_trace(model)
    after = model_state(model)
    assert [key for key in before if after.get(key) != before[key]] == []
    assert after.keys() == before.keys()
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled() == grad


@pytest.mark.parametrize("training", [False, True])
def test_callers_plain_module_is_not_changed(training: bool) -> None:
    model = randomise(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))).train(training)
    before, x = model_state(model), X.clone()
    symbolic_trace(model)
    symbolic_trace(model, example_inputs={"input": x})
    assert model_state(model) == before
    assert torch.equal(x, X)


@pytest.mark.slow
def test_failed_trace_of_a_transformers_model_changes_nothing() -> None:
    model = models.model("llama")
    before, config = model_state(model), copy.deepcopy(model.config.to_dict())
    with pytest.raises(TraceError, match=r"the model itself fails on the inputs input_ids \[2, 3, 4\]"):
        symbolic_trace(model, example_inputs={"input_ids": torch.ones(2, 3, 4, dtype=torch.int64)})
    assert model_state(model) == before
    assert model.config.to_dict() == config


@pytest.mark.slow
def test_failed_trace_of_a_module_in_train_mode_changes_nothing() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.dropout(m.norm(x))
        return x if x.sum() > 0 else -x

    model = Program(body, norm=nn.BatchNorm1d(4), dropout=nn.Dropout(0.5)).train()
    before, random_state = model_state(model), torch.get_rng_state()
    with pytest.raises(TraceError, match="branches on values at .* and writes to its state"):
        symbolic_trace(model, example_inputs={"x": X})
    assert model_state(model) == before
    assert torch.equal(torch.get_rng_state(), random_state)


def test_input_changed_in_place_by_the_model_keeps_its_values() -> None:
    x = X.clone()
    symbolic_trace(Program(lambda _, x: x.add_(1) * 2), example_inputs={"x": x})
    assert torch.equal(x, X)


@pytest.mark.slow
def test_tracing_a_model_twice_gives_the_same_graph() -> None:
    first = symbolic_trace(models.model("albert"))
    assert str(first.graph) == str(models.traced("albert").graph)
    assert list(first.state_dict()) == list(models.traced("albert").state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_get_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model = copy.deepcopy(models.model("vit")).to(dtype)
    graph_module: Any = symbolic_trace(model)
    pixels = models.inputs("vit")["pixel_values"].to(dtype)
    with torch.no_grad():
        assert torch.equal(graph_module(pixel_values=pixels).logits, model(pixel_values=pixels).logits)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1] if x.sum() > 3 else x + 1


def test_branch_to_another_shape_is_an_error_with_the_line() -> None:
    with pytest.raises(TraceError, match=r"test_trace\.py:\d+: return x\[:1\] if x\.sum\(\) > 3") as raised:
        trace(Branching(), {"x": X})
    assert raised.value.exit_code == 3
    assert raised.value.hint


def test_module_moved_to_its_own_device_is_traced() -> None:
    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = models.model("bert"), nn.Linear(16, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.head = self.head.to(torch.float32)
            return self.head(self.bert(input_ids).pooler_output)

    model = Moved()
    inputs = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    with torch.no_grad():
        torch.testing.assert_close(trace(model, inputs).graph_module(**inputs), model(**inputs))


def test_non_modules_and_unknown_inputs_are_refused() -> None:
    with pytest.raises(TraceError, match="not a module"):
        symbolic_trace("bert-base-uncased")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"forward takes other inputs \(expected input, found x\)"):
        symbolic_trace(nn.Linear(4, 4), ["x"])


@pytest.mark.slow
def test_program_with_a_keyword_as_a_name_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("in", nn.Linear(4, 4))
    program = torch.export.export(model, (torch.randn(2, 4),))
    with pytest.raises(TraceError, match="a module has a name that cannot be part of Python code"):
        Loaded.from_program(program)


class Remembers(nn.Module):
    """Caches a table, and computes it again for longer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 2:
            self.register_buffer("longer", torch.ones(x.shape[1]))
            self.beside = torch.ones(3)
        return x * 2


def test_state_cached_during_the_trace_is_not_kept() -> None:
    """A transformers model with two tables of positions could not be run or traced again."""
    model = Remembers().eval()
    for _ in range(2):
        trace(model, {"x": torch.randn(2, 5)})
        assert list(dict(model.named_buffers())) == ["table"]
        assert not hasattr(model, "beside")
