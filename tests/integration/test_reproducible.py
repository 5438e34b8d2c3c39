"""Tests that equal runs write equal bytes and no paths of the machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import optexport
from tests._helpers import exports, models
from tests._helpers.inputs import save_processors

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from optexport import export, run
from tests._helpers import exports
from optexport.errors import ExportError
from block_factory import Region, Unsupported
from named_rule import Named

backwards = sys.argv[1] == "backwards"

def block():
    run(Path("block.toml"), baseline=backwards)

def bert():
    run(Path("bert.toml"))

def region():
    export(Region().eval(), {"x": exports.X}, "out/region", dynamic=exports.BATCH)

def named():
    export(exports.block(), exports.batch(), "out/named", dynamic=exports.DYNAMIC, formats=["onnx"],
           transformations=Named())

def fail():
    try:
        export(Unsupported().eval(), {"x": exports.X}, "out/unsupported", dynamic=exports.BATCH)
    except ExportError:
        return
    raise AssertionError("this model was to fail")

runs = [block, bert, region, named]
for make in [fail, *runs[::-1]] if backwards else runs:
    make()
"""
FACTORY = """
import torch
from tests._helpers.exports import block as load

class Region(torch.nn.Module):
    '''Switches off the autocast around a part of it.'''

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = x.sin() * x.shape[0]
        return y + 1

class Unsupported(torch.nn.Module):
    '''Computes singular values, for which ONNX has no operator.'''

    def forward(self, x):
        return torch.linalg.svdvals(x)
"""
RULE = """
import torch
from optexport.transformations import Transformation

def double(x):
    return x + x

class Named(Transformation):
    '''Does nothing, and has a function for an attribute.'''
    preserves_computation = True

    def __init__(self, factor=1.0):
        self.function, self.factor = double, factor

    def transform(self, graph_module):
        return graph_module
"""
BLOCK = (
    """
[model]
source = "python:block_factory:load"
"""
    + exports.INPUTS
    + """
[[transformations]]
use = "merge-linears"
[[transformations]]
use = "python:named_rule:Named"
factor = 0.5
[tracking]
enabled = false
[export]
output = "out/block"
"""
)
BERT = """
[model]
source = "tiny"
task = "feature-extraction"
[parity]
effort = "quick"
[export]
output = "out/bert"
[tracking]
enabled = false
"""


def project(target: Path) -> Path:
    """Writes the configs of several models and the files that they need. Returns the folder."""
    target.mkdir(parents=True)
    (target / "block_factory.py").write_text(FACTORY)
    (target / "named_rule.py").write_text(RULE)
    (target / "block.toml").write_text(BLOCK)
    (target / "bert.toml").write_text(BERT)
    save_processors(target / "tiny")  # the bundle contains the tokenizer
    models.model("bert").save_pretrained(target / "tiny")
    return target


def run_apart(target: Path, hash_seed: str, order: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, order],
        capture_output=True,
        text=True,
        check=False,
        cwd=target,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs two equal projects in separate processes, with another folder, hash seed and order.

    The second process starts with a failed export, and writes the baseline of the block before the block.
    """
    base = tmp_path_factory.mktemp("reproducible")
    targets = project(base / "one"), project(base / "a place with another name" / "two")
    run_apart(targets[0], "1", "forwards")
    run_apart(targets[1], "2", "backwards")
    return targets


def digests(bundle: Path) -> dict[str, str]:
    return {
        path.relative_to(bundle).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(bundle.rglob("*"))
        if path.is_file() and path.name not in exports.UNEQUAL
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "bert", "region"])
def test_bytes_do_not_depend_on_hash_seed_folder_or_order(two: tuple[Path, Path], name: str) -> None:
    first, second = (digests(target / "out" / name) for target in two)
    tokenizer = {"preprocessor/tokenizer.json", "preprocessor/tokenizer_config.json"} if name == "bert" else set()
    assert set(first) - {"config.toml"} - tokenizer == set(exports.FILES) - exports.UNEQUAL
    assert tokenizer <= set(first)
    assert [file for file in first if first[file] != second[file]] == []


@pytest.mark.slow
def test_rule_with_a_function_attribute_gives_the_same_bytes(two: tuple[Path, Path]) -> None:
    first, second = (digests(target / "out" / "named") for target in two)
    assert [file for file in first if first[file] != second[file]] == []


# tests/cli/test_run.py and tests/bench/test_gates.py compare the manifests of two runs in the first tier.
@pytest.mark.slow
def test_second_run_in_the_same_process_writes_the_same_bytes(tmp_path: Path) -> None:
    again = optexport.export(exports.block(), exports.batch(), tmp_path / "block", dynamic=exports.DYNAMIC)
    first, second = digests(exports.exported().output), digests(again.output)
    assert set(first) == set(second)
    assert [file for file in first if first[file] != second[file]] == []


def parts(path: Path) -> dict[str, bytes]:
    """Returns the content of a file, and of all parts if it is an archive."""
    parts_by_name = {path.name: path.read_bytes()}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            parts_by_name |= {f"{path.name}: {info.filename}": archive.read(info) for info in archive.infolist()}
    return parts_by_name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "bert", "region"])
def test_only_the_measurements_contain_paths_of_the_machine(two: tuple[Path, Path], name: str) -> None:
    here = {
        str(two[0]),
        str(Path(optexport.__file__).parent),
        str(Path(torch.__file__).parent),
        str(Path(transformers.__file__).parent),
        str(Path(__file__).parent),
        sys.prefix,
        str(Path.home()) + "/",
        "site-packages",
    }
    for path in (two[0] / "out" / name).rglob("*"):
        if path.name == "measurements.json" or path.is_dir():
            continue
        for part, content in parts(path).items():
            files = [target for target in here if target.encode() in content or target.encode("utf-16-le") in content]
            assert files == [], part


@pytest.mark.slow
def test_absolute_path_in_the_config_is_not_in_the_manifest(tmp_path: Path) -> None:
    target = project(tmp_path / "project")
    save_file(models.inputs("bert", 2, 5), target / "inputs.safetensors")
    (target / "bert.toml").write_text(
        f'[model]\nsource = "{target / "tiny"}"\n[inputs]\ndata = "{target / "inputs.safetensors"}"\n'
        f'[export]\nformats = ["pt2"]\noutput = "{target / "out" / "bert"}"\n[tracking]\nenabled = false\n'
        f'uri = "sqlite:///{target / "mlflow.db"}"\n'
    )
    optexport.run(target / "bert.toml")
    manifest = (target / "out" / "bert" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest
    assert '"source": "tiny"' in manifest
