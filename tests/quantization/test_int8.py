"""ONNX files in int8: measurement finds the layers that stay in float32, and gates decide."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from optexport import Bundle
from optexport._utils.platform import saturates_int8
from optexport.bundle.manifest import PrecisionRecord
from optexport.config.load import load_config
from optexport.config.requirements import check_machine
from optexport.errors import ConfigError, DeviceError, ParityError
from optexport.parity import verify
from optexport.pipeline.run import run
from optexport.quantization import int8
from optexport.quantization.int8_rows import quantize_rows
from optexport.report.result import Result
from optexport.runtime import devices, runners
from tests._helpers import exports
from tests.quantization import models

METHODS = ("int8", "int8-rows", "int8-blocks", "int8-static")


def _record(result: Result) -> PrecisionRecord:
    (record,) = [a.precision for a in result.manifest.artifacts if a.format == "onnx"]
    assert record is not None
    return record


def _kept(result: Result) -> dict[str, str]:
    return {layer.layer: layer.kept for layer in _record(result).layers if layer.kept is not None}


def _float_products(path: Path) -> list[str]:
    """Returns the weights of the products that are still computed in float32."""
    nodes = onnx.load(path).graph.node
    restored = {name for node in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    return [node.input[1] for node in nodes if node.op_type in ("MatMul", "Gemm") and node.input[1] not in restored]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Exports the planted model in int8, and in float32 for the other formats."""
    folder = tmp_path_factory.mktemp("int8")
    return run(models.write(folder, 'onnx = "int8"', formats='"onnx", "torchscript", "pt2"'))


def test_only_the_sensitive_layer_stays_in_float32(result: Result) -> None:
    assert _kept(result) == {models.HURT: "measured"}
    (weight,) = _float_products(result.files["onnx"])
    assert weight.startswith(models.HURT)


def test_manifest_records_the_effect_of_each_lowered_layer(result: Result) -> None:
    alone = {layer.layer: layer.alone[0].value for layer in _record(result).layers}
    assert set(alone) == {models.HURT, *models.OTHERS}
    assert alone[models.HURT] < 0.999
    assert min(alone[name] for name in models.OTHERS) > 0.999
    assert _record(result).lowered[0].value < 0.999 <= _record(result).chosen[0].value


def test_file_is_gated_on_all_batches_and_in_both_sessions(result: Result) -> None:
    lowered = [target for target in result.parity if target.precision == "int8"]
    assert [target.target for target in lowered] == ["onnx", "onnx-optimized"]
    for target in lowered:
        (output,) = target.outputs
        assert len(output.cases) == len(result.manifest.parity.cases)
        assert target.gate_results[0].value >= 0.999
        assert output.max_abs > 100 * output.floor


def test_other_targets_are_verified_to_rounding(result: Result) -> None:
    targets = {target.target: target for target in result.parity if target.precision is None}
    assert set(targets) >= {"graph", "torchscript", "pt2", "onnx-float32", "onnx-float32-optimized"}
    for target in targets.values():
        assert all(output.max_abs <= output.limit < 1e-3 for output in target.outputs)


@pytest.mark.slow
def test_float32_files_do_not_depend_on_lowering_another_format(result: Result, tmp_path: Path) -> None:
    plain = run(models.write(tmp_path, "", formats='"torchscript", "pt2"'))
    for name in ("torchscript", "pt2"):
        assert plain.files[name].read_bytes() == result.files[name].read_bytes()


def test_lowered_bundle_verifies_by_its_gates(result: Result) -> None:
    checker = verify.verify(result.output)
    assert {target.target for target in checker.targets if target.precision} == {"onnx", "onnx-optimized"}
    assert checker.passed


def test_file_records_its_precision(result: Result) -> None:
    props = {entry.key: entry.value for entry in onnx.load(result.files["onnx"]).metadata_props}
    assert json.loads(props["optexport.precision"]) == "int8"
    assert "optexport.weights_sha256" in props


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("method", METHODS)
def test_no_layer_is_kept_if_all_tolerate_int8(tmp_path: Path, method: str) -> None:
    result = run(models.write(tmp_path, f'onnx = "{method}"', model="harmless"))
    assert _kept(result) == {}
    assert _float_products(result.files["onnx"]) == []
    assert all(layer.alone == [] for layer in _record(result).layers)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("method", METHODS)
def test_two_runs_give_the_same_bytes(tmp_path: Path, method: str) -> None:
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        output = run(models.write(tmp_path / name, f'onnx = "{method}"')).output
        files.append({p.name: p.read_bytes() for p in output.iterdir() if p.name not in exports.UNEQUAL})
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Exports the planted model in int8 with a scale per row."""
    return run(models.write(tmp_path_factory.mktemp("rows"), 'onnx = "int8-rows"'))


@pytest.mark.slow
def test_smoothing_lowers_the_layer_with_an_outlier(rows: Result) -> None:
    assert _kept(rows) == {}
    assert _record(rows).chosen[0].value > 0.9999
    assert verify.verify(rows.output).passed


@pytest.mark.slow
def test_shared_weight_stays_shared_in_rows(tmp_path: Path) -> None:
    result = run(models.write(tmp_path, 'onnx = "int8-rows"', model="repeated"))
    assert _kept(result) == {}
    assert sorted(len(w.dims) for w in onnx.load(result.files["onnx"]).graph.initializer if w.data_type == 3)[-2:] == [
        1,
        2,
    ]


@pytest.mark.slow
def test_row_does_not_depend_on_other_rows(rows: Result) -> None:
    bundle = Bundle.load(rows.output, "onnx")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 1e3, 0, 10])[:, None]
    together = bundle(x=x)["output"]
    for index in range(5):
        np.testing.assert_array_equal(bundle(x=x[index : index + 1])["output"][0], together[index])


@pytest.mark.parametrize("precision", METHODS)
def test_no_weight_is_left_without_a_reader(precision: str, tmp_path: Path) -> None:
    """The float32 weight of each Gemm stayed in the file, and ONNX Runtime warned about it."""
    values = onnx.helper.make_tensor_value_info
    weights = {"weight": np.eye(4, dtype=np.float32), "bias": np.ones(4, dtype=np.float32)}
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], "layer", transB=1)],
        "graph",
        [values("x", onnx.TensorProto.FLOAT, ["n", 4])],
        [values("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    layers = int8.prepare(tmp_path / "model.onnx", tmp_path / "prepared.onnx", precision, 7)
    nodes = [name for names in layers.values() for name in names]
    int8.quantize(tmp_path / "prepared.onnx", tmp_path / "target.onnx", nodes, precision, 7, [{"x": torch.randn(3, 4)}])
    for name in ("prepared.onnx", "target.onnx"):
        written = onnx.load(tmp_path / name).graph
        read = {name for node in written.node for name in node.input}
        assert {initializer.name for initializer in written.initializer} <= read


def test_weights_of_branches_and_outputs_stay(tmp_path: Path) -> None:
    """The weights that only branches read were removed."""
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    weights = {"weight": np.eye(4, dtype=np.float32), "bias": np.arange(4, dtype=np.float32)}

    def branch(name: str, body: onnx.NodeProto) -> onnx.GraphProto:
        return onnx.helper.make_graph([body], name, [], [value(name, onnx.TensorProto.FLOAT, None)])

    branches = {
        "then_branch": branch("then", node("Add", ["product", "bias"], ["then"])),
        "else_branch": branch("else", node("MatMul", ["product", "weight"], ["else"])),
    }
    graph = onnx.helper.make_graph(
        [node("MatMul", ["x", "weight"], ["product"], "layer"), node("If", ["flag"], ["y"], **branches)],
        "graph",
        [value("x", onnx.TensorProto.FLOAT, ["n", 4]), value("flag", onnx.TensorProto.BOOL, [])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    batches = [
        {"x": torch.randn(3, 4), "flag": torch.tensor(True)},
        {"x": torch.zeros(0, 4), "flag": torch.tensor(True)},
    ]
    quantize_rows(tmp_path / "model.onnx", model, ["layer"], 7, batches)
    onnx.save(model, tmp_path / "rows.onnx")
    run_file = runners.open_onnx(tmp_path / "rows.onnx", ["y"], optimized=True)
    x = torch.tensor([[1.0, 2.0, -3.0, 4.0]])
    for flag in (True, False):
        expected = x + torch.arange(4.0) if flag else x
        torch.testing.assert_close(run_file({"x": x, "flag": torch.tensor(flag)})["y"], expected, atol=0.05, rtol=0)


@pytest.mark.slow
def test_convolutions_are_static_int8_except_a_sensitive_one(tmp_path: Path) -> None:
    config = models.write(tmp_path, 'onnx = "int8-static"', model="convs", gates="cosine = 0.99")
    config.write_text(config.read_text().replace('["batch", 32]', '["batch", 8, 6, 6]'))
    result = run(config)
    assert _kept(result) == {models.HURT: "measured"}
    nodes = onnx.load(result.files["onnx"]).graph.node
    lowered = [n for n in nodes if n.op_type == "Conv" and n.input[1].endswith("DequantizeLinear_Output")]
    assert (len(lowered), sum(n.op_type == "Conv" for n in nodes)) == (3, 4)


NEEDS_VNNI = pytest.mark.skipif(saturates_int8(), reason="weights of 8 bits need VNNI")


@NEEDS_VNNI
@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("method", ["int8", "int8-rows", "int8-static"])
def test_weights_of_8_bits_are_more_exact(tmp_path: Path, method: str) -> None:
    errors = {}
    for bits in (7, 8):
        precision = f'onnx = "{method}"\nweight_bits = {bits}'
        (tmp_path / str(bits)).mkdir()
        result = run(models.write(tmp_path / str(bits), precision, model="harmless"))
        (target,) = [one for one in result.parity if one.target == "onnx" and one.precision == method]
        errors[bits] = target.outputs[0].max_abs
        tensors = [onnx.numpy_helper.to_array(one) for one in onnx.load(result.files["onnx"]).graph.initializer]
        assert max(np.abs(one.astype(int)).max() for one in tensors if one.dtype == np.int8) == {7: 64, 8: 127}[bits]
    assert errors[8] < 0.8 * errors[7]


@NEEDS_VNNI
def test_weights_of_8_bits_are_refused_without_vnni(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.write(tmp_path, 'onnx = "int8"\nweight_bits = 8', model="harmless")
    result = run(config)
    assert verify.verify(result.output).passed
    monkeypatch.setattr(devices, "saturates_int8", lambda: True)
    with pytest.raises(DeviceError, match="model.onnx: weights in 8 bits need a processor with VNNI"):
        verify.verify(result.output)
    for refused in (run, lambda path: check_machine(load_config(path), path)):
        with pytest.raises(DeviceError, match="precision.weight_bits: weights in 8 bits need a processor with VNNI"):
            refused(config)


@pytest.mark.slow
def test_bundle_that_clips_values_far_from_the_data_verifies(tmp_path: Path) -> None:
    """Values 64 times as large, which no gate covers, were checked like data."""
    np.savez(tmp_path / "images.npz", x=np.random.default_rng(0).normal(size=(24, 8, 6, 6)).astype("float32"))
    config = models.write(tmp_path, 'onnx = "int8-static"', model="convs", gates="argmax_agreement = 0.5")
    text = config.read_text().replace('[inputs.tensors.x]\nshape = ["batch", 32]', '[inputs]\ndata = "images.npz"')
    config.write_text(text.replace("[inputs.dynamic]\nbatch = [1, 16]\n", ""))
    result = run(config)
    extreme = result.manifest.parity.extreme_cases
    assert extreme == ["zeros", "values 64 times as large"]
    assert set(extreme) < set(result.manifest.reference_cases)
    checker = verify.verify(result.output)
    assert all(target.passed for target in checker.targets)
    assert {case.name for case in checker.reference.cases if case.extreme} == set(extreme)


@pytest.mark.slow
def test_model_without_layers_to_lower_is_refused(tmp_path: Path) -> None:
    config = models.write(tmp_path, 'onnx = "int8"', model="convs")
    config.write_text(config.read_text().replace('["batch", 32]', '["batch", 8, 6, 6]'))
    with pytest.raises(ConfigError, match='int8 lowers linear layers only, and onnx has none\nHint: Write "int8-st'):
        run(config)


def test_summary_counts_convolutions_that_stay_in_float32(tmp_path: Path) -> None:
    config = models.write(tmp_path, 'onnx = "int8"', model="convs_with_head", gates="cosine = 0.9")
    text = config.read_text().replace("tensors.x", "tensors.input")
    config.write_text(text.replace('["batch", 32]', '["batch", 8, 6, 6]'))
    result = run(config)
    text = "int8 lowers linear layers; in float32: 4 convolutions (int8-static also lowers convolutions)"
    assert text in result.summary()
    assert text in (result.output / "report.html").read_text(encoding="utf-8")
    (artifact,) = result.manifest.artifacts
    assert artifact.precision is not None
    static = artifact.precision.model_copy(
        update={"precision": "int8-static", "float32_operators": {"ConvTranspose": 1, "LSTM": 2}}
    )
    assert static.float32_text == (
        "int8-static lowers linear layers and convolutions; in float32: 1 transposed convolution, 2 LSTM layers"
    )


@pytest.mark.slow
def test_layer_in_keep_float32_is_not_measured(tmp_path: Path) -> None:
    result = run(models.write(tmp_path, f'onnx = "int8"\nkeep_float32 = ["{models.HURT}", "layers.0"]'))
    assert _kept(result) == {models.HURT: "asked for", "layers.0": "asked for"}
    assert len(_float_products(result.files["onnx"])) == 2


def test_unknown_layer_name_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no layer "layers.7".*\n.*Did you mean "layers.\d"'):
        run(models.write(tmp_path, 'onnx = "int8"\nkeep_float32 = ["layers.7"]'))


@pytest.mark.slow
def test_keeping_every_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no layer to lower"):
        run(models.write(tmp_path, 'onnx = "int8"\nkeep_float32 = ["layers"]'))


@pytest.mark.slow
def test_gates_that_no_choice_passes_fail_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(ParityError) as raised:
        run(models.write(tmp_path, 'onnx = "int8"', gates="cosine = 0.99999999"))
    assert raised.value.exit_code == 4
    error = str(raised.value)
    assert "no choice of layers" in error
    assert "all layers lowered: output, cosine is" in error
    assert re.search(r"nearest, only layers.\d lowered: output, cosine is", error)
    assert raised.value.parity is not None
    assert not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_fixed_tolerance_applies_in_addition_to_the_gates(tmp_path: Path) -> None:
    path = models.write(tmp_path, 'onnx = "int8"', model="harmless")
    path.write_text(path.read_text() + "[parity]\natol = 1e-4\n")
    with pytest.raises(ParityError, match="no choice of layers"):
        run(path)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("method", METHODS)
def test_product_with_a_stack_of_matrices_is_not_a_layer(tmp_path: Path, method: str) -> None:
    result = run(models.write(tmp_path, f'onnx = "{method}"', model="stacked"))
    assert [layer.layer for layer in _record(result).layers] == ["layer"]
    assert _kept(result) == {}


@pytest.mark.slow
def test_layer_of_another_file_may_be_kept(tmp_path: Path) -> None:
    precision = 'onnx = "int8"\ntorchscript = "bfloat16"\nkeep_float32 = ["conv"]'
    formats = '"onnx", "torchscript"'
    result = run(models.write(tmp_path, precision, model="convolved", formats=formats, gates="cosine = 0.99"))
    (half,) = [a.precision for a in result.manifest.artifacts if a.format == "torchscript"]
    assert half is not None
    assert {layer.layer: layer.kept for layer in half.layers} == {"conv": "asked for", "layer": None}
    assert [layer.layer for layer in _record(result).layers] == ["layer"]


@pytest.mark.slow
def test_layer_of_no_file_cannot_be_kept(tmp_path: Path) -> None:
    precision = 'onnx = "int8"\ntorchscript = "bfloat16"\nkeep_float32 = ["cnv"]'
    config = models.write(
        tmp_path, precision, model="convolved", formats='"onnx", "torchscript"', gates="cosine = 0.99"
    )
    with pytest.raises(ConfigError, match='no layer "cnv"'):
        run(config)
