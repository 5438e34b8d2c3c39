"""Tests that a model with upcast weights computes the same as a float64 copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from optexport._utils import model_memory
from optexport.parity import float64_model
from optexport.parity.cases.case import Case
from optexport.parity.reference_run import run_original, to_float64
from tests._helpers import models
from tests.parity.network import call


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64_model, "_LARGE_PARAMETER", 1)
    monkeypatch.setattr(model_memory, "LARGE_MODEL", 1)


def _leaves(outputs: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _check_same(model: nn.Module, *inputs: torch.Tensor, **batch: torch.Tensor) -> None:
    with torch.no_grad():
        results = [
            _leaves(double(*inputs, **batch))
            for double in (float64_model.copy_to_float64(model), float64_model.copy_upcasting_weights(model))
        ]
    assert results[0]
    for one, expected in zip(*results, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-13)


_FAST = ("bert", "llama", "resnet")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", [name if name in _FAST else pytest.param(name, marks=pytest.mark.nightly) for name in models.NAMES]
)
def test_outputs_match_a_float64_copy(name: str, dtype: torch.dtype) -> None:
    _check_same(copy.deepcopy(models.model(name)).to(dtype), **to_float64(models.inputs(name)))


@pytest.mark.parametrize(
    "layer",
    [nn.LSTM(8, 6, 2, bidirectional=True), nn.TransformerEncoderLayer(8, 2, 12), nn.MultiheadAttention(8, 2)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_checking_weight_types_match_a_float64_copy(layer: nn.Module) -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    _check_same(models.randomise(layer), *([x] * 3 if isinstance(layer, nn.MultiheadAttention) else [x]))


def test_large_weights_share_memory_and_report_float64() -> None:
    model = models.model("llama")
    double = float64_model.copy_upcasting_weights(model)
    shared = dict(model.named_parameters())
    for name, weight in double.named_parameters():
        assert isinstance(weight, nn.Parameter)
        assert weight.stored.data_ptr() == shared[name].data_ptr()
        assert (weight.dtype, weight.shape, weight.device) == (torch.float64, shared[name].shape, torch.device("cpu"))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_code_bypassing_torch_functions_reads_nan() -> None:
    weight = next(float64_model.copy_upcasting_weights(models.model("bert")).parameters())
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(weight.isnan().all())


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    double = float64_model.copy_upcasting_weights(model)
    assert double[0].weight is double[1].weight


class Refers(nn.Module):
    """A layer whose weight is also referenced outside its registered parameters."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        match way:
            case "list":
                self.others = [self.layer.weight]
            case "dict":
                self.others = {0: self.layer.weight}
            case "unregistered":
                self.__dict__["others"] = (self.layer.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.others[0].to(x.dtype)


@pytest.mark.parametrize("way", ["list", "dict", "unregistered"])
def test_every_reference_to_a_weight_is_upcast(way: str) -> None:
    model, x = models.randomise(Refers(way)), torch.randn(3, 8, dtype=torch.float64)
    double = float64_model.copy_upcasting_weights(model)
    assert double.others[0] is double.layer.weight
    assert double.layer.weight.stored.data_ptr() == model.layer.weight.data_ptr()
    assert torch.equal(double(x), float64_model.copy_to_float64(model)(x))


class Writes(nn.Module):
    """Writes to its weight in the forward pass, or reads it past the torch function override."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.way:
            case "in place":
                self.weight.zero_().add_(x.abs().amax())
            case "by a view":
                self.weight.view(2, 2).fill_(float(x.sum()))
            case "by data":
                self.weight.data.fill_(float(x.sum()))
            case "unseen":
                with torch._C.DisableTorchFunctionSubclass():
                    return x / self.weight
        return x / self.weight


class Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


def _scripted() -> nn.Module:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        return Calls(torch.jit.script(nn.Linear(4, 4)))


@pytest.mark.parametrize("way", ["in place", "by a view", "by data", "unseen", "scripted"])
def test_a_model_incompatible_with_upcasting_is_copied(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = (_scripted() if way == "scripted" else Writes(way)).eval()
    cases = [Case(f"{size} rows", {"x": torch.randn(size, 4)}) for size in (1, 3)]
    reference = run_original(call, model, cases)
    monkeypatch.setattr(model_memory, "LARGE_MODEL", 1 << 60)
    expected = run_original(call, model, cases)
    assert reference.fallback is expected.fallback is None
    for upcast, copied in zip(reference.exact, expected.exact, strict=True):
        assert torch.equal(upcast["y"], copied["y"])


@pytest.mark.slow
def test_a_large_model_is_not_copied_for_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module) -> nn.Module:
        raise AssertionError(f"{type(model).__name__} is copied")

    monkeypatch.setattr(float64_model, "copy_to_float64", refuse)
    batch = models.inputs("bert")
    reference = run_original(
        lambda model, inputs: {"y": model(**inputs).last_hidden_state}, models.model("bert"), [Case("only", batch)]
    )
    assert reference.fallback is None
    assert 0 < reference.noise[0]["y"] < 1e-4
