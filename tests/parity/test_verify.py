"""Tests bundle verification, which needs neither the model nor its libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.errors import BundleError, ConfigError, OptexportError
from optexport.parity.verify import verify
from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli
from tests._helpers.tampering import tamper_onnx, tamper_pt2, tamper_torchscript

TARGETS = ["torchscript", "onnx", "onnx-optimized", "pt2"]

# Simulates the environment that docs/quickstart.md describes.
BLOCKED = """
import sys
from importlib.machinery import PathFinder

BLOCKED = ("transformers", "onnx", "onnxscript", "onnx_ir", "mlflow", "hypothesis", "matplotlib", "tests")

class Blocker(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [Blocker if finder is PathFinder else finder for finder in sys.meta_path]
"""


def verify_apart(bundle: Path, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    """Runs ``optexport verify --json`` in a subprocess without transformers, onnx and mlflow."""
    code = f"{BLOCKED}\nsys.argv = ['optexport', 'verify', '--json', {str(bundle)!r}]\n"
    code += "from optexport.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=bundle.parent,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Returns a copy of a real bundle."""
    return Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))


def test_a_bundle_passes_for_every_target_and_stored_case(copied: Path) -> None:
    targets = verify(copied).targets[1:]
    assert [target.target for target in targets] == TARGETS
    assert all(target.passed for target in targets)
    assert [output.output for output in targets[0].outputs] == ["hidden", "longest"]
    manifest = json.loads((copied / "manifest.json").read_bytes())
    assert len(manifest["reference_cases"]) >= 4


def test_a_bundle_passes_without_transformers_onnx_and_mlflow(copied: Path) -> None:
    done = verify_apart(copied)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert [row["target"] for row in report["targets"]] == [target for target in TARGETS for _ in range(2)]


def test_the_import_blocker_of_these_tests_works() -> None:
    code = f"{BLOCKED}\nimport transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No module named 'transformers'" in done.stderr


def test_a_changed_byte_exits_with_4_and_names_the_file(copied: Path) -> None:
    content = bytearray((copied / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "model.onnx").write_bytes(content)
    done = verify_apart(copied)
    assert done.returncode == 4
    assert "model.onnx: the file was changed after the bundle was written" in done.stderr
    assert "Traceback" not in done.stderr


TAMPERED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "model.onnx": (tamper_onnx, ["onnx", "onnx-optimized"]),
    "model.torchscript.pt": (tamper_torchscript, ["torchscript"]),
    "model.pt2": (tamper_pt2, ["pt2"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_weight_fails_by_outputs_if_digests_match(copied: Path, name: str) -> None:
    tamper, failing = TAMPERED[name]
    tamper(copied / name)
    with pytest.raises(BundleError, match=name):
        verify(copied)
    exports.reseal(copied, name)
    targets = verify(copied).targets[1:]
    assert [target.target for target in targets if not target.passed] == failing
    for target in targets:
        hidden, longest = target.outputs
        assert longest.passed
        assert hidden.passed is (target.target not in failing)


def test_a_tampered_weight_exits_with_4_and_names_the_case(copied: Path) -> None:
    tamper_onnx(copied / "model.onnx")
    exports.reseal(copied, "model.onnx")
    done = CliRunner().invoke(cli, ["verify", str(copied)])
    assert done.exit_code == 4
    assert "onnx: hidden, at traced: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", TAMPERED)
def test_an_unreadable_file_is_one_clear_error(copied: Path, name: str) -> None:
    (copied / name).write_bytes(b"not a model at all")
    exports.reseal(copied, name)
    with pytest.raises(BundleError, match=name):
        verify(copied)


@pytest.mark.slow
def test_the_model_of_another_bundle_fails_by_its_outputs(copied: Path, tmp_path: Path) -> None:
    model = exports.block()
    with torch.no_grad():
        model.up.weight += 0.01
    result = exports.quick(model, exports.batch(), tmp_path / "other", dynamic=exports.DYNAMIC)
    shutil.copy(result.files["pt2"], copied / "model.pt2")
    exports.reseal(copied, "model.pt2")
    assert [target.target for target in verify(copied).targets if not target.passed] == ["pt2"]


def test_a_pt2_file_with_code_is_refused_without_running_it(copied: Path, tmp_path: Path) -> None:
    class Malice:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save(Malice(), tmp_path / "malice.pt")
    malice = (tmp_path / "malice.pt").read_bytes()
    exports.rezip(copied / "model.pt2", lambda name, content: malice if "sample_inputs" in name else content)
    exports.reseal(copied, "model.pt2")
    with pytest.raises(OptexportError, match="the member is a pickle that could run code"):
        verify(copied)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder is not a bundle \(manifest\.json is missing\)"):
        verify(tmp_path)


@pytest.mark.slow
def test_verifying_changes_nothing(copied: Path) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in copied.iterdir()}
    verify(copied)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in copied.iterdir()} == before


@pytest.mark.slow
def test_a_bundle_may_be_moved_and_made_read_only(copied: Path) -> None:
    moved = copied.rename(copied.with_name("elsewhere"))
    for path in moved.iterdir():
        path.chmod(0o444)
    assert all(target.passed for target in verify(moved).targets)


@pytest.mark.slow
def test_a_file_limited_to_the_traced_shape_is_reported(tmp_path: Path) -> None:
    formats = ["torchscript", "pt2"]
    with exports.without_scripting():
        exports.quick(nn.Tanh(), {"input": exports.X}, tmp_path / "bundle", formats=formats, allow_fixed_shape=True)
    done = CliRunner().invoke(cli, ["verify", str(tmp_path / "bundle")])
    assert done.exit_code == 0, done.stderr
    told = "OK (files unchanged; stored outputs reproduced by torchscript (traced shape only), pt2)"
    assert done.stdout == f"{tmp_path / 'bundle'}: {told}\n"
