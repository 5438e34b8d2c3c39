"""Process-wide torch settings that model code changes: verification ignores them, and runs restore them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optexport._utils.torch_settings import Settings, as_in_a_new_process
from optexport.errors import ParityError, SourceError
from optexport.pipeline import run
from optexport.report.result import Result
from optexport.runtime import runners
from optexport.runtime.untrusted import archives

MODULE = """
import torch

torch.set_default_dtype(torch.float64)
torch.set_flush_denormal({flushes})


class Table(torch.nn.Module):
    def forward(self, x):
        return ({result}).to(x.dtype)
"""
CONFIG = """
model.source = "python:{module}:Table"
inputs.tensors.x = {{ shape = ["batch", 6] }}
export = {{ output = "bundle", formats = ["torchscript", "pt2"] }}
parity.effort = "quick"
tracking.enabled = false
"""
# The large intermediate values make float32 differ from float64.
IN_FLOAT64 = "(x + 1e6 * torch.arange(0.0, 6.0) / 3) - 1e6 * torch.arange(0.0, 6.0) / 3"


def exported(folder: Path, module: str, result: str, *, flushes: bool = False) -> Result:
    (folder / f"{module}.py").write_text(MODULE.format(result=result, flushes=flushes))
    (folder / "config.toml").write_text(CONFIG.format(module=module))
    return run.run(folder / "config.toml")


@pytest.mark.slow
def test_default_dtype_of_a_module_is_baked_into_the_files(tmp_path: Path) -> None:
    before = Settings.now()
    result = exported(tmp_path, "table_of_float64", IN_FLOAT64)
    assert Settings.now() == before
    code = (
        "import sys, torch; torch.save([torch.jit.load(p)(x=torch.ones(2, 6))[0] for p in sys.argv[2:]], sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "y", result.files["torchscript"]], check=True)
    (tensor,) = torch.load(tmp_path / "y")
    torch.testing.assert_close(tensor, torch.ones(2, 6), rtol=0, atol=1e-6)
    again = exported(tmp_path, "table_of_float64", IN_FLOAT64)  # its module is not imported again
    assert again.passed
    assert archives.pt2_module(again.files["pt2"]) is not None
    assert Settings.now() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "result", "flushes"),
    [
        ("table_of_integers", "x + (x.long() + torch.arange(6)) / 3", False),
        ("table_without_denormals", "x + x.double() * 1e-200 * 1e-110 * 1e200 * 1e110", True),
    ],
)
def test_file_that_differs_in_a_new_process_fails_parity(
    module: str, result: str, flushes: bool, tmp_path: Path
) -> None:
    before = Settings.now()
    with pytest.raises(ParityError):
        exported(tmp_path, module, result, flushes=flushes)
    assert Settings.now() == before


@pytest.mark.slow
def test_file_runs_with_the_settings_of_a_new_process(tmp_path: Path) -> None:
    class Third(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.arange(6) / 3 + x.sum().long(),)

    path = tmp_path / "third.pt"
    torch.jit.trace(Third(), (torch.ones(2),)).save(path)
    run = runners.open_torchscript(path, ["y"])
    torch.set_default_dtype(torch.float64)
    try:
        assert run({"x": torch.ones(2)})["y"].dtype is torch.float32
        with as_in_a_new_process():
            assert torch.get_default_dtype() is torch.float32
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_settings_are_restored_after_a_module_fails(tmp_path: Path) -> None:
    (tmp_path / "failing_module.py").write_text(
        "import torch\n\n\ndef Table():\n    torch.use_deterministic_algorithms(True)\n"
        "    torch.set_grad_enabled(False)\n    raise ValueError\n"
    )
    (tmp_path / "config.toml").write_text(CONFIG.format(module="failing_module"))
    before = Settings.now()
    with pytest.raises(SourceError):
        run.run(tmp_path / "config.toml")
    assert Settings.now() == before
    assert torch.is_grad_enabled()
