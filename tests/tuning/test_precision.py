"""Tests of tuning with lower precision: the files that race are lowered as the delivered ones."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from optexport.bench.artifact import Artifact
from optexport.pipeline.run import run
from optexport.quantization import int8
from optexport.quantization.sensitivity import find_layers
from optexport.result import Result
from optexport.tuning.candidate import Candidate
from optexport.tuning.tournament import Tournament
from tests.quantization import models

pytestmark = pytest.mark.slow

_PRECISION = 'onnx = "int8"\ntorchscript = "bfloat16"'
_TUNE = '[bench]\nrounds = 12\nshapes = [{ batch = 3 }]\n[tune]\nbudget = "2m"\n'


class Race:
    """A real tuned run, with copies of the files that raced, and the number of searches for float32 layers."""

    def __init__(self, folder: Path, config: Path, *, tables: str = _TUNE, rules: str = "") -> None:
        self.files: dict[str, dict[str, Path]] = {}
        self.searches = Counter[str]()
        rung, choose_layers = Tournament.rung, int8.choose_layers

        def copying_rung(own: Tournament, field: Mapping[Candidate, Artifact], *args: Any) -> None:
            for artifact in field.values():
                target = folder / "raced" / f"{artifact.path.parent.name}-{artifact.path.name}"
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(artifact.path, target)
                self.files.setdefault(artifact.format, {})[artifact.name] = target
            rung(own, field, *args)

        def counting_choice(*args: Any) -> Any:
            self.searches[args[0]] += 1
            return choose_layers(*args)

        config.write_text(f"{rules}{config.read_text()}{tables}", encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPTEXPORT_CACHE", "")
            patch.setattr(Tournament, "rung", copying_rung)
            patch.setattr(int8, "choose_layers", counting_choice)
            self.result = run(config)


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    folder = tmp_path_factory.mktemp("precision")
    formats = '"onnx", "torchscript", "pt2"'
    config = models.write(folder, _PRECISION, model="merging", formats=formats, gates="cosine = 0.99")
    return Race(folder, config, rules='transformations = [{ use = "merge-linears" }]\n')


def _operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def _dtypes(path: Path) -> set[torch.dtype]:
    return {p.dtype for name, p in torch.jit.load(str(path)).named_parameters() if name.endswith("weight")}


def test_raced_files_have_the_precision_of_the_delivered_ones(race: Race) -> None:
    assert {"as configured", "plain export", "with gemm"} <= set(race.files["onnx"])
    for path in race.files["onnx"].values():
        operators = _operators(path)
        assert operators["MatMulInteger"] >= 2
        assert not operators.keys() & {"MatMul", "Gemm"}
    assert {"as configured", "plain export"} <= set(race.files["torchscript"])
    for path in race.files["torchscript"].values():
        assert _dtypes(path) == {torch.bfloat16}
    for path in race.files["pt2"].values():
        assert {p.dtype for p in torch.export.load(path).state_dict.values()} == {torch.float32}


def test_delivered_files_raced(race: Race) -> None:
    for outcome in race.result.tuned:
        raced = race.files[outcome.format][outcome.chosen.change]
        assert raced.read_bytes() == race.result.files[outcome.format].read_bytes()


def test_delivered_files_are_those_of_a_run_with_the_choice(race: Race, tmp_path: Path) -> None:
    chosen = race.result.manifest.config
    config = models.write(
        tmp_path, _PRECISION, model="merging", formats='"onnx", "torchscript", "pt2"', gates="cosine = 0.99"
    )
    rules = "".join(f'{{ use = "{r["use"]}", formats = {json.dumps(r["formats"])} }}' for r in chosen["transformations"])
    passes = "".join(f"{name} = {json.dumps(names)}\n" for name, names in chosen["export"]["passes"].items())
    config.write_text(f"transformations = [{rules}]\n{config.read_text()}[export.passes]\n{passes}", encoding="utf-8")
    again = run(config)
    for name, path in race.result.files.items():
        assert again.files[name].read_bytes() == path.read_bytes()


def test_layers_that_stay_in_float32_are_searched_once(tmp_path: Path) -> None:
    race = Race(tmp_path, models.write(tmp_path, 'onnx = "int8"'))
    assert len(race.files["onnx"]) > 2
    for path in (*race.files["onnx"].values(), race.result.files["onnx"]):
        nodes = onnx.load(path).graph.node
        (weight,) = [node.input[1] for node in nodes if node.op_type in ("MatMul", "Gemm")]
        assert weight.startswith(models.HURT)
    assert race.searches == {"onnx": 2}  # for the candidates, and for the delivered file


_RULES = """
import operator

import torch
from torch import nn

from optexport.transformations import Transformation


class Outlier(Transformation):
    # Scales one feature of each layer's input, and its weights back. This is exact in float32.
    preserves_computation = True

    def transform(self, graph_module):
        scale = torch.ones(32)
        scale[5] = 2.0**14
        graph_module.register_buffer("outlier", scale)
        for node in list(graph_module.graph.nodes):
            if node.op == "call_module" and isinstance(graph_module.get_submodule(node.target), nn.Linear):
                layer = graph_module.get_submodule(node.target)
                layer.weight = nn.Parameter(layer.weight.detach() / scale)
                with graph_module.graph.inserting_before(node):
                    outlier = graph_module.graph.get_attr("outlier")
                    node.args = (graph_module.graph.call_function(operator.mul, (node.args[0], outlier)),)
        return graph_module
"""


def test_rule_that_the_precision_does_not_tolerate_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "int8_rules.py").write_text(_RULES, encoding="utf-8")
    config = models.write(tmp_path, 'onnx = "int8"', model="harmless", gates="cosine = 0.999")
    race = Race(tmp_path, config, rules='transformations = [{ use = "python:int8_rules:Outlier" }]\n')
    (outcome,) = race.result.tuned
    assert outcome.chosen.rules == ()
    refused = {trial.change: trial.refused for trial in outcome.trials}
    assert refused["as configured"] == "onnx: no choice of layers in int8 passes the gates"
    assert refused["plain export"] is None


def test_layers_are_found_where_others_are_merged() -> None:
    merged, separate = ["block.a-b-merged", "last"], ["block.a", "block.b", "last"]
    assert find_layers(["block.a-b-merged"], separate) == ["block.a", "block.b"]
    assert find_layers(["block.b", "gone"], merged) == ["block.a-b-merged"]
    assert find_layers(["block"], separate) == ["block.a", "block.b"]
