"""Second runs take unchanged results from the cache, and write the same bytes. Stopped runs are continued."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optexport._utils.progress import Progress
from optexport.bundle.contents import REFERENCE
from optexport.bundle.digests import sha256
from optexport.cache import store
from optexport.errors import OptexportError
from optexport.pipeline import reproduce
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests._helpers import exports

MODULE = """
import torch
from tests._helpers.exports import block

SCALE = 1.0
EPS = 1e-12

class Damped(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, mask):
        y = self.block(x, mask)["hidden"]
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()

def load():
    model = block()
    with torch.no_grad():
        model.down.weight.mul_(SCALE)
    return Damped(model)
"""
CONFIG = f"""
[model]
source = "python:second_run:load"
{exports.INPUTS}
[export]
formats = ["torchscript", "onnx"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""
TORCHSCRIPT = ("export torchscript", "check graph", "check torchscript")
ALL = (
    "export torchscript",
    "export onnx",
    "check graph",
    "check torchscript",
    "check onnx",
    "check onnx-optimized",
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "second_run.py").write_text(MODULE, encoding="utf-8")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def digests(bundle: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in bundle.iterdir() if path.name not in exports.UNEQUAL}


def again(config: Path, progress: Progress | None = None) -> Result:
    return run(config, progress=progress)


@pytest.mark.parametrize(
    ("formats", "steps"),
    [('["torchscript"]', TORCHSCRIPT), pytest.param('["torchscript", "onnx"]', ALL, marks=pytest.mark.slow)],
)
def test_second_run_uses_the_cache_and_gives_the_same_bytes(config: Path, formats: str, steps: tuple[str, ...]) -> None:
    config.write_text(CONFIG.replace('["torchscript", "onnx"]', formats), encoding="utf-8")
    first = again(config)
    before = digests(first.output)
    second = again(config)
    assert (first.cache_hits, second.cache_hits) == ((), steps)
    assert digests(second.output) == before
    entries = {path: path.stat().st_mtime_ns for path in (config.parent / "cache").rglob("entry.json")}
    assert reproduce.reproduce(second.output, config.parent) == []
    after = {path: path.stat().st_mtime_ns for path in (config.parent / "cache").rglob("entry.json")}
    assert after == entries, "what is made again as a proof must not be taken from an earlier run"


@pytest.mark.slow
def test_other_weights_are_not_taken_from_the_cache(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    again(config)
    monkeypatch.setattr(sys.modules["second_run"], "SCALE", 1.5)
    assert again(config).cache_hits == ()


@pytest.mark.slow
def test_change_below_float32_precision_is_recomputed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run used the float64 results of the previous run, and its output depended on the content of the cache."""
    import sys

    before = load_file(again(config).output / REFERENCE)
    monkeypatch.setattr(sys.modules["second_run"], "EPS", 1e-11)
    bundle = again(config).output
    after = load_file(bundle / REFERENCE)
    differing = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.split(".")[1] for name in differing} == {"float64"}
    assert reproduce.reproduce(bundle, config.parent) == []


@pytest.mark.slow
def test_stopped_run_is_continued(config: Path) -> None:
    def stop(name: str, seconds: float | None) -> None:
        if name == "export onnx" and seconds is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(config, Progress(stop))
    assert again(config).cache_hits == ("export torchscript", "check graph", "check torchscript")


@pytest.mark.slow
def test_cached_results_are_compared_with_current_tolerances(config: Path) -> None:
    again(config)
    config.write_text(CONFIG.replace('"quick"', '"quick"\nnoise_multiple = 1e-3'), encoding="utf-8")
    with pytest.raises(OptexportError):
        again(config)


@pytest.mark.slow
def test_damaged_cached_file_is_exported_again(config: Path) -> None:
    before = digests(again(config).output)
    for path in (config.parent / "cache").rglob("model.onnx"):
        path.write_bytes(path.read_bytes()[:-1])
    result = again(config)
    assert "export onnx" not in result.cache_hits
    assert digests(result.output) == before


@pytest.mark.nightly
def test_cached_file_removed_by_another_run_is_exported_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(again(config).output)
    read = store.read

    def removed(entry: str) -> tuple[Path, Any] | None:
        cached = read(entry)
        if cached is not None and (cached[0] / "model.onnx").exists():
            shutil.rmtree(cached[0])
        return cached

    monkeypatch.setattr(store, "read", removed)
    result = again(config)
    assert "export onnx" not in result.cache_hits
    assert digests(result.output) == before
