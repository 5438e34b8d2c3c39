"""Runs on a CUDA device: verified there in full float32, measured there, and opened there again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import onnxruntime
import pytest
import torch

from optexport import Bundle, verify
from optexport._utils.progress import Progress
from optexport.exporters import targets
from optexport.parity.reference_run import run_original
from optexport.pipeline import reproduce
from optexport.pipeline.run import run
from optexport.report.result import Result
from optexport.runtime import devices, onnx_session, placement
from optexport.runtime.untrusted import archives
from tests._helpers import exports
from tests.parity.network import call, network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

MODULE = """
import torch
from torch import nn
from tests._helpers.exports import Block
from tests._helpers.models import randomise

class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.block = Block()

    def forward(self, x, mask):
        places = torch.arange(x.shape[1], device=x.device) / 100
        return self.block(self.convolution(x.transpose(1, 2)).transpose(1, 2) + places[None, :, None], mask)

def load():
    torch.manual_seed(0)
    return randomise(Convolved())
"""
HAS_ONNX = devices.CUDA_PROVIDER in onnxruntime.get_available_providers()
FORMATS = ("onnx", "torchscript", "pt2") if HAS_ONNX else ("torchscript", "pt2")
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnxruntime-gpu is not installed")
CONFIG = f"""
[model]
source = "python:on_a_card:load"
device = "cuda"
{exports.INPUTS}
[export]
formats = {json.dumps(FORMATS)}
[bench]
enabled = true
rounds = 2
[tracking]
enabled = false
"""


@pytest.fixture(scope="module")
def cuda_result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("card")
    (folder / "on_a_card.py").write_text(MODULE, encoding="utf-8")
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    sys.modules.pop("on_a_card", None)
    return run(folder / "config.toml")


def test_every_file_passes_on_the_device_and_records_it(cuda_result: Result) -> None:
    targets_of_onnx = {"onnx", "onnx-optimized"} if HAS_ONNX else set()
    assert {target.target for target in cuda_result.parity} >= {"torchscript", "pt2", *targets_of_onnx}
    assert set(cuda_result.files) == set(FORMATS)
    assert {artifact.device for artifact in cuda_result.manifest.artifacts} == {"cuda"}
    assert "on cuda" in cuda_result.manifest.parity.ways
    measured = json.loads((cuda_result.output / "measurements.json").read_bytes())
    assert measured["device"] == f"cuda ({torch.cuda.get_device_name()})"
    assert {(a["format"], a["device"]) for a in measured["bench"]["artifacts"]} == {
        (f, "cuda") for f in cuda_result.files
    }


def test_weights_in_the_files_of_torch_are_on_the_device(cuda_result: Result) -> None:
    script = archives.load_torchscript(cuda_result.files["torchscript"])
    program = archives.load_pt2(cuda_result.files["pt2"])
    assert {tensor.device.type for tensor in (*script.state_dict().values(), *program.state_dict.values())} == {"cuda"}


@needs_onnx
def test_session_prefers_the_cuda_provider(cuda_result: Result) -> None:
    session = onnx_session.open_session(cuda_result.files["onnx"], onnxruntime.SessionOptions(), "cuda")
    assert session.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert session.get_provider_options()["CUDAExecutionProvider"]["use_tf32"] == "0"


@pytest.mark.parametrize("file_format", FORMATS)
def test_bundle_gives_the_stored_results_on_the_device(file_format: str, cuda_result: Result) -> None:
    bundle, limit = Bundle.load(cuda_result.output, file_format), cuda_result.manifest.parity.bounds["hidden"].limit
    (_, run_file), *_ = targets.open_file(
        cuda_result.files["pt2"], "pt2", [o.name for o in cuda_result.manifest.outputs], "cuda"
    )
    for size, sequence in ((2, 5), (1, 2), (16, 32)):
        batch = exports.batch(size, sequence)
        output, expected = bundle(**batch), run_file(batch)
        assert float((torch.from_numpy(output["hidden"]) - expected["hidden"]).abs().max()) <= 2 * limit


def test_bundle_verifies_and_reproduces_on_the_device(cuda_result: Result) -> None:
    assert verify(cuda_result.output).passed
    differing = reproduce.reproduce(cuda_result.output, cuda_result.output.parents[1], Progress())
    assert [line for line in differing if line.startswith("model.")] == []  # the distances may differ in a digit


def test_file_with_other_weights_fails_on_the_device(cuda_result: Result, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(cuda_result.output, bundle)
    path = bundle / "model.torchscript.pt"
    script = torch.jit.load(path)
    with torch.no_grad():
        next(script.parameters()).mul_(1.01)
    torch.jit.save(script, path)
    exports.reseal(bundle, path.name)
    assert not verify(bundle).passed


def test_tf32_is_off_despite_the_callers_setting() -> None:
    a, b = torch.randn(256, 512), torch.randn(512, 256)
    exact = a.double() @ b.double()
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        coarse = (a.cuda() @ b.cuda()).cpu()
        with devices.full_float32("cuda"):
            full = (a.cuda() @ b.cuda()).cpu()
    finally:
        settings.fp32_precision = before
    assert (full - exact).abs().max() < (coarse - exact).abs().max() / 50


def test_noise_floor_includes_rounding_on_the_device() -> None:
    model, cases = network()
    reference = run_original(call, model, cases, device="cuda")
    with torch.no_grad():
        moved = placement.move_model(model, "cuda")
        for case, exact, noise in zip(reference.cases, reference.exact, reference.noise, strict=True):
            output = moved(case.batch["x"].cuda()).cpu()
            assert noise["y"] >= float((output.double() - exact["y"]).abs().max())
