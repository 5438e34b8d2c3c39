"""The node in a file that causes a failed check is named and reproduced."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optexport import export
from optexport._utils.progress import Progress
from optexport.diagnosis import reproduction
from optexport.errors import ParityError
from tests._helpers.graphs import Program
from tests._helpers.tampering import bake_torchscript, tamper_onnx, tamper_pt2
from tests.diagnosis.failures import NAMES, failing_file, node_of, reproduce, to_relu, weight_of


def tamper_torchscript(path: Path) -> None:
    module = torch.jit.load(path)
    with torch.no_grad():
        dict(module.named_parameters())["up.weight"][0, 0] += 0.01
    module.save(path)


@pytest.mark.sample(1, 2)
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
    assert len((folder / "reproduce.py").read_text().splitlines()) < 33


@pytest.mark.nightly
def test_reproduction_from_an_onnx_file_fails_in_a_new_process(tmp_path: Path) -> None:
    failing_file(tmp_path / "block", "onnx", weight_of("norm.bias", lambda bias: 2 * bias))
    folder = tmp_path / "block-failure"
    done = reproduce(folder)
    assert (done.returncode, done.stderr) == (1, "")
    weight_of("norm.bias", lambda bias: bias / 2)(folder / "piece.onnx")  # as if the file were fixed
    assert reproduce(folder).returncode == 0


@pytest.mark.sample(1, 1)
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
def test_passes_of_a_failing_file_are_named(tmp_path: Path) -> None:
    spoil = weight_of("out.bias", lambda bias: 0 * bias)
    without, passes = failing_file(tmp_path / "a", "onnx", spoil), ["sum-residuals", "attention"]
    assert "export.passes" not in without
    text = failing_file(tmp_path / "b", "onnx", spoil, passes=passes)
    assert "Try export.passes = { onnx = [] }, in case a format pass (sum-residuals, attention) did it." in text


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exception_of_a_file_at_one_size_is_reproduced(tmp_path: Path) -> None:
    text = failing_file(tmp_path / "block", "torchscript", bake_torchscript)
    assert "First difference: the file raises RuntimeError: The size of tensor a" in text
    assert reproduce(tmp_path / "block-failure").returncode == 1


def test_rounding_that_decides_a_step_is_named_with_the_tolerance_to_set(tmp_path: Path) -> None:
    """15 * 0.1 is next to 1.5, so the lowest bit of the weight decides between 1 and 2."""
    below = float(np.nextafter(np.float32(0.1), np.float32(0)))
    model = Program(lambda m, x: (x * m.scale).round() * 0.25, scale=nn.Parameter(torch.tensor([below, 1.0])))

    def announce(stage: str, seconds: float | None) -> None:
        if stage == "check onnx" and seconds is None:
            for draft in tmp_path.glob(".out.partial-*"):
                weight_of("scale", lambda scale: np.array([0.1, 1.0], scale.dtype))(draft / "model.onnx")

    options: Any = {"formats": ["onnx"], "effort": "quick", "progress": Progress(announce)}
    with pytest.raises(ParityError) as caught:
        export(model.eval(), {"x": torch.tensor([[15.0, 2.3], [3.0, 4.2]])}, tmp_path / "out", **options)
    assert "round_1 at graphs.py" in str(caught.value)
    assert "the original changes by 2.5e-01 if its weights move" in str(caught.value)
    assert "parity.atol" in str(caught.value.hint)
    export(model, {"x": torch.tensor([[15.0, 2.3], [3.0, 4.2]])}, tmp_path / "out", atol=0.3, **options)
