"""Locks contain the versions of the packages that define a model or read its inputs."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from transformers import BertConfig, BertModel, PreTrainedModel, ViTConfig, ViTModel

from optexport.pipeline import lockfile
from tests._helpers.cli import CliRunner, cli, message
from tests._helpers.folders import save
from tests._helpers.inputs import TINY

PACKAGE = """
import torch
class Scaled(torch.nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2.0
def load():
    torch.manual_seed(0)
    return Scaled(4, 3)
"""
CONFIG = """
[model]
source = "python:locked_extra.layers:load"
[inputs.tensors.input]
shape = [2, 4]
[export]
formats = ["pt2"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""


class Installed:
    """A package in a site-packages folder, as installed by pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, version: str) -> None:
        for name, text in {
            "locked_extra/__init__.py": "",
            "locked_extra/layers.py": PACKAGE,
            "locked_extra-1.dist-info/METADATA": f"Metadata-Version: 2.1\nName: locked-extra\nVersion: {version}\n",
            "locked_extra-1.dist-info/top_level.txt": "locked_extra\n",
        }.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def call(self, config: Path, *command: str) -> Result:
        """Calls the CLI without cached imports of the package, as in a new process."""
        for name in [name for name in sys.modules if name.startswith("locked_extra")]:
            sys.modules.pop(name)
        importlib.invalidate_caches()
        return CliRunner().invoke(cli, [*command, str(config)])


@pytest.fixture
def extra(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Installed:
    folder = tmp_path_factory.mktemp("environment") / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return Installed(folder)


@pytest.mark.slow
def test_version_of_the_model_package_is_locked(tmp_path: Path, extra: Installed) -> None:
    """Another version of the package can compute other results with the same weights."""
    config = tmp_path / "mine.toml"
    config.write_text(CONFIG)
    extra.install("1.0")
    assert extra.call(config, "lock").exit_code == 0
    done = extra.call(config, "run", "--locked")
    assert done.exit_code == 0, done.stderr
    extra.install("1.1")
    assert "locked-extra: locked 1.0, now 1.1" in message(extra.call(config, "run", "--locked"), 2)
    shutil.rmtree(extra.folder / "locked_extra-1.dist-info")
    assert "locked-extra: locked 1.0, now absent" in message(extra.call(config, "run", "--locked"), 2)


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, set[str]]] = {
    "texts": (lambda: BertModel(BertConfig(**TINY)), "the cat sat", {"tokenizers"}),
    "images": (
        lambda: ViTModel(
            ViTConfig(image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        ),
        "grey.png",
        {"tokenizers", "pillow", "numpy"},
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_versions_of_text_and_image_readers_are_locked(tmp_path: Path, kind: str) -> None:
    make, value, packages = MODELS[kind]
    save(make(), tmp_path / "model")
    Image.new("RGB", (16, 16), "grey").save(tmp_path / "grey.png")
    config = tmp_path / "mine.toml"
    config.write_text(f'[model]\nsource = "./model"\n[inputs]\n{kind} = ["{value}"]\n')
    done = CliRunner().invoke(cli, ["lock", str(config)])
    assert done.exit_code == 0, done.stderr
    versions = lockfile.read(config).versions
    # packages_distributions names pillow as its metadata spells it.
    assert {name: metadata.version(name) for name in packages}.items() <= {
        name.lower(): version for name, version in versions.items()
    }.items()
