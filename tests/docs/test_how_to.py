"""Runs the console blocks of the how-to pages, on small bundles with the names that the pages use."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from optexport.signature.signature import Dim
from tests._helpers import exports, folders, stores
from tests._helpers.graphs import Program
from tests.docs.pages import ROOT, blocks
from tests.docs.test_tutorials import Session, run_console
from tests.inference import bundles
from tests.inference.test_sounds import SIZES, WAV2VEC2, save, write_wav

_PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
_BLOCKS = {f"{page.stem}-{i}": text for page in _PAGES for i, text in enumerate(blocks(page.read_text(), "console"))}
_NOT_RUN = {
    "ci-0": "needs Docker",
    "mlflow-1": "needs a server",
    "tuning-0": "takes five minutes",
    "write-formats-1": "needs a package that the reader installs with pip",
}


def _batch(folder: Path) -> None:
    config = '[model]\nsource = "python:small_linear:load"\n[inputs]\ntensors.input.shape = ["batch", 4]\n'
    config += '[parity]\neffort = "quick"\n[export]\nformats = ["pt2"]\noutput = "{}"\n[tracking]\nenabled = false\n'
    (folder / "configs").mkdir()
    code = "import torch\n\ndef load():\n    return torch.nn.Linear(4, 2)\n"
    (folder / "configs" / "small_linear.py").write_text(code)
    for name in ("first", "second"):
        (folder / "configs" / f"{name}.toml").write_text(config.format(name))


def _benchmarks(folder: Path) -> None:
    dynamic = exports.DYNAMIC | {"x": {0: Dim("batch", 1, 8), 1: Dim("sequence", 2, 128)}}
    exports.quick(exports.block(), exports.batch(), folder / "build" / "new", dynamic=dynamic, formats=["onnx"])
    for name in ("old", "model"):
        shutil.copytree(folder / "build" / "new", folder / "build" / name)


def _inference(folder: Path) -> None:
    shutil.copytree(bundles.bundle("text-classification"), folder / "build" / "minilm")
    shutil.copytree(bundles.bundle("image-classification"), folder / "build" / "vit")
    source = save(Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**WAV2VEC2)), folder / "wav2vec2")
    exported = folders.export(source, task="audio-classification", inputs=SIZES)
    exported.output.rename(folder / "build" / "wav2vec2")
    Image.new("RGB", (20, 24)).save(folder / "image.png")
    write_wav(folder / "sound.wav", np.zeros(800, np.int16))


def _images(folder: Path) -> None:
    image = {"x": torch.zeros(2, 3, 224, 224)}
    network = Program(lambda m, x: m.conv(x).mean((2, 3)), conv=torch.nn.Conv2d(3, 2, 3))
    exports.quick(network.eval(), image, folder / "build" / "my-model", dynamic={"x": {0: "batch"}}, formats=["onnx"])
    Image.new("RGB", (20, 24)).save(folder / "image.png")
    page = (ROOT / "docs" / "how-to" / "inference.md").read_text()
    with contextlib.chdir(folder):
        exec(f"import optexport\n{blocks(page, 'python')[1]}", {})


def _mlflow(folder: Path) -> None:
    stores.store(folder)
    shutil.copytree(exports.exported().output, folder / "build" / "minilm")
    config = '[model]\nsource = "build/minilm/model.pt2"\n[tracking]\nuri = "sqlite:///mlflow.db"\n'
    (folder / "minilm.toml").write_text(config)


_SETUPS: dict[str, Callable[[Path], None]] = {
    "batch-0": _batch,
    "benchmarks-0": _benchmarks,
    "inference-0": _inference,
    "inference-1": _images,
    "mlflow-0": _mlflow,
    "write-formats-0": lambda folder: None,
}


def test_each_console_block_is_run_or_has_a_reason() -> None:
    assert sorted(_BLOCKS) == sorted([*_SETUPS, *_NOT_RUN])


@pytest.mark.slow
@pytest.mark.parametrize("block", _SETUPS)
def test_console_block_runs_as_written(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _SETUPS[block](tmp_path)
    monkeypatch.chdir(tmp_path)
    assert _BLOCKS[block].startswith("$ ")
    session = Session()
    run_console(_BLOCKS[block], session)
    assert session.exit_code == 0, session.failure
