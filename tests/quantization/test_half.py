"""PyTorch files in half precision: cast after the graph is verified, within the gates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexport import export
from optexport.bundle.manifest import LayerRecord
from optexport.errors import ConfigError, ParityError
from optexport.exporters import targets
from optexport.parity import verify
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests._helpers import exports
from tests.quantization import models

_FORMATS = '"onnx", "torchscript", "pt2"'


def _layers(result: Result, file_format: str) -> list[LayerRecord]:
    (record,) = [a.precision for a in result.manifest.artifacts if a.format == file_format]
    assert record is not None
    return record.layers


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Exports TorchScript in bfloat16, which every layer tolerates at this gate, and the others in float32."""
    folder = tmp_path_factory.mktemp("half")
    return run(models.write(folder, 'torchscript = "bfloat16"', formats=_FORMATS))


def test_layers_are_in_half_precision_and_outputs_are_not(result: Result) -> None:
    module = torch.jit.load(str(result.files["torchscript"]))
    assert {p.dtype for name, p in module.named_parameters() if "layers" in name} == {torch.bfloat16}
    (_, run_file), *_ = targets.open_file(result.files["torchscript"], "torchscript", ["output"])
    assert run_file({"x": torch.randn(3, 32)})["output"].dtype == torch.float32


def test_graph_is_verified_before_the_cast_and_gated_after_it(result: Result) -> None:
    made_from = {target.target: target.made_from for target in result.parity}
    proven, cast = "graph for torchscript", "graph-cast for torchscript"
    assert made_from[proven] == "original"
    assert made_from[cast] == proven
    assert made_from["torchscript"] == cast
    precisions = {target.target: target.precision for target in result.parity}
    assert [target for target, precision in precisions.items() if precision] == [cast, "torchscript"]
    limits = {target.target: target.outputs[0].limit for target in result.parity}
    assert limits[proven] < 1e-3
    assert limits[cast] == float("inf")


@pytest.mark.slow
def test_other_formats_stay_unchanged(result: Result, tmp_path: Path) -> None:
    plain = run(models.write(tmp_path, "", formats='"onnx", "pt2"'))
    for name in ("onnx", "pt2"):
        assert plain.files[name].read_bytes() == result.files[name].read_bytes()


def test_cast_is_a_transformation_of_its_format_only(result: Result) -> None:
    cast = [t.formats for t in result.manifest.transformations if t.rule == "cast-precision"]
    assert cast == [["torchscript"]]


def test_half_precision_bundle_verifies(result: Result) -> None:
    assert verify.verify(result.output).passed


@pytest.mark.slow
def test_sensitive_layer_stays_in_float32_in_all_files(tmp_path: Path) -> None:
    text = 'torchscript = "bfloat16"\npt2 = "bfloat16"'
    result = run(models.write(tmp_path, text, model="sharp", formats='"torchscript", "pt2"', gates="cosine = 0.99999"))
    for name in ("torchscript", "pt2"):
        assert {layer.layer: layer.kept for layer in _layers(result, name) if layer.kept} == {models.HURT: "measured"}
    parameters = dict(torch.jit.load(str(result.files["torchscript"])).named_parameters())
    dtypes = {str(p.dtype) for name, p in parameters.items() if models.HURT in name}
    assert dtypes == {"torch.float32"}


@pytest.mark.slow
def test_products_of_activations_may_be_kept_by_their_nodes(tmp_path: Path) -> None:
    config = models.write(
        tmp_path, 'pt2 = "bfloat16"\nkeep_float32 = ["down", "matmul"]', formats='"pt2"', gates="cosine = 0.99"
    )
    mask = '[inputs.tensors.mask]\nshape = ["batch", 4]\ndtype = "int64"\nlow = 1\nhigh = 2\n'
    text = config.read_text().replace("tests.quantization.models:planted", "tests._helpers.exports:block")
    config.write_text(text.replace('["batch", 32]\n', f'["batch", 4, 8]\n{mask}'))
    reasons = {layer.layer: layer.kept for layer in _layers(run(config), "pt2")}
    assert {name for name, reason in reasons.items() if reason is not None} == {"down", "matmul"}
    assert reasons["matmul_1"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "half"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_both_half_precisions_work_and_are_reproducible(tmp_path: Path, precision: str, half: torch.dtype) -> None:
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        text = f'torchscript = "{precision}"\npt2 = "{precision}"'
        output = run(models.write(tmp_path / name, text, model="harmless", formats='"torchscript", "pt2"')).output
        files.append({p.name: p.read_bytes() for p in output.iterdir() if p.name not in exports.UNEQUAL})
    assert files[0] == files[1]
    module = torch.export.load(tmp_path / "one" / "bundle" / "model.pt2")
    assert half in {p.dtype for p in module.state_dict.values()}


@pytest.mark.slow
def test_python_api_casts_too_and_needs_a_gate(tmp_path: Path) -> None:
    options = {"formats": ["pt2"], "precision": {"pt2": "bfloat16"}}
    with pytest.raises(ConfigError, match="so it needs a gate on its decisions"):
        export(models.harmless(), {"x": torch.randn(3, 32)}, tmp_path / "none", **options)
    result = export(models.harmless(), {"x": torch.randn(3, 32)}, tmp_path / "b", metrics={"cosine": 0.99}, **options)
    assert all(layer.kept is None for layer in _layers(result, "pt2"))


@pytest.mark.slow
def test_gates_that_nothing_passes_fail_the_run(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="no choice of layers in bfloat16 passes the gates"):
        run(models.write(tmp_path, 'pt2 = "bfloat16"', formats='"pt2"', gates="cosine = 0.99999999"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_unknown_layer_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='no layer "layer.2"'):
        run(models.write(tmp_path, 'pt2 = "bfloat16"\nkeep_float32 = ["layer.2"]', formats='"pt2"'))


class Normed(torch.nn.Module):
    """A layer norm between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def _export_normed(folder: Path, cosine: float, **precision: object) -> Result:
    torch.manual_seed(0)
    x = {"x": torch.randn(3, 4)}
    options = {"formats": ["torchscript"], "metrics": {"cosine": cosine}}
    return export(Normed().eval(), x, folder, precision={"torchscript": "bfloat16", **precision}, **options)


def test_gates_that_only_a_norm_in_bfloat16_passes_fail_the_run(tmp_path: Path) -> None:
    result = _export_normed(tmp_path / "a", 0.99)
    assert [layer.layer for layer in _layers(result, "torchscript")] == ["a", "b"]
    with pytest.raises(ParityError, match="no choice of layers"):
        _export_normed(tmp_path / "b", 0.99999999)


@pytest.mark.slow
@pytest.mark.parametrize(("float32_layer", "dtype"), [("a", "float32"), ("b", "bfloat16")])
def test_norm_follows_the_layer_that_it_reads(float32_layer: str, dtype: str, tmp_path: Path) -> None:
    result = _export_normed(tmp_path / "out", 0.99, keep_float32=[float32_layer])
    parameters = dict(torch.jit.load(str(result.files["torchscript"])).named_parameters())
    assert str(parameters["norm.weight"].dtype) == f"torch.{dtype}"
