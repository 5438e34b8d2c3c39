"""Devices: settings of torch and ONNX Runtime, and errors without a CUDA device.

`tests.gpu.test_cuda` tests results on a CUDA device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from optexport import Bundle, ConfigError, DeviceError, export, verify
from optexport._utils import packages
from optexport.diagnosis.bisect_artifacts import diagnose_artifacts
from optexport.exporters import targets
from optexport.runtime import devices, onnx_session
from optexport.runtime.onnx_session import bind_session
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.model import read_onnx_model
from tests._helpers import exports
from tests._helpers.cli import Caller, CliRunner, cli, config, message

NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device")
NO_PROVIDER = pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this ONNX Runtime has the provider"
)
ON_CUDA = config().replace("[model]\n", '[model]\ndevice = "cuda"\n')


@pytest.fixture
def for_a_card(tmp_path: Path) -> Path:
    """Returns a bundle whose manifest says that its files are for CUDA."""
    bundle = tmp_path / "bundle"
    shutil.copytree(exports.exported().output, bundle)
    say_cuda(bundle)
    return bundle


def say_cuda(bundle: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["config"]["model"]["device"] = "cuda"
        for artifact in document["artifacts"]:
            artifact["device"] = "cuda"

    exports.edit_json(bundle / "manifest.json", change)


@NO_CARD
def test_run_without_a_cuda_device_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    call = Caller(tmp_path / "work")
    error = message(call("run", ON_CUDA.replace("enabled = false", "enabled = true")), 3)
    assert error.startswith(f"{tmp_path / 'work' / 'mine.toml'}: model.device: torch ")
    assert "finds no CUDA device" in error
    assert 'remove device = "cuda"' in error
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"halves.py", "mine.toml"}


@NO_CARD
def test_python_export_without_a_cuda_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="finds no CUDA device"):
        export(exports.Block().eval(), exports.batch(2, 5), tmp_path / "out", device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_python_export_refuses_features_of_the_cpu_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='precision is only supported on the CPU, and model.device is "cuda"'):
        export(
            exports.Block().eval(),
            exports.batch(2, 5),
            tmp_path / "out",
            device="cuda",
            precision={"torchscript": "bfloat16"},
            metrics={"cosine": 0.99},
        )


def test_check_needs_no_cuda_device(tmp_path: Path) -> None:
    assert Caller(tmp_path)("check", ON_CUDA).exit_code == 0


@pytest.mark.sample(1)
@NO_CARD
@NO_PROVIDER
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
def test_cuda_bundle_is_not_opened_without_a_device(file_format: str, for_a_card: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        Bundle.load(for_a_card, file_format)
    assert caught.value.location == {"torchscript": "model.torchscript.pt"}.get(file_format, f"model.{file_format}")
    assert caught.value.hint is not None


@NO_CARD
@NO_PROVIDER
def test_cuda_bundle_is_not_verified_without_a_device(for_a_card: Path) -> None:
    error = message(CliRunner().invoke(cli, ["verify", str(for_a_card)]), 3)
    assert error.startswith("model.torchscript.pt: torch ")


@pytest.mark.slow
@NO_CARD
def test_cuda_bundle_is_not_reproduced_without_a_device(tmp_path: Path) -> None:
    assert Caller(tmp_path)("run", config()).exit_code == 0
    bundle = tmp_path / "build" / "model"
    say_cuda(bundle)
    assert "no CUDA device" in message(CliRunner().invoke(cli, ["reproduce", str(bundle)]), 3)


@pytest.mark.sample(1)
@NO_CARD
@NO_PROVIDER
@pytest.mark.parametrize(("file_format", "cause"), [("onnx", "CUDAExecutionProvider"), ("pt2", "no CUDA device")])
def test_cuda_bundle_is_not_measured_without_a_device(file_format: str, cause: str, for_a_card: Path) -> None:
    error = message(CliRunner().invoke(cli, ["bench", str(for_a_card), "--format", file_format, "--rounds", "2"]), 5)
    assert cause in error


@pytest.mark.slow
def test_bound_inputs_give_the_same_results() -> None:
    session = onnx_session.open_session(exports.exported().files["onnx"], onnxruntime.SessionOptions(), "cpu")
    batch = {name: tensor.numpy() for name, tensor in exports.batch().items()}
    run = bind_session(session, batch, "cpu")
    for _ in range(2):
        for one, expected in zip(run(), session.run(None, batch), strict=True):
            np.testing.assert_array_equal(one.numpy(), expected)


@pytest.mark.slow
def test_file_that_fails_on_cuda_gets_only_that_explanation() -> None:
    result = exports.exported()
    checker = verify(result.output)
    (pt2,) = targets.list_openers(result.files["pt2"], "pt2", list(checker.tolerances))
    run = pt2[1]()
    checker.check("pt2", lambda batch: {name: tensor + 1 for name, tensor in run(batch).items()})
    diagnosis = diagnose_artifacts(None, result.files, checker, "cuda")
    assert diagnosis.explanation.startswith("model.pt2 fails on cuda (case: ")
    assert diagnosis.reproductions == ()


def test_float32_is_full_inside_and_restored_after() -> None:
    def precisions() -> list[str]:
        cudnn: Any = torch.backends.cudnn
        return [setting.fp32_precision for setting in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]

    before = precisions()
    assert "tf32" in before  # the default for convolutions
    with pytest.raises(LookupError), devices.full_float32("cuda"):
        assert precisions() == ["ieee"] * 3
        raise LookupError
    assert precisions() == before
    with devices.full_float32("cpu"):
        assert precisions() == before


def test_benchmarks_of_a_run_name_the_device() -> None:
    measured = json.loads((exports.exported().output / "measurements.json").read_bytes())
    assert measured["device"] == "cpu"


def test_mlflow_gets_no_model_for_cuda(for_a_card: Path) -> None:
    assert read_onnx_model(BundleRecord.read(for_a_card)) is None


def test_another_package_may_provide_onnx_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_IN_PLACE_OF", {"no-such-package": ["numpy"]})
    assert packages._find_version("no-such-package") == np.__version__


_CALLS_OF_ONEDNN = """
import sys, numpy, torch
from optexport import Bundle, DeviceError
from optexport.runtime.devices import needed_instructions

bundle = Bundle.load(sys.argv[1], "torchscript")
calls = [lambda: bundle(x=numpy.ones([2, 5, 8], numpy.float32), mask=numpy.ones([2, 5], numpy.int64))]
one = torch.ones(4, 4, dtype=torch.bfloat16)
operator = torch.ops.mkldnn._linear_pointwise
calls += [lambda: operator(one, one, None, "none", [], ""), lambda: operator.binary(one, one, one, None, "add")]
for call in calls:
    try:
        with needed_instructions("here"):
            call()
    except DeviceError:
        print("refused")
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor lacks AVX-512")
def test_bfloat16_without_its_instructions_is_a_device_error(tmp_path: Path) -> None:
    bundle = export(
        exports.Block().eval(),
        exports.batch(2, 5),
        tmp_path / "out",
        formats=["torchscript"],
        passes={"torchscript": ["onednn-linear"]},
        precision={"torchscript": "bfloat16"},
        metrics={"cosine": 0.99},
    ).output
    for instructions, exit_code, refusals in (("AVX512_CORE_BF16", 0, 0), ("AVX2", 3, 3)):
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
        command = [sys.executable, "-c", _CALLS_OF_ONEDNN, str(bundle)]
        called = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert called.stdout == "refused\n" * refusals
        command = [sys.executable, "-m", "optexport", "verify", str(bundle)]
        verified = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert verified.returncode == exit_code, verified.stderr
    assert "model.torchscript.pt: oneDNN cannot compute layers in bfloat16 on this processor" in verified.stderr
    assert "Run on a processor with AVX-512, or export without the pass onednn-linear." in verified.stderr
