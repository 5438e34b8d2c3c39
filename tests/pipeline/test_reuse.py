"""A run reuses the bundle of an earlier run only if nothing that the bundle depends on has changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
import torch
from transformers import BertConfig, BertModel

from optexport._utils.progress import Progress
from optexport.bundle.measurements import read_measured
from optexport.errors import ParityError
from optexport.parity.verify import verify
from optexport.pipeline import reproduce
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests._helpers import stores
from tests._helpers.exports import UNEQUAL

FACTORY = """
import torch
from torch import nn

def limited(tensor):
    return torch.relu(tensor)

def load():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.25), nn.Hardtanh(-100.0, 100.0), nn.Linear(8, 4))
"""
CONFIG = """
[model]
source = "python:reused_model:load"
[inputs.tensors.input]
shape = ["batch", 8]
[inputs.dynamic]
batch = [1, 16]
[parity]
effort = "quick"
[export]
formats = ["torchscript"]
output = "bundle"
[tracking]
enabled = false
"""
STEPS = ["load", "inputs", "reuse", "report"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "reused_model.py").write_text(FACTORY, encoding="utf-8")
    path = tmp_path / "config.toml"
    path.write_text(CONFIG, encoding="utf-8")
    yield path
    sys.modules.pop("reused_model", None)


def run_in_steps(config: Path) -> tuple[Result, list[str]]:
    """Runs a config, and returns the result and the names of its steps."""
    sys.modules.pop("reused_model", None)  # as in a new process
    progress = Progress()
    result = run(config, progress=progress)
    return result, list(progress.seconds)


def read_files(bundle: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in bundle.iterdir() if path.name not in UNEQUAL}


def test_equal_run_has_the_same_bundle_and_result(config: Path) -> None:
    first, _ = run_in_steps(config)
    files, measured = read_files(first.output), read_measured(first.output)
    second, steps = run_in_steps(config)
    assert steps == STEPS
    assert second.cache_hits == (f"the whole bundle with its times, made {measured.date}",)
    assert read_files(second.output) == files
    assert (second.parity, second.gain) == (first.parity, first.gain)
    assert second.manifest.parity == first.manifest.parity
    assert verify(second.output).passed
    third, steps = run_in_steps(config)
    assert (third.cache_hits, steps) == (second.cache_hits, STEPS)


@pytest.mark.slow
def test_equal_run_is_tracked_as_a_run_of_its_own(config: Path) -> None:
    client = mlflow.MlflowClient(stores.store(config.parent))
    tracking = '[tracking]\nuri = "sqlite:///mlflow.db"'
    config.write_text(CONFIG.replace("[tracking]\nenabled = false", tracking), encoding="utf-8")
    first, _ = run_in_steps(config)
    second, steps = run_in_steps(config)
    assert steps == ["load", "inputs", "start tracking", "reuse", "report", "track"]
    assert (second.tracking_failure, read_measured(second.output).origin.mlflow_run) == (None, second.run_id)
    tracked = [client.get_run(str(result.run_id)) for result in (first, second)]
    assert tracked[0].info.run_id != tracked[1].info.run_id
    assert tracked[0].data.params == tracked[1].data.params
    files = [{file.path for file in client.list_artifacts(run.info.run_id)} for run in tracked]
    assert files[0] == files[1] != set()


def test_reproduce_does_not_reuse_the_bundle(config: Path) -> None:
    run_in_steps(config)
    second, _ = run_in_steps(config)
    assert reproduce.reproduce(second.output, config.parent) == []


def _edit(old: str, new: str, file: str = "reused_model.py") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        assert old in text
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")

    return change


def _damage(folder: Path) -> None:
    path = folder / "bundle" / "graph_after.txt"
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")


def _remove(folder: Path) -> None:
    (folder / "bundle" / "model.torchscript.pt").unlink()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_edit("manual_seed(0)", "manual_seed(1)"), id="weights"),
        pytest.param(_edit("-100.0, 100.0", "-100.0, 50.0"), id="attribute that the traced inputs do not reach"),
        pytest.param(_edit("import torch\n", "import torch  # the same\n"), id="code"),
        pytest.param(_edit("[1, 16]", "[1, 32]", "config.toml"), id="sizes"),
        pytest.param(_edit('"quick"', '"quick"\nnoise_multiple = 3', "config.toml"), id="tolerance"),
        pytest.param(_damage, id="changed file"),
        pytest.param(_remove, id="missing file"),
    ],
)
def test_changed_run_is_exported_again(config: Path, change: Callable[[Path], None]) -> None:
    run_in_steps(config)
    change(config.parent)
    result, steps = run_in_steps(config)
    assert "trace" in steps
    assert verify(result.output).passed
    assert run_in_steps(config)[1] == STEPS


def test_model_with_other_results_is_checked_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor versions show a function that was replaced in the process."""
    run_in_steps(config)
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda module, input: 2 * forward(module, input))  # noqa: A006
    with pytest.raises(ParityError, match="The traced graph already differs from the model"):
        run_in_steps(config)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            _edit("def load", "class Network(nn.Sequential):\n    pass\n\nnn.Sequential = Network\n\ndef load"),
            id="class outside packages",
        ),
        pytest.param(
            _edit("nn.LeakyReLU(0.25)", "nn.TransformerEncoderLayer(8, 2, 8, activation=limited, batch_first=True)"),
            id="function outside packages",
        ),
        pytest.param(
            _edit("[tracking]", "[bench]\nenabled = true\nrounds = 1\n[tracking]", "config.toml"),
            id="times",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_runs_that_a_key_cannot_cover_are_exported_again(
    config: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn, "Sequential", torch.nn.Sequential)  # restores it
    change(config.parent)
    run_in_steps(config)
    assert "trace" in run_in_steps(config)[1]


def test_empty_cache_setting_exports_again(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_steps(config)
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    assert "trace" in run_in_steps(config)[1]


def test_run_that_only_checks_does_not_reuse(config: Path) -> None:
    run_in_steps(config)
    progress = Progress()
    run(config, progress=progress, keep=False)
    assert "trace" in progress.seconds


def test_interrupted_reuse_leaves_the_earlier_bundle(config: Path) -> None:
    first, _ = run_in_steps(config)
    files = {path.name: path.read_bytes() for path in first.output.iterdir()}

    def stop(name: str, seconds: float | None) -> None:
        if name == "report" and seconds is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, progress=Progress(stop))
    assert {path.name: path.read_bytes() for path in first.output.iterdir()} == files
    assert not [path for path in first.output.parent.iterdir() if path.name.startswith(".bundle")]


def test_model_folder_may_contain_the_bundle_and_unreadable_files(config: Path) -> None:
    folder = config.parent / "model"
    BertModel(BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        folder
    )
    text = CONFIG.replace("python:reused_model:load", "./model").replace('"bundle"', '"model/bundle"')
    inputs = text[text.index("[inputs.tensors.input]") : text.index("[parity]")]
    tensors = '[inputs.tensors.input_ids]\nshape = [2, 4]\ndtype = "int64"\nhigh = 30\n'
    config.write_text(text.replace(inputs, tensors), encoding="utf-8")
    run_in_steps(config)
    assert run_in_steps(config)[1] == STEPS
    (folder / "notes.txt").symlink_to("/proc/self/mem")
    assert "trace" in run_in_steps(config)[1]
