"""Tests of tuning with lower precision: the files that race are lowered like the delivered ones."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from optexport._utils.progress import Progress
from optexport.bench.artifact import Artifact
from optexport.config.schema import Format
from optexport.parity.checker import ParityChecker
from optexport.pipeline import steps
from optexport.pipeline.plan import RunOptions, plan_run
from optexport.pipeline.run import load_job, run
from optexport.pipeline.steps import TracedJob
from optexport.pipeline.variant import VariantExporter, transform_variant
from optexport.quantization import sensitivity
from optexport.quantization.candidate_lowering import CandidateLowering
from optexport.quantization.sensitivity import LayerChoices, find_layers
from optexport.tuning.candidate import Candidate, configured
from optexport.tuning.candidate_builder import CandidateBuilder, CandidateRejected
from optexport.tuning.tournament import Tournament
from tests.quantization import models

_MERGE = 'transformations = [{ use = "merge-linears" }]\n'
_PLAIN: Candidate = frozenset()


def _operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def _weights(path: Path) -> dict[str, torch.dtype]:
    """Returns the dtypes of the weights in a TorchScript file, by name."""
    parameters = torch.jit.load(str(path)).named_parameters()
    return {name: parameter.dtype for name, parameter in parameters if name.endswith("weight")}


def _float32_products(path: Path) -> list[str]:
    return [node.input[1] for node in onnx.load(path).graph.node if node.op_type in ("MatMul", "Gemm")]


def _trace(folder: Path, config: Path, rules: str) -> TracedJob:
    config.write_text(rules + config.read_text(encoding="utf-8"), encoding="utf-8")
    return steps.trace_model(load_job(plan_run(config, RunOptions()), folder, Progress()))


def _make_builder(
    traced: TracedJob, checker: ParityChecker, folder: Path, choices: LayerChoices | None = None
) -> CandidateBuilder:
    """Returns the builder of a run's candidates."""
    lowering = CandidateLowering(traced.job, traced.call, checker, choices or LayerChoices())
    (folder / "files").mkdir()
    return CandidateBuilder(traced.job, traced.trace, traced.call, checker, folder / "files", lowering)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CandidateBuilder]:
    """Returns the builder of a model with a file in int8, one in bfloat16 and one in float32."""
    folder = tmp_path_factory.mktemp("builder")
    config = models.write(
        folder,
        'onnx = "int8"\ntorchscript = "bfloat16"',
        model="merging",
        formats='"onnx", "torchscript", "pt2"',
        gates="cosine = 0.99",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTEXPORT_CACHE", "")
        traced = _trace(folder, config, _MERGE)
        yield _make_builder(traced, steps.run_reference(traced), folder)


def _build(builder: CandidateBuilder, file_format: Format, candidate: Candidate) -> Artifact:
    return builder.build(file_format, candidate, "candidate")


@pytest.mark.parametrize(("rules", "layers"), [({0}, 2), (set(), 3)])
def test_onnx_candidate_is_in_int8(builder: CandidateBuilder, rules: set[int], layers: int) -> None:
    artifact = _build(builder, "onnx", frozenset(rules))
    assert _operators(artifact.path)["MatMulInteger"] == layers
    assert _float32_products(artifact.path) == []
    assert artifact.precision == "int8"
    assert [path.name for path in artifact.path.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("candidate", [frozenset({0}), _PLAIN])
def test_torchscript_candidate_is_in_bfloat16(builder: CandidateBuilder, candidate: Candidate) -> None:
    artifact = _build(builder, "torchscript", candidate)
    assert set(_weights(artifact.path).values()) == {torch.bfloat16}
    assert artifact.precision == "bfloat16"


def test_candidate_of_another_format_is_in_float32(builder: CandidateBuilder) -> None:
    artifact = _build(builder, "pt2", _PLAIN)
    assert {p.dtype for p in torch.export.load(artifact.path).state_dict.values()} == {torch.float32}
    assert artifact.precision is None


@pytest.mark.parametrize(
    ("precision", "file_format", "model", "gate"),
    [("int8", "onnx", "planted", 0.999), ("bfloat16", "torchscript", "sharp", 0.99999)],
)
def test_first_candidate_decides_which_layers_stay_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, file_format: Format, model: str, gate: float
) -> None:
    config = models.write(
        tmp_path, f'{file_format} = "{precision}"', model=model, formats=f'"{file_format}"', gates=f"cosine = {gate}"
    )
    traced, choices = _trace(tmp_path, config, _MERGE), LayerChoices()
    checker = steps.run_reference(traced)
    builder = _make_builder(traced, checker, tmp_path, choices)
    assert builder.layer_search_seconds(file_format) == 0
    first = _build(builder, file_format, configured(traced.job, file_format)).path
    seconds = builder.layer_search_seconds(file_format)
    paths = [_build(builder, file_format, candidate).path for candidate in (_PLAIN, frozenset({0, "gemm"}))]
    for path in (first, *paths):
        if file_format == "onnx":
            float32 = _float32_products(path)
        else:
            float32 = [name for name, dtype in _weights(path).items() if dtype == torch.float32]
        assert [name.partition(".weight")[0] for name in float32] == [models.HURT]
    assert builder.layer_search_seconds(file_format) == seconds > 0  # another search would change it

    def search_again(*_: object) -> None:
        raise AssertionError("the export of the first candidate needs no search")

    monkeypatch.setattr(sensitivity, "choose_layers", search_again)
    (variant,) = traced.job.variants
    (tmp_path / "draft").mkdir()
    exporter = VariantExporter(traced, checker, tmp_path / "draft", Progress(), choices)
    exported = exporter.export(variant, transform_variant(variant, traced, Progress())).artifacts[0]
    assert (tmp_path / "draft" / exported.path).read_bytes() == first.read_bytes()
    assert exported.precision is not None
    assert [layer.layer for layer in exported.precision.layers if layer.kept] == [models.HURT]


_RULES = """
import operator

import torch
from torch import nn

from optexport.transformations import Transformation


class Outlier(Transformation):
    # Scales one feature of each layer's input, and its weights back, which is exact in float32.
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


def test_gates_judge_a_lowered_candidate(tmp_path: Path) -> None:
    (tmp_path / "int8_rules.py").write_text(_RULES, encoding="utf-8")
    config = models.write(tmp_path, 'onnx = "int8"', model="harmless")
    traced = _trace(tmp_path, config, 'transformations = [{ use = "python:int8_rules:Outlier" }]\n')
    builder = _make_builder(traced, steps.run_reference(traced), tmp_path)
    with pytest.raises(CandidateRejected, match="no choice of layers in int8 passes the gates"):
        _build(builder, "onnx", frozenset({0}))
    _build(builder, "onnx", _PLAIN)  # its distances are far above the tolerance of float32
    with pytest.raises(CandidateRejected, match="parity failed for onnx: output, cosine is 0"):
        _build(builder, "onnx", frozenset({0}))  # with the layers of the plain file
    assert len(list((tmp_path / "files").iterdir())) == 1


def test_layers_are_found_where_others_are_merged() -> None:
    merged, separate = ["block.a-b-merged", "last"], ["block.a", "block.b", "last"]
    assert find_layers(["block.a-b-merged"], separate) == ["block.a", "block.b"]
    assert find_layers(["block.b", "gone"], merged) == ["block.a-b-merged"]
    assert find_layers(["block"], separate) == ["block.a", "block.b"]


class Race:
    """A tuned run, with copies of the files that raced."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, dict[str, Path]] = {}
        rung = Tournament.rung

        def copying_rung(own: Tournament, field: Mapping[Candidate, Artifact], *args: Any) -> None:
            for artifact in field.values():
                copy = folder / f"{artifact.path.parent.name}-{artifact.path.name}"
                shutil.copyfile(artifact.path, copy)
                self.files.setdefault(artifact.format, {})[artifact.name] = copy
            rung(own, field, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OPTEXPORT_CACHE", "")
            patch.setattr(Tournament, "rung", copying_rung)
            self.result = run(_write(folder, _MERGE, "[bench]\nrounds = 12\n[tune]\nbudget = '3m'\n"))


def _write(folder: Path, head: str, tail: str) -> Path:
    config = models.write(
        folder,
        'onnx = "int8"\ntorchscript = "bfloat16"',
        model="merging",
        formats='"onnx", "torchscript"',
        gates="cosine = 0.99",
    )
    config.write_text(f"{head}{config.read_text(encoding='utf-8')}{tail}", encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Race:
    return Race(tmp_path_factory.mktemp("race"))


@pytest.mark.nightly
def test_only_lowered_files_race(race: Race) -> None:
    for name in ("onnx", "torchscript"):
        assert len(race.files[name]) >= 3
        assert {"as configured", "plain export"} <= set(race.files[name])
    assert all(_operators(path)["MatMulInteger"] >= 2 for path in race.files["onnx"].values())
    assert all(torch.bfloat16 in _tensor_dtypes(path) for path in race.files["torchscript"].values())
    assert race.result.bench is None


def _tensor_dtypes(path: Path) -> set[torch.dtype]:
    """Returns the dtypes of the weights in a TorchScript file, which are constants of a frozen one."""
    module = torch.jit.load(str(path))
    graph = module.inlined_graph
    nodes = [node for node in graph.findAllNodes("prim::Constant") if node.hasAttribute("value")]
    constants = [node.t("value") for node in nodes if node.kindOf("value") == "t"]
    return {tensor.dtype for tensor in (*module.parameters(), *constants)}


@pytest.mark.nightly
def test_delivered_files_raced(race: Race) -> None:
    for outcome in race.result.tuned:
        raced = race.files[outcome.format][outcome.chosen.change]
        assert raced.read_bytes() == race.result.files[outcome.format].read_bytes()


@pytest.mark.nightly
def test_run_with_the_choice_delivers_the_same_files(
    race: Race, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    config = race.result.manifest.config
    rules = [
        f'{{ use = "{r["use"]}", formats = {r.get("formats", [*race.files])} }}' for r in config["transformations"]
    ]
    passes = "".join(f"{name} = {json.dumps(names)}\n" for name, names in config["export"]["passes"].items())
    again = run(_write(tmp_path, f"transformations = [{', '.join(rules)}]\n", f"[export.passes]\n{passes}"))
    for name, path in race.result.files.items():
        assert again.files[name].read_bytes() == path.read_bytes()
