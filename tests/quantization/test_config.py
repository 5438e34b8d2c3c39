"""Checks of ``[precision]`` in a config, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from optexport.config.load import load_config
from optexport.errors import ConfigError
from tests.quantization import models


@pytest.mark.parametrize(
    ("precision", "formats", "gates", "message"),
    [
        ('onnx = "int8"', '"onnx"', "", r"precision.onnx: .*it needs a gate on its decisions\n.*parity.metrics"),
        ('torchscript = "bfloat16"', '"torchscript"', "", "precision.torchscript: .*it needs a gate on its decisions"),
        ('onnx = "int8"', '"pt2"', "cosine = 0.9", "precision.onnx: the format onnx is not exported"),
        ('onnx = "bfloat16"', '"onnx"', "cosine = 0.9", "precision.onnx"),
        ('pt2 = "int8"', '"pt2"', "cosine = 0.9", "precision.pt2"),
        (
            'keep_float32 = ["layers.0"]',
            '"onnx"',
            "cosine = 0.9",
            "precision: no format gets a precision here",
        ),
        (
            'onnx = "int8"',
            '"onnx"',
            "cosine = -1",
            r"parity.metrics: .*accepts any result \(cosine = -1\)\n.*a larger number",
        ),
        ('onnx = "int8"', '"onnx"', "iou = 0\nargmax_agreement = 0", "parity.metrics: .*accepts any result"),
        (
            'onnx = "int8-blocks"\nweight_bits = 8',
            '"onnx"',
            "cosine = 0.9",
            "precision.weight_bits: no format has a precision with weights of 7 or 8 bits",
        ),
        ('onnx = "int8"\nweight_bits = 6', '"onnx"', "cosine = 0.9", "precision.weight_bits"),
        ('onnx = "int8"\nkep_float32 = ["layers.0"]', '"onnx"', "cosine = 0.9", 'Did you mean "keep_float32"'),
    ],
)
def test_invalid_precision_is_refused(tmp_path: Path, precision: str, formats: str, gates: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(models.write(tmp_path, precision, formats=formats, gates=gates))
    assert raised.value.exit_code == 2


def test_model_loaded_in_half_precision_cannot_be_lowered(tmp_path: Path) -> None:
    path = models.write(tmp_path, 'onnx = "int8"')
    path.write_text(path.read_text().replace("[inputs.tensors.x]", 'dtype = "float16"\n[inputs.tensors.x]', 1))
    with pytest.raises(
        ConfigError, match="only a model in float32 can be converted to a lower precision, and model.dtype is float16"
    ):
        load_config(path)


def test_config_without_gates_exits_with_2_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from optexport.cli.main import main; sys.argv = ['optexport', 'check', sys.argv[1]]\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules"
    )
    path = models.write(tmp_path, 'onnx = "int8"', gates="")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "it needs a gate on its decisions" in done.stderr
