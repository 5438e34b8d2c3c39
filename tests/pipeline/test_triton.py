"""Triton model repositories: valid configurations that match the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from safetensors.numpy import load_file
from torch import nn

from optexport import Bundle, export
from optexport._utils.progress import Progress
from optexport.bench.artifact import open_artifacts
from optexport.bundle import digests
from optexport.bundle.manifest import ArtifactRecord
from optexport.config.load import parse_config
from optexport.errors import ConfigError, ExportError
from optexport.parity.cases.case import Case
from optexport.parity.reference import HALVES, Reference
from optexport.parity.verify import verify
from optexport.pipeline import triton
from optexport.report.result import Result
from optexport.signature.signature import Dim, Signature, TensorSpec
from tests._helpers import exports, stores
from tests._helpers.cli import CliRunner, cli
from tests.serving import repository
from tests.serving.models import Mixed, served

BATCHED = [("rows", "onnx"), ("rows", "torchscript"), ("mixed", "onnx"), ("int8", "onnx"), ("int8-blocks", "onnx")]
NOT_BATCHED = [
    ("block", "onnx"),
    ("pairs", "onnx"),
    ("pairs", "torchscript"),
    ("fixed", "torchscript"),
    ("two batches", "onnx"),
]


def configuration(result: Result, file_format: str) -> Any:
    return repository.read(result.files[file_format].parents[1])


@pytest.mark.sample(1, 4)
@pytest.mark.parametrize(("name", "file_format"), [*BATCHED, *NOT_BATCHED])
def test_file_matches_its_configuration_and_the_reference(name: str, file_format: str) -> None:
    result = served(name)
    config, manifest = configuration(result, file_format), result.manifest
    run = repository.open_model(config, result.files[file_format])
    stored = load_file(result.output / "reference.safetensors")
    for number, case in enumerate(manifest.reference_cases):
        if name == "fixed" and stored[f"{number}.inputs.x"].shape != (4, 4):
            continue
        inputs = {spec.name: stored[f"{number}.inputs.{spec.name}"] for spec in manifest.inputs}
        answers = repository.ask(config, run, inputs, [spec.name for spec in manifest.outputs])
        for output, answer in answers.items():
            expected = stored[f"{number}.outputs.{output}"]
            assert answer.dtype == expected.dtype
            if name.startswith("int8"):  # only its gate on the cosine applies; processors round products differently
                assert (answer * expected).sum() >= 0.9 * np.linalg.norm(answer) * np.linalg.norm(expected), case
            else:
                np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-5, err_msg=f"{case}: {output}")


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "file_format"), BATCHED)
def test_triton_adds_the_batch_if_all_tensors_share_one(name: str, file_format: str) -> None:
    config = configuration(served(name), file_format)
    assert config.max_batch_size > 0
    assert config.HasField("dynamic_batching") == (name in ("rows", "int8-blocks")), "rows know of each other"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file_format"), NOT_BATCHED)
def test_every_axis_is_configured_if_tensors_share_no_batch(name: str, file_format: str) -> None:
    config = configuration(served(name), file_format)
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[[1, 1]] * 4, [[1, 2], [3, 4], [1, 2], [3, 4]]], ids=str)
def test_equal_rows_do_not_prove_that_rows_are_independent(rows: list[list[float]], tmp_path: Path) -> None:
    x = torch.tensor(rows, dtype=torch.float32)
    options: dict[str, Any] = {"dynamic": exports.BATCH, "formats": ["onnx"], "layout": "triton"}
    result = export(Mixed().eval(), {"x": x}, tmp_path / "mixed", transformations=[], **options)
    assert HALVES in result.manifest.parity.ways, "the halves' means are those of the whole"
    config = configuration(result, "onnx")
    assert config.max_batch_size > 1
    assert not config.HasField("dynamic_batching")


def test_largest_batch_is_the_declared_or_the_verified_one() -> None:
    assert configuration(served("rows"), "onnx").max_batch_size == 16
    stored = load_file(served("mixed").output / "reference.safetensors")
    largest = max(len(array) for name, array in stored.items() if name.endswith(".inputs.x"))
    assert configuration(served("mixed"), "onnx").max_batch_size == largest


def test_names_and_types_match_the_model() -> None:
    onnx_config, torch_config = (configuration(served("rows"), name) for name in ("onnx", "torchscript"))
    names = ["x", "flag", "ids", "states.0", "states.1"]
    types = ["TYPE_FP32", "TYPE_BOOL", "TYPE_INT64", "TYPE_FP16", "TYPE_FP16"]
    assert [(io.name, repository.type_of(io)) for io in onnx_config.input] == list(zip(names, types, strict=True))
    assert [io.name for io in onnx_config.output] == ["y", "a row's", 'it is "so"\\', "halves/0"]
    assert [io.name for io in torch_config.input] == ["x", "flag", "ids", "states_0", "states_1"]
    assert [io.name for io in torch_config.output] == [f"OUTPUT__{place}" for place in range(4)]


def test_file_of_fixed_shape_has_its_sizes_in_the_configuration() -> None:
    config = configuration(served("fixed"), "torchscript")
    assert [list(io.dims) for io in config.input] == [[4, 4]]


def test_each_file_is_stored_once_at_the_path_in_the_manifest() -> None:
    result = served("rows")
    assert {name: path.relative_to(result.output).as_posix() for name, path in result.files.items()} == {
        "onnx": "model_repository/rows_onnx/1/model.onnx",
        "torchscript": "model_repository/rows_torchscript/1/model.pt",
        "pt2": "model.pt2",
    }
    listed = {file.path for file in digests.read_manifest(result.output).files}
    assert {path for path in listed if "model" in path} == {
        "model.pt2",
        *(f"model_repository/rows_{name}" for name in ("onnx/config.pbtxt", "onnx/1/model.onnx")),
        *(f"model_repository/rows_{name}" for name in ("torchscript/config.pbtxt", "torchscript/1/model.pt")),
    }


def test_bundle_verifies_and_runs_like_any_other() -> None:
    result = served("rows")
    proof = verify(result.output)
    assert [place.target for place in proof.targets] == ["original", "torchscript", "onnx", "onnx-optimized", "pt2"]
    stored = load_file(result.output / "reference.safetensors")
    inputs = {spec.name: stored[f"0.inputs.{spec.name}"] for spec in result.manifest.inputs}
    for name in result.files:
        np.testing.assert_allclose(
            Bundle.load(result.output, name)(**inputs)["y"], stored["0.outputs.y"], rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_python_started_in_the_bundle_ignores_its_folders() -> None:
    code = "import torch; torch.export.load('model.pt2')"  # it checks if there is a package named triton
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=served("rows").output, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_file_is_benchmarked_like_in_other_bundles(tmp_path: Path) -> None:
    path = served("rows").files["torchscript"]
    target = open_artifacts(path)
    assert target.bundle == served("rows").output
    assert [artifact.path for artifact in target.artifacts] == [path]
    assert [artifact.proven for artifact in target.artifacts] == [True]


def test_changed_configuration_is_found(tmp_path: Path) -> None:
    bundle = shutil.copytree(served("rows").output, tmp_path / "bundle")
    path = bundle / "model_repository" / "rows_onnx" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 16", "max_batch_size: 64"))
    done = CliRunner().invoke(cli, ["verify", str(bundle)])
    assert done.exit_code == 4
    assert "model_repository/rows_onnx/config.pbtxt: the file was changed" in done.stderr


def test_diagnose_finds_a_wrong_file_and_overwrites_its_output(tmp_path: Path) -> None:
    bundle = shutil.copytree(served("rows").output, tmp_path / "bundle")
    name = "model_repository/rows_torchscript/1/model.pt"
    exports.rezip(bundle / name, lambda part, content: bytes(len(content)) if part.endswith("data/0") else content)
    exports.reseal(bundle, name)
    for _ in range(2):
        done = CliRunner().invoke(cli, ["diagnose", str(bundle)])
        assert done.exit_code == 4, done.stderr
        assert "so the exporter or TorchScript changed the numbers" in done.stderr
        assert "could not be written" not in done.stderr
        assert (tmp_path / "bundle-failure" / "model.pt").is_file()


@pytest.mark.slow
def test_layouts_replace_each_other_and_compute_the_same(tmp_path: Path) -> None:
    bundle, copied = tmp_path / "bundle", tmp_path / "copied"
    options: dict[str, Any] = {"dynamic": {"input": {0: "batch"}}, "formats": ["onnx"], "effort": "quick"}
    model = nn.Linear(4, 3).eval()
    export(model, {"input": exports.X}, bundle, layout="triton", **options)
    shutil.copytree(bundle, copied)
    export(model, {"input": exports.X}, bundle, **options)
    assert not (bundle / "model_repository").exists()
    done = CliRunner().invoke(cli, ["diff", str(bundle), str(copied)])
    assert done.exit_code == 0, done.stderr
    assert "compute the same" in " ".join(done.stdout.split())
    export(model, {"input": exports.X}, bundle, layout="triton", **options)
    assert not (bundle / "model.onnx").exists()
    for path in sorted((copied / "model_repository").rglob("*.*")):
        assert path.read_bytes() == (bundle / path.relative_to(copied)).read_bytes(), "two runs give the same bytes"


def test_external_weights_are_moved_with_their_file(tmp_path: Path) -> None:
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    weight = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "weight")
    product = helper.make_node("MatMul", ["x", "weight"], ["y"])
    graph = helper.make_graph([product], "graph", tensors[:1], tensors[1:], [weight])
    onnx.save_model(
        helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)]),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    specs = [TensorSpec(name, "float32", ("batch", 4)) for name in ("x", "y")]
    signature = Signature((specs[0],), (specs[1],), {"batch": Dim("batch", 1, 8)})
    reference = Reference((Case("traced", {"x": exports.X}),), ({},), ({},))
    record = ArtifactRecord(format="onnx", path="model.onnx", fixed_shape=None)
    (moved,) = triton.lay_out(tmp_path, "large", [record], signature, reference)
    folder = (tmp_path / moved.path).parent
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx.data"]
    config = repository.read(folder.parent)
    inputs = {"x": exports.X.numpy()}
    answers = repository.ask(config, repository.open_model(config, tmp_path / moved.path), inputs, ["y"])
    np.testing.assert_array_equal(answers["y"], inputs["x"])


@pytest.mark.parametrize(
    ("output", "name"), [("build/minilm", "minilm"), ("a b/ü:1", "__1"), ("..", "model"), (".hidden", "hidden")]
)
def test_models_are_named_after_the_output(output: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    spec = TensorSpec("x", "float32", (3,))
    record = ArtifactRecord(format="onnx", path="model.onnx", fixed_shape=None)
    reference = Reference((Case("traced", {"x": torch.ones(3)}),), ({},), ({},))
    (moved,) = triton.lay_out(tmp_path, output, [record], Signature((spec,), (spec,), {}), reference)
    assert moved.path == f"model_repository/{name}_onnx/1/model.onnx"


class Scalar(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x.sum()


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x.new_zeros(0, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "inputs", "formats", "problem"),
    [
        (
            Scalar(),
            {"x": exports.X},
            ["torchscript"],
            "output_1: Triton's pytorch backend does not support tensors without axes",
        ),
        (Nothing(), {"x": exports.X}, ["onnx"], "output_1: Triton does not support axes of size 0"),
        (nn.Linear(4, 3).bfloat16(), {"input": exports.X.bfloat16()}, ["torchscript"], "does not support bfloat16"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_model_that_triton_cannot_serve_is_refused_early(
    model: nn.Module, inputs: Any, formats: list[str], problem: str, tmp_path: Path
) -> None:
    steps: list[str] = []
    with pytest.raises(ExportError, match=problem) as caught:
        export(
            model.eval(),
            inputs,
            tmp_path / "bundle",
            formats=formats,
            layout="triton",
            progress=Progress(lambda name, _: steps.append(name)),
        )
    assert "from export.formats" in str(caught.value.hint)
    assert set(steps) == {"trace"}
    assert list(tmp_path.iterdir()) == []


def test_model_without_inputs_is_refused_for_such_a_backend() -> None:
    signature = Signature((), (TensorSpec("y", "float32", (3,)),), {})
    triton.check(signature, ["onnx", "pt2"])
    with pytest.raises(ExportError, match="pytorch backend does not serve models without inputs"):
        triton.check(signature, ["onnx", "torchscript"])


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        ('[export]\nlayout = "triton"\nformats = ["pt2", "openvino"]\n', "Triton serves ONNX and TorchScript files"),
        ('[export]\nlayout = "triton"\n[generation]\n', "export.layout: export.layout cannot be combined with"),
        ('[export]\nlayout = "tritn"\n', "triton"),
    ],
)
def test_config_with_an_unsuitable_layout_is_refused(tables: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_config(f'[model]\nsource = "org/name"\n{tables}', tmp_path / "config.toml")


@pytest.mark.slow
def test_run_is_reproducible_to_the_byte_and_tracked(tmp_path: Path) -> None:
    config = stores.project(tmp_path, stores.store(tmp_path), formats='["onnx"]')
    config.write_text(config.read_text().replace("[export]", '[parity]\neffort = "quick"\n[export]\nlayout = "triton"'))
    done = CliRunner().invoke(cli, ["run", str(config), "--json"])
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    bundle = tmp_path / "out" / "block"
    assert result["files"]["onnx"] == str(bundle / "model_repository" / "block_onnx" / "1" / "model.onnx")
    done = CliRunner().invoke(cli, ["reproduce", str(bundle), "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    sent = mlflow.artifacts.list_artifacts(
        run_id=result["mlflow_run_id"], artifact_path="bundle/model_repository/block_onnx"
    )
    assert [Path(file.path).name for file in sent] == ["1", "config.pbtxt"]
