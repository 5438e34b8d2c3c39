"""Tests of the TorchScript exporter: names, dynamic axes, outputs and refusals."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop

from optexport.errors import ExportError, SourceError
from optexport.exporters import torchscript
from optexport.runtime import runners
from optexport.signature.signature import Dim
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files

X = torch.linspace(-2, 2, 12).reshape(3, 4)
SIZES = {"x": {0: Dim("batch", 1, 32), 1: Dim("width", 2, 64)}}
BATCH = {"x": {0: Dim("batch", 1, 32)}}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def saved(subject: files.Prepared, place: Path) -> tuple[Path, str | None]:
    path = place / "model.pt"
    return path, torchscript.save(subject.program, subject.signature, subject.example, path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", files.NAMES)
def test_file_gives_the_outputs_of_the_model_at_any_size(name: str) -> None:
    run = runners.open_torchscript(files.torchscript_file(name), files.prepared(name).signature.output_names)
    files.assert_agrees(name, run, 2e-6)


@pytest.mark.slow
def test_file_loads_without_transformers_and_gives_a_tuple(tmp_path: Path) -> None:
    subject = files.prepared("bert")
    _, batch = next(iter(files.batches("bert")))
    got = files.run_without_transformers(files.torchscript_file("bert"), batch, "torch.jit.load(path)", tmp_path)
    for value, want in zip(got, files.eager(subject, batch).values(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", files.NAMES)
def test_inputs_are_named_in_the_order_of_the_signature(name: str) -> None:
    module = torch.jit.load(files.torchscript_file(name))
    _, *arguments = module.forward.schema.arguments
    assert [argument.name for argument in arguments] == [s.name for s in files.prepared(name).signature.inputs]
    assert all(not argument.has_default_value() for argument in arguments)
    assert str(module.forward.schema.returns[0].type).startswith("Tuple[Tensor")


@pytest.mark.slow
def test_repeated_and_passed_through_outputs_are_right(tmp_path: Path) -> None:
    subject = files.prepare(randomise(Program(lambda m, x: (y := m.a(x), y, x), a=nn.Linear(4, 4))), {"x": X}, BATCH)
    path, reason = saved(subject, tmp_path)
    assert reason is None
    got = torch.jit.load(path)(x=X + 1)
    for value, want in zip(got, files.eager(subject, {"x": X + 1}).values(), strict=True):
        torch.testing.assert_close(value, want)


class InPlace(nn.Module):
    """Writes into slices and masked elements of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, 0] = 7.0
        y[x > 1] = 0.0
        y[:, 1:].add_(1.0)
        return y


def test_in_place_writes_are_exported(tmp_path: Path) -> None:
    subject = files.prepare(InPlace(), {"x": X}, BATCH)
    path, _ = saved(subject, tmp_path)
    run = runners.open_torchscript(path, ["output"])
    for size in (1, 3, 7):
        x = torch.randn(size, 4)
        assert torch.equal(run({"x": x})["output"], InPlace()(x))


class Arithmetic(nn.Module):
    """Computes with sizes in ways that can be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        distance = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs().clamp(max=3)
        padded = nn.functional.pad(x, (0, (4 - n % 4) % 4))
        return padded.sum(1, keepdim=True) / n + (x @ distance.to(x.dtype)) * (n // 2)


@pytest.mark.slow
def test_arithmetic_on_sizes_stays_arithmetic(tmp_path: Path) -> None:
    subject = files.prepare(Arithmetic(), {"x": torch.randn(3, 6)}, SIZES)
    path, reason = saved(subject, tmp_path)
    assert reason is None
    run = runners.open_torchscript(path, ["output"])
    for shape in ((1, 4), (7, 11), (3, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(run({"x": x})["output"], Arithmetic()(x))


class Root(nn.Module):
    """Divides by the square root of a size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.shape[1] ** 0.5


class Longest(nn.Module):
    """Takes the larger of two sizes, and the smaller."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(max(x.shape[0], x.shape[1])) * x.sum() * min(x.shape[0], x.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("make", [Root, Longest])
def test_functions_of_sizes_stay_functions_of_sizes(make: type[nn.Module], tmp_path: Path) -> None:
    subject = files.prepare(make(), {"x": X}, SIZES)
    path, reason = saved(subject, tmp_path)
    assert reason is None
    run = runners.open_torchscript(path, ["output"])
    for shape in ((1, 4), (7, 11), (3, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(run({"x": x})["output"], make()(x))


class Lengths(nn.Module):
    """Splits its rows at lengths from the second input, and scales one part by the third."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        first, second = lengths.tolist()
        head, tail = torch.split(x, [first, second])
        return torch.cat([head * factor.item(), tail])


@pytest.mark.slow
def test_numbers_read_from_inputs_are_not_constants(tmp_path: Path) -> None:
    rows, factor = {"x": {0: "rows"}}, torch.tensor(2.5)
    subject = files.prepare(
        Lengths(), {"x": torch.randn(6, 4), "lengths": torch.tensor([2, 4]), "factor": factor}, rows
    )
    path, reason = saved(subject, tmp_path)
    assert reason is None
    run = runners.open_torchscript(path, ["output"])
    for first, second in ((1, 4), (7, 2)):
        x, lengths = torch.randn(first + second, 4), torch.tensor([first, second])
        outputs = run({"x": x, "lengths": lengths, "factor": factor * first})
        torch.testing.assert_close(outputs["output"], Lengths()(x, lengths, factor * first))


@pytest.fixture
def _without_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("unknown operator\nin a graph")

    monkeypatch.setattr(torch.jit, "script", fail)


@pytest.mark.usefixtures("_without_script")
def test_model_that_cannot_be_scripted_is_traced_with_a_reason(tmp_path: Path) -> None:
    subject = files.prepare(InPlace(), {"x": X}, BATCH)
    path, reason = saved(subject, tmp_path)
    assert reason == "TorchScript cannot compile the graph (unknown operator)"
    run = runners.open_torchscript(path, ["output"])
    x = torch.randn(X.shape)
    torch.testing.assert_close(run({"x": x})["output"], InPlace()(x))
    assert [argument.name for argument in torch.jit.load(path).forward.schema.arguments[1:]] == ["x"]


class CountsPositive(nn.Module):
    """Has a size that depends on values. A trace would store it as a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).nonzero().sum(0)


@pytest.mark.slow
@pytest.mark.usefixtures("_without_script")
def test_trace_with_constant_values_is_refused(tmp_path: Path) -> None:
    subject = files.prepare(CountsPositive(), {"x": X}, SIZES)
    with pytest.raises(ExportError, match="a trace would fix values that it computes from the example"):
        saved(subject, tmp_path)


@pytest.mark.slow
def test_weight_of_any_name_is_written(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict({"für": nn.Linear(4, 4)}))
    path, reason = saved(files.prepare(model, {"input": X}, {"input": {0: Dim("batch", 1, 16)}}), tmp_path)
    assert reason is None
    x = torch.randn(7, *X.shape[1:])
    torch.testing.assert_close(torch.jit.load(path)(x)[0], model(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("reach", ["write", "read"])
def test_file_that_accesses_other_files_is_refused_and_not_run(reach: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"original")

    class Reaching(nn.Module):
        def __init__(self, path: str, shared: bool) -> None:
            super().__init__()
            self.path, self.shared = path, shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            content = torch.from_file(self.path, self.shared, 8, dtype=torch.uint8)
            return x + content.fill_(33).sum()

    torch.jit.script(Reaching(str(victim), reach == "write")).save(str(tmp_path / "model.pt"))
    with pytest.raises(SourceError, match="from_file, which does more than compute"):
        runners.open_torchscript(tmp_path / "model.pt", ["output"])
    assert victim.read_bytes() == b"original"


class Repeating(nn.Module):
    """Loops while a value is small, with an operator that TorchScript lacks."""

    def forward(self, x: torch.Tensor) -> Any:
        return while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (x,))


@pytest.mark.slow
def test_refusal_names_the_operator_and_the_line(tmp_path: Path) -> None:
    """A trace would record one number of steps, and silently give wrong results for others."""
    subject = files.prepare(Repeating(), {"x": X}, BATCH)
    with pytest.raises(
        ExportError, match=r"TorchScript cannot compile \S*while_loop, at test_torchscript.py:\d+: return while_loop"
    ) as caught:
        saved(subject, tmp_path)
    assert caught.value.exit_code == 5
    assert "torch.jit.trace fails too" in str(caught.value)
    assert "Replace" in str(caught.value.hint)
    assert '"pt2" supports the same graph' in str(caught.value.hint)


class Branching(nn.Module):
    """Chooses a branch by a value and by a size, with torch.cond."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x.cos(), (x,))
        z, _ = torch.cond(
            x.shape[0] > 4,
            lambda x, y: (x + y, y.reshape(x.shape[0], 2, 2)),
            lambda x, y: (x - y, y.view(-1, 2, 2)),
            (x, y),
        )
        return z


@pytest.mark.slow
def test_both_branches_of_cond_are_in_the_file(tmp_path: Path) -> None:
    model = randomise(Branching())
    subject = files.prepare(model, {"x": X}, BATCH)
    path, reason = saved(subject, tmp_path)
    assert reason is None
    run = runners.open_torchscript(path, ["output"])
    for size in (1, 5, 7):
        for x in (torch.rand(size, 4), -torch.rand(size, 4)):
            torch.testing.assert_close(run({"x": x})["output"], model(x).detach())


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask + True": lambda x: (x > 0) + True,
    "True * mask": lambda x: True * (x > 0),
    "mask * 1": lambda x: (x > 0) * 1,
    "mask + 0": lambda x: (x > 0) + 0,
    "1 - mask * 1": lambda x: 1 - (x > 0) * 1,
    "mask & True": lambda x: (x > 0) & True,
    "mask |= True": lambda x: (x > 0).bitwise_or_(torch.tensor(False)) | False,
    "where": lambda x: torch.where(x > 0, True, False),
    "where and mask": lambda x: torch.where(x > 0, True, x > -1),
    "full": lambda x: torch.full((x.shape[0], 4), True),
    "scatter": lambda x: (x > 0).scatter(1, torch.zeros(x.shape[0], 1, dtype=torch.long), True),
    "even size": lambda x: (x > 0) & (x.shape[0] % 2 == 0),
    "even size, whole number": lambda x: (x > 0) * (x.shape[0] % 2 == 0) * 1,
    "number from a mask": lambda x: x * ((x > 0).any(1, keepdim=True) + 1),
    "x * True": lambda x: x * True + (x > 0).bool() * x,
}


SIZE_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": lambda x: x * abs(x.shape[0] - 9),
    "round": lambda x: x[: round(x.shape[0] * 0.5) + 1],
    "trunc": lambda x: x[: math.trunc(x.shape[0] / 2) + 1],
    "ceil": lambda x: x[: math.ceil(x.shape[0] / 2)],
    "square root": lambda x: x * torch.sym_sqrt(x.shape[0]),
    "not": lambda x: x * torch.sym_not(x.shape[0] % 2 == 0),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [*MASKS, *SIZE_FUNCTIONS])
def test_arithmetic_with_masks_and_sizes_keeps_its_dtypes(kind: str, tmp_path: Path) -> None:
    compute = {**MASKS, **SIZE_FUNCTIONS}[kind]
    subject = files.prepare(Program(lambda _, x: compute(x)).eval(), {"x": X}, BATCH)
    path, reason = saved(subject, tmp_path)
    assert reason is None
    run = runners.open_torchscript(path, ["output"])
    for size in (1, 5, 8, 5):  # TorchScript optimizes after the first calls
        x = torch.randn(size, 4)
        torch.testing.assert_close(run({"x": x})["output"], compute(x))


@pytest.mark.slow
def test_inputs_and_program_of_the_caller_are_not_changed(tmp_path: Path) -> None:
    subject = files.prepare(InPlace(), {"x": X.clone()}, BATCH)
    before = str(subject.program.graph)
    saved(subject, tmp_path)
    assert torch.equal(subject.example["x"], X)
    assert str(subject.program.graph) == before


@pytest.mark.slow
def test_outputs_do_not_require_a_gradient(tmp_path: Path) -> None:
    model = randomise(nn.Linear(4, 2))
    subject = files.prepare(model, {"input": X}, {"input": {0: "batch"}})
    path, _ = saved(subject, tmp_path)
    output = runners.open_torchscript(path, ["output"])({"input": X})["output"]
    assert not output.requires_grad
    assert model.weight.requires_grad


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"hello"])
def test_a_damaged_file_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(
        SourceError, match=r"model\.pt: (torch cannot load the file|the file is not a TorchScript archive|two members)"
    ):
        runners.open_torchscript(tmp_path / "model.pt", ["output"])
