"""A lock holds the versions of the packages that a model's code imports, and of those that its inputs are read with."""

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

MODULE = """
import torch
SCALE = 1.0
def load():
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.mul_(SCALE)
    return layer
"""
CONFIG = """
[model]
source = "python:locked_model:load"
[inputs.tensors.input]
shape = [2, 4]
[export]
formats = ["pt2"]
[parity]
effort = "quick"
[tracking]
enabled = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    return path


class Installed:
    """A package in a folder of installed ones, as pip leaves it there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.described = folder / "locked_extra-1.dist-info"

    def install(self, version: str) -> None:
        for name, text in {
            "locked_extra/__init__.py": "SCALE = 1.0\n",
            f"{self.described.name}/METADATA": f"Metadata-Version: 2.1\nName: locked-extra\nVersion: {version}\n",
            f"{self.described.name}/top_level.txt": "locked_extra\n",
        }.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def call(self, config: Path, *command: str) -> Result:
        """Calls the program as a process of its own would be: with nothing of it imported."""
        for name in ("locked_model", "locked_extra"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return CliRunner().invoke(cli, [*command, str(config)])


@pytest.fixture
def extra(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Installed:
    folder = tmp_path_factory.mktemp("environment") / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return Installed(folder)


IMPORTS = MODULE.replace("SCALE = 1.0", "from locked_extra import SCALE")


def test_the_version_of_a_package_that_the_models_code_imports_is_locked(config: Path, extra: Installed) -> None:
    """Of packages only those counted that a class of the model is of, and another version of a helper's passed."""
    config.with_name("locked_model.py").write_text(IMPORTS)
    extra.install("1.0")
    assert extra.call(config, "lock").exit_code == 0
    done = extra.call(config, "run", "--locked")
    assert done.exit_code == 0, done.stderr
    extra.install("1.1")
    assert "locked-extra: 1.0 when it was locked, 1.1 now" in message(extra.call(config, "run", "--locked"), 2)
    shutil.rmtree(extra.folder)
    assert "locked-extra: 1.0 when it was locked, absent now" in message(extra.call(config, "run", "--locked"), 2)


def test_what_is_loaded_and_not_imported_by_the_models_code_is_not_locked(config: Path, extra: Installed) -> None:
    extra.install("1.0")
    config.with_name("locked_model.py").write_text(f"{MODULE}def not_called():\n    import locked_extra\n")
    assert extra.call(config, "lock").exit_code == 0
    assert lockfile.read(config).imports == {"locked-extra": "1.0"}  # and not pytest, which runs this


def test_a_package_that_the_models_code_tries_to_import_must_not_come_after_the_lock(
    config: Path, extra: Installed
) -> None:
    config.with_name("locked_model.py").write_text(
        f"try:\n    import locked_extra\nexcept ImportError:\n    pass\n{MODULE}"
    )
    assert extra.call(config, "lock").exit_code == 0
    extra.install("1.0")
    assert "locked-extra: absent when it was locked, 1.0 now" in message(extra.call(config, "run", "--locked"), 2)


def test_the_code_of_what_the_models_code_imports_is_locked_where_it_has_no_version(
    config: Path, extra: Installed
) -> None:
    config.with_name("locked_model.py").write_text(IMPORTS)
    extra.install("1.0")
    shutil.rmtree(extra.described)
    assert "packages of the model: 1." in extra.call(config, "lock").stdout
    done = extra.call(config, "run", "--locked")
    assert done.exit_code == 0, done.stderr
    (extra.folder / "locked_extra" / "__init__.py").write_text("SCALE = 1.0  # of another kind\n")
    assert "the code of locked_extra: " in message(extra.call(config, "run", "--locked"), 2)


READ: dict[str, tuple[Callable[[], PreTrainedModel], str, set[str]]] = {
    "texts": (lambda: BertModel(BertConfig(**TINY)), "the cat sat", {"tokenizers"}),
    "images": (
        lambda: ViTModel(
            ViTConfig(image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        ),
        "grey.png",
        {"tokenizers", "pillow", "numpy"},
    ),
}


@pytest.mark.parametrize("kind", READ)
def test_what_texts_and_images_are_read_with_is_locked(config: Path, tmp_path: Path, kind: str) -> None:
    make, given, packages = READ[kind]
    save(make(), tmp_path / "model")
    Image.new("RGB", (16, 16), "grey").save(tmp_path / "grey.png")
    config.write_text(f'[model]\nsource = "./model"\n[inputs]\n{kind} = ["{given}"]\n')
    done = CliRunner().invoke(cli, ["lock", str(config)])
    assert done.exit_code == 0, done.stderr
    assert lockfile.read(config).imports == {name: metadata.version(name) for name in packages}
