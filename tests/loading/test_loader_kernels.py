"""Tests that code from the hub runs only with trust_remote_code, also with ``kernels``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optexport.config.load import load_config
from optexport.errors import ConfigError
from tests._helpers import models
from tests._helpers.exports import edit_json

# The part of the package that transformers imports. Functions that would load code print a message.
PACKAGE = """
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __getattr__(self, name): return Anything()

CUDAProperties = Device = KernelizeFallback = LayerRepository = LocalLayerRepository = Mode = ROCMProperties = Anything

def kernelize(model, **kwargs): return model
def register_kernel_mapping(*args, **kwargs): pass
def replace_kernel_forward_from_hub(*args, **kwargs): pass
def use_kernel_mapping(*args, **kwargs): pass
def use_kernel_forward_from_hub(*args, **kwargs): return lambda cls: cls
def use_kernelized_func(*args, **kwargs): return lambda cls: cls

def get_kernel(name, **kwargs):
    raise RuntimeError(f"code of {name} runs")
"""
LOAD = """
import sys
from pathlib import Path
from optexport.config.schema import ModelConfig
from optexport.loading import loader as loading
folder, trusted = sys.argv[1:]
try:
    loading.load(ModelConfig(source=folder, trust_remote_code=trusted == "trusted"), Path(folder))
except Exception as error:
    print(error)
"""


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Returns the folder of a fake ``kernels`` package."""
    (tmp_path / "packages" / "kernels-0.18.5.dist-info").mkdir(parents=True)
    (tmp_path / "packages" / "kernels-0.18.5.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.18.5\n")
    (tmp_path / "packages" / "kernels").mkdir()
    (tmp_path / "packages" / "kernels" / "__init__.py").write_text(f'__version__ = "0.18.5"\n{PACKAGE}')
    return tmp_path / "packages"


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernel_named_by_a_model_config_runs_only_if_trusted(tmp_path: Path, kernels: Path, key: str) -> None:
    folder = tmp_path / "bert"
    models.model("bert").save_pretrained(folder)
    edit_json(folder / "config.json", lambda settings: settings.update({key: "kernels-community/evil"}))

    def load(trusted: str) -> Any:
        environment = {**os.environ, "PYTHONPATH": f"{kernels}{os.pathsep}{Path.cwd()}", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", LOAD, str(folder), trusted]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "code of kernels-community/evil runs" in load("trusted")
    output = load("not")
    assert "kernels-community/evil is code from the hub" in output
    assert "model.trust_remote_code = true" in output
    assert "code of kernels-community/evil runs" not in output


def test_kernel_named_by_the_config_is_refused_before_loading(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    (tmp_path / "bert").mkdir()
    text = '[model]\nsource = "./bert"\nattn_implementation = "kernels-community/evil"\n'
    config.write_text(text)
    with pytest.raises(ConfigError, match="model.attn_implementation: .* is code from the hub"):
        load_config(config)
