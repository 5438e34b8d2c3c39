"""Tests of TorchScript programs as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from optexport import export
from optexport.bundle import digests
from optexport.cli.main import cli
from optexport.errors import SourceError
from optexport.loading.torchscript import load
from optexport.tracing.script_conversion import convert
from tests._helpers.models import randomise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Scaled(nn.Module):
    """Convolution and batch norm with a buffer, a tuple input and an integer with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.arange(4.0))

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor], times: int = 2) -> Any:
        y = self.norm(self.conv(x)).amax(-1) * times + self.offset
        return y + states[0], states[1] + 1


class Loops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for row in range(x.size(0)):
            out = out + x[row].sum()
        return out


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.sum(0) + self.last
        return x + self.last


class Counts(nn.Module):
    """Converts a size to float. The converter of torch.export writes an invalid call for this."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(x.shape[0])


def arguments(rows: int = 2, length: int = 6) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    x, h, c = (torch.randn(shape, generator=generator) for shape in ((rows, 4, length), (rows, 4), (rows, 4)))
    return x, (h, c)


def scripted(kind: str) -> torch.jit.ScriptModule:
    model = randomise(Scaled())
    if kind == "traced":
        return torch.jit.trace(model, arguments())
    script = torch.jit.script(model)
    return torch.jit.freeze(script) if kind == "frozen" else script


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scripted", "traced", "frozen"])
def test_a_converted_program_computes_the_same_at_other_sizes(kind: str) -> None:
    script = scripted(kind)
    module = convert(script, arguments(), {})
    with torch.no_grad():
        torch.testing.assert_close(module(*arguments(3, 9)), script(*arguments(3, 9)), rtol=0, atol=0)


@pytest.mark.slow
def test_program_is_exported_to_all_formats(tmp_path: Path) -> None:
    script = scripted("scripted")
    x, states = arguments()
    inputs = {"x": x, "states": states, "times": 3}
    result = export(script, inputs, tmp_path / "bundle", effort="quick", transformations=[])
    assert [(spec.name, spec.shape[0]) for spec in result.manifest.inputs] == [
        ("x", "batch"), ("states.0", "batch"), ("states.1", "batch"),
    ]  # fmt: skip
    assert result.manifest.constants == {"times": 3}
    assert result.manifest.parity.fallback is None
    assert list(result.files) == ["torchscript", "onnx", "pt2"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("suffix", [".pt", ".ts"])
def test_run_on_a_torchscript_file_passes(suffix: str, tmp_path: Path) -> None:
    torch.jit.save(scripted("scripted"), tmp_path / f"model{suffix}")
    config = tmp_path / "mine.toml"
    config.write_text(
        f'[model]\nsource = "model{suffix}"\n[export]\nformats = ["pt2"]\noutput = "out"\n'
        '[inputs.tensors.x]\nshape = ["batch", 4, "length"]\n'
        '[inputs.tensors."states.0"]\nshape = ["batch", 4]\n[inputs.tensors."states.1"]\nshape = ["batch", 4]\n'
        "[inputs.constants]\ntimes = 3\n[tracking]\nenabled = false\n"
    )
    result = CliRunner().invoke(cli, ["run", str(config)])
    assert result.exit_code == 0, result.output
    manifest = digests.read_manifest(tmp_path / "out")
    assert [spec.name for spec in manifest.inputs] == ["x", "states.0", "states.1"]
    assert manifest.inputs[0].shape == ["batch", 4, "length"]
    assert manifest.constants == {"times": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Loops, r"prim::Loop \(test_torchscript.py, line \d+\)"),
        (Remembers, r"changes its attribute last .*prim::SetAttr"),
    ],
)
def test_unsupported_program_is_refused_with_its_operator(model: type[nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        export(torch.jit.script(model().eval()), {"x": torch.ones(3, 4)}, tmp_path / "bundle")
    assert "export a submodule without loops and state" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_file_of_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "weights.pt")
    with pytest.raises(
        SourceError, match=r"weights\.pt: the file is not a TorchScript program \(torch\.save may have written it\)\n"
    ):
        load(tmp_path / "weights.pt")


def test_failure_of_a_converted_graph_does_not_blame_the_program() -> None:
    script = torch.jit.script(Counts().eval())
    with pytest.raises(SourceError, match="the program runs, but its graph from the converter of torch.export fails"):
        convert(script, (torch.ones(3, 4),), {})
