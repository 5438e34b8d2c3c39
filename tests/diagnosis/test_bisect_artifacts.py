"""The node in a file that causes a failed check is named and reproduced."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optexport.diagnosis import reproduction
from tests._helpers.tampering import bake_torchscript, tamper_onnx, tamper_pt2
from tests.diagnosis.failures import NAMES, failing_file, node_of, reproduce, to_relu, weight_of


def tamper_torchscript(path: Path) -> None:
    module = torch.jit.load(path)
    with torch.no_grad():
        dict(module.named_parameters())["up.weight"][0, 0] += 0.01
    module.save(path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spoil", "target", "inside"),
    [
        (tamper_onnx, "query_key_value_merged", "by MatMul, Add with"),
        (weight_of("out.bias", lambda bias: 0 * bias), "linear_3 (module out)", "out.bias"),
        (weight_of("norm.bias", lambda bias: 2 * bias), "layer_norm (module norm)", "norm.bias"),
        (
            node_of("node_gelu", to_relu),
            "gelu (aten.gelu.default in module act)",
            "gelu, computed from linear_2 by Relu",
        ),
        (node_of("node_softmax", lambda node: setattr(node.attribute[0], "i", -2)), "softmax", "Softmax"),
    ],
)
def test_node_in_an_onnx_file_is_named_in_both_graphs(
    tmp_path: Path, spoil: Callable[[Path], None], target: str, inside: str
) -> None:
    text = failing_file(tmp_path / "block", "onnx", spoil)
    assert "The graph passes, so the exporter or ONNX Runtime changed the numbers." in text
    assert f"First difference: {target}" in text
    assert inside in text.partition("In model.onnx: ")[2]
    folder = tmp_path / "block-failure"
    assert {path.name for path in folder.iterdir()} == NAMES | {"piece.onnx", "piece.safetensors"}
    assert len((folder / "reproduce.py").read_text().splitlines()) < 30


@pytest.mark.slow
def test_reproduction_from_an_onnx_file_fails_in_a_new_process(tmp_path: Path) -> None:
    failing_file(tmp_path / "block", "onnx", weight_of("norm.bias", lambda bias: 2 * bias))
    folder = tmp_path / "block-failure"
    done = reproduce(folder)
    assert (done.returncode, done.stderr) == (1, "")
    weight_of("norm.bias", lambda bias: bias / 2)(folder / "piece.onnx")  # as if the file were fixed
    assert reproduce(folder).returncode == 0


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("file_format", "spoil", "target"),
    [("torchscript", tamper_torchscript, "linear_4 (module up)"), ("pt2", tamper_pt2, "query_key_value_merged")],
)
def test_node_in_other_formats_is_named(
    tmp_path: Path, file_format: str, spoil: Callable[[Path], None], target: str
) -> None:
    text = failing_file(tmp_path / "block", file_format, spoil)
    assert f"First difference: {target}" in text
    assert re.search(r"In model\.(pt2|torchscript\.pt): linear", text)
    assert reproduction._fails(tmp_path / "block-failure" / "reproduce.py", raises=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exception_of_a_file_at_one_size_is_reproduced(tmp_path: Path) -> None:
    text = failing_file(tmp_path / "block", "torchscript", bake_torchscript)
    assert "First difference: the file raises RuntimeError: The size of tensor a" in text
    assert reproduce(tmp_path / "block-failure").returncode == 1
