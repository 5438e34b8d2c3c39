"""Tests the reference run, in the original precision and in float64, and its noise floor."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.errors import ParityError, TraceError
from optexport.parity import reference_run
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker
from optexport.parity.noise_floor import FALLBACK_ULPS, measure_tolerances
from optexport.parity.reference import THROUGHOUT
from optexport.parity.reference_run import run_original
from optexport.signature.signature import Batch, Dim
from tests._helpers.exports import quick
from tests._helpers.models import randomise
from tests.parity.network import EPS, Tensors, call, network


def test_the_floor_is_the_distance_to_the_same_model_in_float64() -> None:
    model, cases = network()
    reference = run_original(call, model, cases)
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        distances = [(model(c.batch["x"]).double() - double(c.batch["x"].double())).abs().max() for c in cases]
    assert measure_tolerances(reference, 4.0)["y"].floor == float(max(distances))


def test_measuring_leaves_the_model_unchanged() -> None:
    model, cases = network()
    before = copy.deepcopy(model.state_dict())
    run_original(call, model, cases)
    assert all(torch.equal(value, before[name]) and value.dtype is torch.float32
               for name, value in model.state_dict().items())  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("in_other_ways", [True, False])
def test_rounding_on_a_device_is_part_of_the_noise_floor(in_other_ways: bool) -> None:
    model, cases = network()
    reference = run_original(call, model, cases, batched=() if in_other_ways else None)

    def coarse(model: nn.Module, batch: Batch) -> Tensors:
        return {"y": call(model, batch)["y"] + 1e-3}

    on_device = reference_run._run_on_device("cpu", coarse, model, reference)
    assert on_device.variations == (*reference.variations, "on cpu")
    assert measure_tolerances(on_device, 4.0)["y"].floor == pytest.approx(1e-3, rel=1e-2)
    assert all(
        torch.equal(one["y"], expected["y"]) for one, expected in zip(on_device.exact, reference.exact, strict=True)
    )
    same = reference_run._run_on_device("cpu", call, model, reference)
    assert same.noise == reference.noise


class Ashore(nn.Module):
    """Creates a tensor on the CPU, even if its inputs are on another device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(1).expand(3)[torch.arange(3)]


def test_a_model_failing_on_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run_original(call, Ashore(), [Case("only", {"x": torch.ones(3)})])
    with pytest.raises(TraceError, match=r"Ashore: the original model fails on meta: .*\nHint: Create tensors in the"):
        reference_run._run_on_device("meta", call, Ashore(), reference)  # type: ignore[arg-type]


class Stubborn(nn.Module):
    """Fails in float64, because one operand is always float32 and not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [torch.full((6, 3), 0.3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.held[0]


def test_a_model_failing_in_float64_falls_back_with_a_reason() -> None:
    reference = run_original(call, Stubborn(), [Case("only", {"x": torch.ones(2, 6)})])
    assert reference.fallback is not None
    assert reference.fallback.startswith("RuntimeError")
    assert torch.equal(reference.exact[0]["y"], reference.outputs[0]["y"])
    tolerance = measure_tolerances(reference, 4.0)["y"]
    assert tolerance.floor == 0.0
    size = float(reference.outputs[0]["y"].abs().max())
    assert tolerance.limit == pytest.approx(4 * FALLBACK_ULPS * EPS * size)


class MasksInFloat32(nn.Module):
    """Multiplies zero by the smallest float64, which is infinite in float32, so the result is NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x, -1) / 3
        mask = torch.zeros(x.shape[-1], dtype=torch.float32)
        return scores + (mask.float() * torch.finfo(x.dtype).min).to(scores.dtype)


def test_mask_values_too_large_for_float32_keep_a_noise_floor() -> None:
    """The float64 results were all NaN, so the floor was 0 and other roundings failed."""
    cases = [Case(name, {"x": torch.randn(4, 60)}) for name in ("traced", "other")]
    reference = run_original(call, MasksInFloat32(), cases, batched=["x"])
    assert reference.fallback is None
    expected = torch.softmax(cases[0].batch["x"].double(), -1) / 3
    torch.testing.assert_close(reference.exact[0]["y"], expected, rtol=1e-14, atol=0)
    assert 0 < measure_tolerances(reference, 4.0)["y"].floor < EPS


class TimesFloat32(nn.Module):
    """Multiplies a float32 tensor by its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float() * torch.arange(6))


def test_float32_casts_become_float64_if_the_weights_need_it() -> None:
    """The reference fell back to the original's own precision."""
    model, batch = TimesFloat32(), {"x": torch.randn(2, 6)}
    reference = run_original(call, model, [Case("only", batch)])
    assert reference.fallback is None
    weight, bias = model.linear.weight.detach().double(), model.linear.bias.detach().double()
    expected = (batch["x"].double() * torch.arange(6)) @ weight.T + bias
    torch.testing.assert_close(reference.exact[0]["y"], expected, rtol=1e-14, atol=1e-14)


class Sinusoids(nn.Module):
    """Sine waves with lengths computed from integers, in float32 even if the weights are float64."""

    def __init__(self, base: float = 1e4) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.exp(torch.arange(8) * (-math.log(self.base) / 8))
        return x[..., None] + (torch.arange(x.shape[1])[:, None] * lengths).sin()


@pytest.mark.slow
def test_fixed_float32_computations_are_part_of_the_noise_floor(tmp_path: Path) -> None:
    """An error of one ulp in a length moves the wave at position 2,000 by 2,000 ulps."""
    checked = [Case("traced", {"x": torch.zeros(1, 9)}), Case("long", {"x": torch.zeros(1, 2000)})]
    reference = run_original(call, Sinusoids(), checked)
    assert reference.variations == ("in float64 throughout",)
    targets, steps = torch.arange(2000, dtype=torch.float64), torch.arange(8, dtype=torch.float64)
    waves = (targets[:, None] * torch.exp(steps * (-math.log(1e4) / 8))).sin()
    assert float((waves - reference.exact[1]["y"][0]).abs().max()) > 100 * EPS
    # Eight times its own rounding, which is less than two units in the last place here.
    assert measure_tolerances(reference, 4.0)["y"].floor == reference.noise[1]["y"] == pytest.approx(16 * EPS, rel=1e-3)
    dynamic = {"x": {0: "batch", 1: Dim("places", 2, 2048)}}
    x = torch.linspace(-1, 1, 18).reshape(2, 9)
    assert quick(Sinusoids(), {"x": x}, tmp_path / "waves", dynamic=dynamic, formats=["onnx"]).passed


class OfPeriods(nn.Module):
    """Returns waves over time stamps of 1985, which float32 rounds to 32 seconds."""

    def __init__(self, dtype: torch.dtype, seconds: int, mark: float, factor: float = 1.0) -> None:
        super().__init__()
        self.dtype, self.seconds, self.mark, self.factor = dtype, seconds, mark, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = (x.float() % self.seconds) / self.seconds * 2 * math.pi
        waves = torch.stack([angle.sin(), angle.cos()], -1).to(self.dtype) * self.factor
        return torch.cat([waves, torch.full_like(waves[:, :1], self.mark)], 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mark", [0.0, -60000.0])
@pytest.mark.parametrize(
    ("dtype", "seconds", "factor"), [(torch.float32, 604_800, 1.0001), (torch.float16, 10_800, 1.02)]
)
def test_float32_loss_hides_no_fault_above_the_other_noise(
    dtype: torch.dtype, seconds: int, factor: float, mark: float
) -> None:
    """The whole loss was part of the floor, which was a thousand times the error of a file."""
    checked = [Case("traced", {"x": torch.arange(500_000_000, 503_000_000, 40_009)})]
    right, wrong = OfPeriods(dtype, seconds, mark), OfPeriods(dtype, seconds, mark, factor)
    reference = run_original(call, right, checked)
    assert reference.variations == (THROUGHOUT,)
    proof = ParityChecker(reference, measure_tolerances(reference, 4.0))
    assert proof.check("right", lambda batch: call(right, dict(batch))).passed
    assert not proof.check("wrong", lambda batch: call(wrong, dict(batch))).passed


def test_a_wrong_wave_is_still_found() -> None:
    checked = [Case("traced", {"x": torch.zeros(1, 9)}), Case("long", {"x": torch.zeros(1, 400)})]
    reference = run_original(call, Sinusoids(), checked)
    proof = ParityChecker(reference, measure_tolerances(reference, 4.0))
    assert not proof.check("here", lambda batch: call(Sinusoids(1.01e4), dict(batch))).passed


@pytest.mark.slow
def test_large_integer_steps_do_not_fail_the_file(tmp_path: Path) -> None:
    """Diffusion steps were checked at 16,777,216, and the error blamed the exporter."""

    class Steps(nn.Module):
        def forward(self, step: torch.Tensor) -> torch.Tensor:
            return (step[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)).cos()

    assert quick(Steps(), {"step": torch.tensor([1, 17, 400, 999])}, tmp_path / "steps", formats=["onnx"]).passed


def test_a_model_without_float32_casts_is_not_run_again() -> None:
    model, cases = network()
    assert THROUGHOUT not in run_original(call, model, cases).variations


class MaskedInFloat32(nn.Module):
    """Uses a float32 mask, which torch 2.13 misreads without an error in float64 on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.eye(33, dtype=torch.bool)
        mask = hidden.float().masked_fill(hidden, -1e9)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_an_attention_mask_unusable_in_float64_keeps_a_floor() -> None:
    cases = [Case(name, {"x": torch.randn(2, 4, 33, 16)}) for name in ("traced", "other")]
    reference = run_original(call, MaskedInFloat32(), cases)
    assert reference.fallback is None
    assert 0 < measure_tolerances(reference, 4.0)["y"].floor < 8 * EPS


class Unsteady(nn.Module):
    """Computes something else in float64, and raises if a cast to float32 has no effect."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.float().dtype != torch.float32:
            raise TypeError("expected float32")
        return x if x.dtype == torch.float32 else -x


def test_a_model_different_in_float64_is_refused() -> None:
    reference = run_original(call, randomise(Unsteady()), [Case("only", {"x": torch.ones(2, 6)})])
    assert reference.fallback is None
    with pytest.raises(ParityError, match="cannot be checked"):
        measure_tolerances(reference, 4.0)


class Coarse(nn.Module):
    """Keeps only four binary digits of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 2.0**19) - 2.0**19


def test_the_hint_names_a_smaller_multiple_if_one_is_enough() -> None:
    reference = run_original(call, Coarse(), [Case("only", {"x": torch.rand(64, 6)})])
    with pytest.raises(ParityError, match="cannot be checked") as caught:
        measure_tolerances(reference, 4.0)
    named = re.match(r"Set parity.noise_multiple to ([\d.]+), or", caught.value.hint or "")
    assert named is not None
    assert measure_tolerances(reference, float(named[1]))["y"].limit <= 0.1
    with pytest.raises(ParityError):
        measure_tolerances(reference, float(named[1]) + 0.1)


class Cancels(nn.Module):
    """Rounds most digits of a small input away, as a trained encoder does at some sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1.1) - 1.1


@pytest.mark.parametrize(("size", "guided"), [(1e-3, True), (1e-6, False)])
def test_uneven_noise_is_the_floor_if_half_the_digits_remain(size: float, guided: bool) -> None:
    model = randomise(Cancels())
    cases = [Case(f"of {s}", {"x": s * torch.rand(4, 6)}) for s in (1.0, 1.0, 1.0, size)]
    reference = run_original(call, model, cases)
    assert reference.float64_mismatches == (() if guided else (f"y at of {size}",))


def test_an_integer_model_needs_no_float64() -> None:
    class Shift(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    reference = run_original(call, Shift(), [Case("only", {"x": torch.arange(3)})])
    assert reference.fallback is None
    assert torch.equal(reference.exact[0]["y"], torch.tensor([1, 2, 3]))


class Rows(nn.Module):
    """Computes rows independently, or subtracts their mean."""

    def __init__(self, *, mix: bool) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(64, 3), mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.mean(0) if self.mix else y


@pytest.mark.parametrize("mix", [False, True])
def test_half_batches_add_to_the_floor_if_rows_are_independent(mix: bool) -> None:
    model = randomise(Rows(mix=mix))
    reference = run_original(call, model, [Case("traced", {"x": torch.randn(8, 64)})], batched=["x"])
    assert reference.variations == (() if mix else ("half the rows at a time",))
    together = float((reference.outputs[0]["y"] - reference.exact[0]["y"]).abs().max())
    assert reference.noise[0]["y"] >= together
    if mix:
        assert reference.noise[0]["y"] == together
    assert measure_tolerances(reference, 4.0)["y"].floor == reference.noise[0]["y"]


def test_the_original_also_runs_on_one_thread() -> None:
    model, cases = network()
    before, thread_counts = torch.get_num_threads(), []

    def watched(model: nn.Module, batch: Batch) -> Tensors:
        thread_counts.append(torch.get_num_threads())
        return call(model, batch)

    try:
        torch.set_num_threads(2)
        reference = run_original(watched, model, cases)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert reference.variations == ("with one thread",)
    assert thread_counts.count(1) == len(cases)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux tells how much memory is free")
def test_a_model_too_large_for_float64_falls_back_with_a_reason() -> None:
    class Vast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.far_too_much = nn.Parameter(torch.zeros(1).expand(2**45), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 + self.far_too_much[0]

    reference = run_original(call, Vast(), [Case("only", {"x": torch.ones(2)})])
    assert reference.fallback is not None
    assert reference.fallback.startswith("the weights need 281475.0 GB in float64")


def test_half_batches_are_skipped_if_the_model_refuses_them() -> None:
    class Three(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] < 3:
                raise ValueError("it needs three rows")
            return x * 0.3

    reference = run_original(call, Three(), [Case("traced", {"x": torch.randn(3, 4)})], batched=["x"])
    assert reference.variations == ()
