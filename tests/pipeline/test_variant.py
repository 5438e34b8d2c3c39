"""Variants: formats with different rules, one graph for each set of rules, all of them verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexport._utils.platform import processor_flags
from optexport.config.load import load_config
from optexport.errors import ConfigError, ParityError
from optexport.exporters import targets
from optexport.exporters.registry import default_passes
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests._helpers.exports import INPUTS

_CONFIG = f"""
[model]
source = "python:tests._helpers.exports:block"
{INPUTS}
[[transformations]]
use = "merge-linears"
formats = ["torchscript", "pt2"]
[[transformations]]
use = "change-true-div-to-mul-by-inverse"
[parity]
effort = "quick"
[tracking]
enabled = false
"""

_WRONG = """
from optexport.transformations import Transformation

class Shift(Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        norm = next(n for n in graph_module.graph.nodes if n.op == "call_module" and "norm" in n.target)
        with graph_module.graph.inserting_after(norm):
            shifted = graph_module.graph.call_function(lambda x: x + 0.5, (norm,))
        norm.replace_all_uses_with(shifted, delete_user_cb=lambda user: user is not shifted)
        return graph_module
"""


def _write(folder: Path, text: str = _CONFIG) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dump")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, dump: Path) -> Result:
    return run(_write(tmp_path_factory.mktemp("branch")), dump=dump)


@pytest.mark.slow
@pytest.mark.usefixtures("result")
def test_each_graph_is_dumped_under_its_formats(dump: Path) -> None:
    names = {path.name for path in dump.iterdir()}
    assert "onnx-01-change-true-div-to-mul-by-inverse-after.txt" in names
    assert "torchscript-pt2-01-merge-linears-before.txt" in names


def test_each_graph_is_verified_before_its_files(result: Result) -> None:
    made_from = {place.target: place.made_from for place in result.parity}
    merged, plain = "graph for torchscript, pt2", "graph for onnx"
    assert made_from == {
        "original": "original",
        merged: "original",
        "torchscript": merged,
        "pt2": merged,
        plain: "original",
        "onnx": plain,
        "onnx-optimized": "onnx",
    }
    assert result.passed


def test_manifest_lists_the_rules_of_each_file(result: Result) -> None:
    changed = {(record.rule, tuple(record.formats)): len(record.changes) for record in result.manifest.transformations}
    assert changed == {
        ("merge-linears", ("torchscript", "pt2")): 1,
        ("change-true-div-to-mul-by-inverse", ("torchscript", "pt2")): 1,
        ("change-true-div-to-mul-by-inverse", ("onnx",)): 1,
    }
    assert result.manifest.undone == ["merge-linears", "change-true-div-to-mul-by-inverse"]


def test_file_contains_the_result_of_its_own_rules(result: Result) -> None:
    products = {
        name: str(torch.jit.load(str(path)).graph).count(
            "::_linear_pointwise" if "onednn-linear" in default_passes(name, processor_flags()) else "aten::linear"
        )
        for name, path in result.files.items()
        if name == "torchscript"
    }
    assert products == {"torchscript": 4}
    graph = (result.output / "graph_after.onnx.txt").read_text()
    assert "merged" not in graph
    assert "merged" in (result.output / "graph_after.torchscript-pt2.txt").read_text()


def test_all_files_compute_the_same(result: Result) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(3, 5, 8), "mask": torch.ones(3, 5, dtype=torch.int64)}
    names = [output.name for output in result.manifest.outputs]
    outputs = [run(batch)["hidden"] for f, p in result.files.items() for _, run in targets.open_file(p, f, names)]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_failure_in_one_graph_is_blamed_on_its_rule(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(_WRONG, encoding="utf-8")
    text = _CONFIG.replace('use = "merge-linears"', 'use = "python:wrong:Shift"')
    with pytest.raises(ParityError, match="graph for torchscript, pt2") as raised:
        run(_write(tmp_path, text))
    assert "python:wrong:Shift" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            ("[tracking]", '[export]\nformats = ["onnx"]\n[tracking]'),
            "transformations\\[0\\].formats: the format torchscript is not exported",
        ),
        (('use = "merge-linears"', 'use = "keep-outputs"\noutputs = ["hidden"]'), "all files have the same outputs"),
        (('"torchscript", "pt2"', '"torchsript"'), "transformations\\[0\\].formats\\[0\\]"),
        (("[tracking]", '[export.passes]\nonnx = ["sum"]\n[tracking]'), 'passes.onnx: unknown format pass "sum"'),
    ],
)
def test_invalid_variants_are_refused(tmp_path: Path, changed: tuple[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(_write(tmp_path, _CONFIG.replace(*changed)))
