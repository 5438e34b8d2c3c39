"""``.pt2`` files and exported programs with nested inputs and constants."""

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
from optexport.errors import ConfigError
from optexport.inputs.random_inputs import program_inputs
from optexport.runtime.untrusted.archives import load_pt2
from optexport.signature.program_arguments import constants, named_tensors, tensor_inputs
from optexport.tracing.module_reconstruction import unlift
from tests._helpers.models import randomise


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, states: Any, features: Any = None, double: bool = False, n: int = 1) -> Any:
        y = self.linear(x) * (2 if double else 1) * n + features["bias"]
        return {"y": y + states[0], "next": (states[1] + 1, y.mean(0))}


NAMES = ["x", "states.0", "states.1", "features.bias"]


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    x, h, c, bias = (torch.randn(shape, generator=generator) for shape in ((2, 4), (2, 3), (2, 3), (3,)))
    return (x, (h, c)), {"features": {"bias": bias}, "double": True, "n": 3}


def program(*, by_name: bool) -> tuple[nn.Module, torch.export.ExportedProgram]:
    model = randomise(Nested())
    args, kwargs = arguments()
    if by_name:
        args, kwargs = (), {"x": args[0], "states": args[1], **kwargs}
    rows = torch.export.Dim.AUTO
    shapes: dict[str, Any] = {
        "x": {0: rows}, "states": ({0: rows}, {0: rows}), "features": {"bias": None}, "double": None, "n": None,
    }  # fmt: skip
    return model, torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_nested_tensors_and_constants_have_canonical_names(by_name: bool, saved: bool, tmp_path: Path) -> None:
    model, exported = program(by_name=by_name)
    if saved:
        torch.export.save(exported, tmp_path / "model.pt2")
        exported = load_pt2(tmp_path / "model.pt2")
    assert list(tensor_inputs(exported).values()) == NAMES
    assert constants(exported) == {"double": True, "n": 3}
    args, kwargs = arguments()
    flat = named_tensors(exported, (*args, kwargs["features"]))
    with torch.no_grad():
        want = model(*args, **kwargs)
        got = unlift(exported)(**{name.replace(".", "_"): tensor for name, tensor in flat.items()})
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert list(program_inputs(exported, 0)) == NAMES


@pytest.mark.slow
def test_tensors_unknown_to_a_program_are_refused_by_name() -> None:
    _, exported = program(by_name=True)
    with pytest.raises(ConfigError, match=r"expected x, states\.0, states\.1, features\.bias, found x\)"):
        named_tensors(exported, {"x": torch.ones(2, 4)})


@pytest.mark.slow
def test_nested_program_is_exported_in_all_formats(tmp_path: Path) -> None:
    model, exported = program(by_name=False)
    args, kwargs = arguments()
    result = export(exported, {"x": args[0], "states": args[1], **kwargs}, tmp_path / "bundle", effort="quick")
    assert [spec.name for spec in result.manifest.inputs] == NAMES
    assert [spec.name for spec in result.manifest.outputs] == ["y", "next.0", "next.1"]
    assert result.manifest.constants == {"double": True, "n": 3}
    assert result.manifest.inputs[1].shape == ["batch", 3]


@pytest.mark.slow
def test_run_on_a_pt2_file_needs_only_its_path(tmp_path: Path) -> None:
    _, exported = program(by_name=False)
    torch.export.save(exported, tmp_path / "model.pt2")
    config = tmp_path / "mine.toml"
    config.write_text('[model]\nsource = "model.pt2"\n[export]\nformats = ["pt2"]\n[tracking]\nenabled = false\n')
    result = CliRunner().invoke(cli, ["run", str(config)])
    assert result.exit_code == 0, result.output
    manifest = digests.read_manifest(tmp_path / "build" / "model")
    assert [spec.name for spec in manifest.inputs] == NAMES


@pytest.mark.slow
def test_constants_of_a_pt2_file_cannot_be_set_again(tmp_path: Path) -> None:
    _, exported = program(by_name=False)
    torch.export.save(exported, tmp_path / "model.pt2")
    config = tmp_path / "mine.toml"
    config.write_text('[model]\nsource = "model.pt2"\n[inputs.constants]\nn = 2\n[tracking]\nenabled = false\n')
    result = CliRunner().invoke(cli, ["run", str(config)])
    assert result.exit_code == 2
    assert "inputs.constants: a .pt2 file has no inputs to make constant" in result.output


@pytest.mark.slow
def test_data_of_another_rank_are_refused_with_both_shapes(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(3, 2).eval(), (torch.randn(2, 3),)), tmp_path / "linear.pt2")
    (tmp_path / "rows.jsonl").write_text('{"input": [[1.5, 2, 3], [4, 5, 6]]}\n')
    (tmp_path / "mine.toml").write_text(
        '[model]\nsource = "linear.pt2"\n[inputs]\ndata = "rows.jsonl"\n[tracking]\nenabled = false\n'
    )
    done = CliRunner().invoke(cli, ["run", str(tmp_path / "mine.toml")])
    assert done.exit_code == 2
    assert "inputs: input: wrong number of axes (expected 2: [2, 3], found 3: [1, 2, 3])" in done.stderr
