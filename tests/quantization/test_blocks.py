"""ONNX files with weights in blocks of 8 or 4 bits, for decoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from optexport.bundle.manifest import PrecisionRecord
from optexport.errors import ParityError
from optexport.parity import verify
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests.quantization import models

BITS = {"int8-blocks": 8, "int4-blocks": 4}
# Two decoder layers with seven matrices each, some of them merged, and the output layer: the weights of all products.
_PRODUCT_WEIGHTS = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) + 64 * 512
_INPUTS = '[inputs.tensors.input_ids]\nshape = ["batch", "sequence"]\ndtype = "int64"\nhigh = 512\n'
_DYNAMIC = "[inputs.dynamic]\nbatch = [1, 4]\nsequence = [2, 32]\n"


def _write(folder: Path, precision: str, *, tied: bool = False, gate: float = 0.9) -> Path:
    """Writes the config of a decoder; without a precision, in float32."""
    config = models.write(
        folder,
        f'onnx = "{precision}"' if precision else "",
        model="decoder",
        gates=f"cosine = {gate}" if precision else "",
    )
    text = config.read_text().partition("[inputs.tensors.x]")
    rest = text[2].partition("[export]")
    arguments = "arguments = { tied = true }\n" if tied else ""
    config.write_text(f"{text[0]}{arguments}{_INPUTS}{_DYNAMIC}[export]{rest[2]}")
    return config


def _record(result: Result) -> PrecisionRecord:
    (artifact,) = result.manifest.artifacts
    assert artifact.precision is not None
    return artifact.precision


def _bits(path: Path) -> list[Mapping[str, int]]:
    """Returns the attributes of the products with weights in blocks."""
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"]
    return [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]


def _size(path: Path) -> int:
    """Returns the bytes of the weights of a file."""
    return sum(onnx.numpy_helper.to_array(weight).nbytes for weight in onnx.load(path).graph.initializer)


def _embedding(path: Path) -> np.ndarray[Any, Any]:
    """Returns the weight that the file looks tokens up in."""
    graph = onnx.load(path).graph
    sources = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    (weight,) = [w for w in graph.initializer if w.name in sources and list(w.dims) == [512, 64]]
    return onnx.numpy_helper.to_array(weight)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(_write(tmp_path_factory.mktemp("int4"), "int4-blocks"))


@pytest.mark.slow
def test_all_weights_of_products_have_four_bits(result: Result) -> None:
    nodes = _bits(result.files["onnx"])
    assert sum(node["K"] * node["N"] for node in nodes) == _PRODUCT_WEIGHTS
    assert {(node["bits"], node["block_size"], node["accuracy_level"]) for node in nodes} == {(4, 32, 4)}
    initializers = {weight.name for weight in onnx.load(result.files["onnx"]).graph.initializer}
    products = [node for node in onnx.load(result.files["onnx"]).graph.node if node.op_type in ("MatMul", "Gemm")]
    assert not [node for node in products if node.input[1] in initializers]


@pytest.mark.slow
def test_manifest_records_the_precision_and_its_gate(result: Result) -> None:
    record = _record(result)
    assert record.precision == "int4-blocks"
    assert len(record.layers) == len(_bits(result.files["onnx"]))
    assert not [layer for layer in record.layers if layer.kept is not None]
    (chosen,) = record.chosen
    assert (chosen.measure, chosen.min) == ("cosine", 0.9)
    assert chosen.value is not None
    assert 0.9 <= chosen.value < 0.9999


@pytest.mark.slow
def test_bundle_verifies_by_its_gates(result: Result) -> None:
    checker = verify.verify(result.output)
    assert [target.target for target in checker.targets if target.precision] == ["onnx", "onnx-optimized"]
    assert checker.passed


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_products_are_smaller_and_the_embedding_is_unchanged(
    tmp_path: Path, precision: str, tied: bool
) -> None:
    files = {}
    for name in ("", precision):
        folder = tmp_path / f"of-{name}"
        folder.mkdir()
        files[name] = run(_write(folder, name, tied=tied)).files["onnx"]
    nodes = _bits(files[precision])
    assert {node["bits"] for node in nodes} == {BITS[precision]}
    # A block of 128 weights also has a scale in float32; one of 32 weights in 4 bits has a zero point, too. Rows of 64
    # weights are padded to a block.
    per_weight = 2 * (1 + 4 / 128) if precision == "int8-blocks" else 0.5 + 4 / 32 + 0.5 / 32
    assert _size(files[precision]) < 1.05 * (_PRODUCT_WEIGHTS * per_weight + 4 * 64 * 512) + 4096
    assert _size(files[""]) > 4 * _PRODUCT_WEIGHTS
    assert files[precision].stat().st_size < files[""].stat().st_size / 1.5
    np.testing.assert_array_equal(*map(_embedding, files.values()))


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(("precision", "gate"), [("int8-blocks", 0.999), ("int4-blocks", 0.995)])
def test_only_the_sensitive_layer_returns_to_float32(tmp_path: Path, precision: str, gate: float) -> None:
    result = run(models.write(tmp_path, f'onnx = "{precision}"', gates=f"cosine = {gate}"))
    kept = {layer.layer: layer.kept for layer in _record(result).layers if layer.kept is not None}
    assert kept == {models.HURT: "measured"}
    assert len(_bits(result.files["onnx"])) == len(models.OTHERS)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("precision", BITS)
def test_gate_that_no_choice_passes_fails(tmp_path: Path, precision: str) -> None:
    with pytest.raises(ParityError, match=f"no choice of layers in {precision} passes") as raised:
        run(models.write(tmp_path, f'onnx = "{precision}"', gates="cosine = 0.99999999"))
    assert raised.value.exit_code == 4
