"""Models whose results depend on state or chance, in the Python API."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport import export
from optexport.errors import OptexportError, TraceError
from optexport.exporters import targets
from optexport.transformations import KeepOutputs
from tests._helpers.exports import BATCH, Counting, X, quick, run


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Unsteady(nn.Module):
    """Computes something else in float64, so that no distance from it is meaningful."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dtype == torch.float32 else -x


class Summing(nn.Module):
    """Returns a buffer that it writes in each call, completely or partly, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.sums.copy_(x.sum(0))
        self.calls = self.calls + 1
        return x * 2, self.sums, self.sums[1:]


@pytest.mark.slow
def test_buffer_written_in_each_call_is_returned_unchanged(tmp_path: Path) -> None:
    """Without a copy, the original's result was the result for the last inputs."""
    model = Summing()
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH, formats=["onnx", "torchscript", "pt2"])
    assert all(not buffer.any() for buffer in model.buffers()), "the caller's model was changed"
    x, names = torch.randn(5, 4), [spec.name for spec in result.manifest.outputs]
    for name, path in result.files.items():
        for _, run_file in targets.open_file(path, name, names):
            first = run_file({"x": x})
            run_file({"x": x + 1})
            for got, want in zip(first.values(), (x * 2, x.sum(0), x.sum(0)[1:]), strict=True):
                torch.testing.assert_close(got, want)


class CountingAside(Counting):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        self.calls.add_(1)
        return x * 2, self.calls


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [Counting, CountingAside])
def test_state_that_results_depend_on_is_refused_by_name(make: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"outputs depend on what earlier calls wrote to calls \(output"):
        quick(make(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)


class KeepingInput(nn.Module):
    """Keeps its input and its result for a debugger."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [x, self.linear(x)]
        return self.kept[1]


class ScaledOnce(nn.Module):
    """Computes a number from a fixed size in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.shape[1] ** -0.5
        return x * self.scale


def test_number_from_a_fixed_size_is_no_state(tmp_path: Path) -> None:
    result = quick(ScaledOnce(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    torch.testing.assert_close(run(result, x=X + 1)["output"], (X + 1) * X.shape[1] ** -0.5)


def test_values_that_no_later_call_reads_are_no_state(tmp_path: Path) -> None:
    model = KeepingInput().eval()
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    torch.testing.assert_close(run(result, x=2 * X)["output"], model(2 * X))


class CountingInArray(nn.Module):
    """Counts its calls in an array, which no call restores."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = array("l", [0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return x * self.calls[0]


def test_state_that_cannot_be_restored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the model returns different results for the same input") as raised:
        quick(CountingInArray(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert "what the model keeps between calls" in str(raised.value.hint)


class Position(nn.Module):
    """Adds an embedding of the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.table[self.calls]
        self.calls += 1
        return y


def test_state_of_a_whole_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"depend on what earlier calls wrote to calls \(output by "):
        export(Position().eval(), {"x": X}, tmp_path / "bundle", formats=["pt2"], effort="quick")


class Once(Position):
    """Has an embedding for the first call only; later calls raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.table.index_select(0, self.calls[None])
        self.calls += 1
        return y


def test_state_with_which_the_next_call_raises_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"depend on what earlier calls wrote to calls \(\w*Error: "):
        export(Once().eval(), {"x": X}, tmp_path / "bundle", formats=["pt2"], effort="quick")


class Overwriting(nn.Module):
    """Writes a buffer in place before reading it, and counts calls that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sums[:] = x.sum(0)
        self.calls += 1
        return x + self.sums


def test_overwritten_buffer_and_unused_counter_are_no_state(tmp_path: Path) -> None:
    result = quick(Overwriting().eval(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert torch.equal(run(result, x=X + 1)["output"], X + 1 + (X + 1).sum(0))


@pytest.mark.slow
def test_state_of_outputs_that_are_left_out_is_accepted(tmp_path: Path) -> None:
    rule = KeepOutputs(outputs=("output_0",))
    result = quick(CountingAside(), {"x": X}, tmp_path / "bundle", dynamic=BATCH, transformations=rule)
    assert torch.equal(run(result, x=X)["output_0"], X * 2)


@pytest.mark.slow
def test_randomness_is_not_blamed_on_state(tmp_path: Path) -> None:
    class CountingRandom(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return x + torch.rand_like(x)

    with pytest.raises(TraceError, match="outputs depend on random numbers"):
        quick(CountingRandom(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [Random, Counting, Unsteady])
def test_model_without_any_verifiable_output_is_refused(make: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(OptexportError) as caught:
        quick(make(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert caught.value.exit_code in (3, 4)
    assert list(tmp_path.iterdir()) == []


class Growing(nn.Module):
    """Multiplies by a table of positions, and computes a longer one if a sequence needs it."""

    def __init__(self) -> None:
        super().__init__()
        self._compute(2)

    def _compute(self, length: int) -> None:
        self.length = length
        self.register_buffer("table", torch.arange(length, dtype=torch.float32).cos(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.length:
            self._compute(x.shape[0])
        return x * self.table[: x.shape[0], None]


class Lazy(Growing):
    """Computes its table in the first call."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.length = 0
        self.register_buffer("table", None, persistent=False)


@pytest.mark.parametrize("make", [Growing, Lazy])
def test_table_that_grows_is_no_state(make: type[Growing], tmp_path: Path) -> None:
    """The trace left the new length beside the old table, and the graph wrote the new table into the old one."""
    model = make().eval()
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    assert model.length == make().length, "the caller's model was changed"
    x = torch.randn(7, 4)
    torch.testing.assert_close(run(result, x=x)["output"], x * torch.arange(7.0).cos()[:, None])


class Marked(nn.Module):
    """Has a constant with NaN in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("marks", torch.tensor([1.0, torch.nan, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.marks.nan_to_num()


def test_constant_with_nan_is_no_state(tmp_path: Path) -> None:
    """NaN is not equal to itself, so the constant seemed to be written in each call."""
    result = quick(Marked().eval(), {"x": X}, tmp_path / "bundle", dynamic=BATCH)
    torch.testing.assert_close(run(result, x=X)["output"], X * torch.tensor([1.0, 0.0, 2.0, 3.0]))


class FirstFrame(nn.Module):
    """Compares with the first input of the same number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None or self.first.shape != x.shape:
            self.first = x.clone()
        return x - self.first


class WarmUp(nn.Module):
    """Doubles its output after many calls."""

    def __init__(self, *, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        else:
            self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if isinstance(self.calls, torch.Tensor):
            return torch.where(self.calls <= 1000, x, 2 * x)
        return x if self.calls <= 100 else 2 * x


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (FirstFrame, "first"),
        (partial(WarmUp, is_buffer=True), "calls"),
        (partial(WarmUp, is_buffer=False), "calls"),
    ],
)
def test_state_that_few_calls_do_not_show_is_refused(make: Callable[[], nn.Module], place: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"depend on what earlier calls wrote to {place} "):
        export(make().eval(), {"x": X}, tmp_path / "bundle", formats=["pt2"], effort="quick")
