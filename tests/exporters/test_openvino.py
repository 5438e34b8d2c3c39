"""Tests of the OpenVINO format: right at any size, reproducible, and safe to open."""

from __future__ import annotations

import errno
import functools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optexport import Bundle, Generator, ParityError, export, export_generation, verify
from optexport.diagnosis.bundle import diagnose_bundle
from optexport.errors import BundleError, ConfigError, DeviceError, ExportError
from optexport.exporters.flat_graph import FlatGraph
from optexport.exporters.openvino import OpenVinoFormat, import_runtime
from optexport.report.result import Result
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from tests._helpers import exports, models
from tests._helpers.cli import CliRunner, cli
from tests.exporters import files
from tests.parity.test_verify import verify_apart

_PLACE = tempfile.TemporaryDirectory(prefix="optexport-openvino-")
AXES = {0: Dim("batch", 1, 16), 1: Dim("sequence", 1, 64)}


class Tagger(nn.Module):
    """Takes whole numbers and booleans, and returns all three kinds of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear, self.norm = nn.Embedding(50, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.linear(self.embedding(ids))).relu() * mask[..., None]
        return {"hidden": hidden, "best": hidden.argmax(-1), "known": mask & (ids > 3)}


class Loop(nn.Module):
    """Its file has a loop and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x * 2, (x,))
        return self.lstm(branch)[0]


def inputs(rows: int = 2, length: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 50, (rows, length), generator=generator)
    return {"ids": ids, "mask": ids % 3 > 0}


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().eval()


@functools.cache
def exported() -> Result:
    return export(
        model(),
        inputs(),
        Path(_PLACE.name) / "bundle",
        formats="openvino",
        dynamic={"ids": AXES, "mask": AXES},
        effort="quick",
    )


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported().output, tmp_path / "bundle"))


def test_bundle_lists_both_files_and_the_version() -> None:
    manifest = exported().manifest
    (artifact,) = manifest.artifacts
    sizes = {file.path: file.size for file in manifest.files}
    assert artifact.paths == ("model.xml", "model.bin")
    assert manifest.size_of(artifact) == sizes["model.xml"] + sizes["model.bin"]
    assert manifest.versions["openvino"]
    assert [target.target for target in manifest.parity.targets] == ["original", "graph", "openvino"]


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 17), (16, 64)])
def test_file_is_right_at_sizes_that_were_never_traced(rows: int, length: int) -> None:
    batch = inputs(rows, length)
    results = Bundle.load(exported().output, "openvino")(**batch)
    with torch.no_grad():
        expected = {name: tensor.numpy() for name, tensor in model()(**batch).items()}
    for name, array in expected.items():
        assert results[name].dtype == array.dtype
        np.testing.assert_allclose(results[name], array, rtol=1e-5, atol=1e-6)


def test_bundle_verifies_without_transformers_and_onnx() -> None:
    done = verify_apart(exported().output)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert {row["target"] for row in report["targets"]} == {"openvino"}


def test_file_runs_without_torch_and_telemetry() -> None:
    script = f"""
import sys
import numpy as np
from optexport import Bundle
bundle = Bundle.load({str(exported().output)!r})
print(bundle.format, bundle(ids=np.array([[2, 5, 3]]), mask=np.array([[True, True, False]]))["hidden"].shape)
print([name for name in ("torch", "transformers", "onnx", "onnxruntime", "openvino_telemetry") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "openvino (1, 3, 8)\n[]\n"


def _graph(module: nn.Module, example: dict[str, torch.Tensor]) -> FlatGraph:
    traced = trace(module, example, dict.fromkeys(example, AXES))
    return FlatGraph(traced.graph_module, traced.signature, example, "0" * 64, ())


@pytest.mark.parametrize("kind", ["tagger", pytest.param("loop", marks=pytest.mark.slow)])
def test_second_file_has_the_same_bytes(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, example = (model(), inputs()) if kind == "tagger" else (Loop().eval(), {"x": torch.randn(2, 5, 4)})
    graph, contents = _graph(module, example), []
    for part in "ab":
        (tmp_path / part).mkdir()
        OpenVinoFormat().write(graph, tmp_path / part / "model.xml", ())
        contents.append([(tmp_path / part / name).read_bytes() for name in ("model.xml", "model.bin")])
    assert contents[0] == contents[1]
    assert str(tmp_path).encode() not in contents[0][0]
    if kind == "loop":
        assert b'type="If"' in contents[0][0] or b'type="Loop"' in contents[0][0]


def test_numbers_are_in_float32_on_every_processor() -> None:
    compiled = OpenVinoFormat()._compile(exported().output / "model.xml", {})
    assert compiled.get_property("INFERENCE_PRECISION_HINT") == import_runtime().Type.f32


def test_numbers_beyond_int32_are_refused() -> None:
    batch = {name: tensor.numpy() for name, tensor in inputs().items()}
    with pytest.raises(ConfigError, match="OpenVINO computes int64 in int32, and ids contains larger numbers"):
        Bundle.load(exported().output)(**{**batch, "ids": batch["ids"] + 2**40})


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    graph = _graph(nn.Identity(), {"input": torch.ones(2, 3, dtype=torch.bfloat16)})
    with pytest.raises(ExportError, match="support no bfloat16"):
        OpenVinoFormat().write(graph, tmp_path / "model.xml", ())


class Determinant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x @ x.mT + 1)


def test_operator_that_openvino_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="OpenVINO cannot convert the graph: No conversion rule found for .*: Det-"):
        OpenVinoFormat().write(_graph(Determinant(), {"x": torch.randn(3, 4, 4)}), tmp_path / "model.xml", ())


@pytest.mark.slow
def test_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    graph = _graph(nn.Linear(700, 700), {"input": torch.randn(3, 4, 700)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, before[1]))  # the ONNX file fits, but not with the reserve
    try:
        with pytest.raises(OSError, match=r"model\.xml") as caught:
            OpenVinoFormat().write(graph, tmp_path / "model.xml", ())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG


def test_other_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[model]\nsource = "python:m:f"\ndevice = "cuda"\n[export]\nformats = ["openvino"]\n[tracking]\nenabled = false'
    )
    (tmp_path / "m.py").write_text("def f(): ...")
    result = CliRunner().invoke(cli, ["check", str(tmp_path / "config.toml")])
    assert result.exit_code == 2
    assert 'openvino is only supported on the CPU, and model.device is "cuda"' in result.output
    with pytest.raises(DeviceError, match="openvino does not support the device cuda"):
        OpenVinoFormat().open(exported().output / "model.xml", [], "cuda")


def test_missing_package_is_named_with_the_command_that_installs_it() -> None:
    class Missing(OpenVinoFormat):
        packages = ("optexport-not-installed",)

    with pytest.raises(ConfigError) as caught:
        Missing().check_installed("export.formats")
    assert "the format openvino needs optexport-not-installed, which is not installed" in str(caught.value)
    assert "pip install" in str(caught.value.hint)
    assert "[openvino]" in str(caught.value.hint)


def test_changed_weight_fails(copied: Path) -> None:
    content = bytearray((copied / "model.bin").read_bytes())
    content[40:1000] = bytes(reversed(content[40:1000]))
    (copied / "model.bin").write_bytes(content)
    with pytest.raises(BundleError, match=r"model\.bin: the file was changed"):
        verify(copied)
    exports.reseal(copied, "model.bin")
    assert not verify(copied).passed


@pytest.mark.parametrize("content", [b"not a model", b"\x08\x08\x12\x07pytorch"])
def test_file_of_another_kind_is_not_opened(copied: Path, content: bytes) -> None:
    (copied / "model.xml").write_bytes(content)
    exports.reseal(copied, "model.xml")
    with pytest.raises(BundleError, match=r"model\.xml: the file is not an IR file of OpenVINO"):
        verify(copied)


def test_unknown_operator_is_refused(copied: Path) -> None:
    text = (copied / "model.xml").read_text()
    changed = text.replace('type="MatMul" version="opset1"', 'type="Shell" version="extension"')
    assert changed != text
    (copied / "model.xml").write_text(changed)
    exports.reseal(copied, "model.xml")
    with pytest.raises(BundleError, match="OpenVINO rejects the file"):
        verify(copied)


def test_weights_that_are_missing_or_short_are_refused(copied: Path) -> None:
    (copied / "model.bin").write_bytes(b"short")
    exports.reseal(copied, "model.bin")
    with pytest.raises(BundleError, match="OpenVINO rejects the file"):
        verify(copied)
    (copied / "model.bin").unlink()
    with pytest.raises(BundleError, match=r"model\.bin: the file is missing"):
        verify(copied)


def test_predict_and_bench_run_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"ids": [4, 5, 6], "mask": [true, true, true]}\n')
    bundle = str(exported().output)
    command = ["predict", bundle, "--format", "openvino", "--data", str(tmp_path / "rows.jsonl"), "--json"]
    predicted = CliRunner().invoke(cli, command)
    assert predicted.exit_code == 0, predicted.output
    assert json.loads(predicted.stdout)["format"] == "openvino"
    measured = CliRunner().invoke(cli, ["bench", bundle, "--rounds", "1", "--seconds", "0.01", "--json"])
    assert measured.exit_code == 0, measured.output
    (artifact,) = json.loads(measured.stdout)["artifacts"]
    assert artifact["format"] == "openvino"


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", files.NAMES)
def test_files_of_transformers_models_are_right_at_any_size(name: str, tmp_path: Path) -> None:
    subject = files.prepared(name)
    graph = FlatGraph(subject.flat, subject.signature, subject.example, "", ())
    OpenVinoFormat().write(graph, tmp_path / "model.xml", ())
    run = OpenVinoFormat().open(tmp_path / "model.xml", subject.signature.output_names, "cpu")
    files.assert_agrees(name, run, 5e-6)


@pytest.mark.slow
def test_generated_tokens_are_those_of_the_model(tmp_path: Path) -> None:
    ids = torch.randint(5, 50, (2, 6), generator=torch.Generator().manual_seed(0))
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = models.model("llama")
    export_generation(model, prompt, tmp_path / "llama", formats=["openvino"], effort="quick", new_tokens=8)
    generated = Generator.load(tmp_path / "llama", "openvino").generate(**prompt, max_new_tokens=8)
    expected = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert generated.tolist() == expected.tolist()


@pytest.mark.slow
def test_diagnosis_writes_a_script_that_reproduces_the_failure(copied: Path) -> None:
    weight = model().embedding.weight.detach().numpy()
    content = (copied / "model.bin").read_bytes()
    assert content.count(weight.tobytes()) == 1
    (copied / "model.bin").write_bytes(content.replace(weight.tobytes(), (weight[::-1]).tobytes()))
    exports.reseal(copied, "model.bin")
    with pytest.raises(ParityError, match=r"model\.xml fails\. The diverging node is found in ONNX"):
        diagnose_bundle(copied)
    script = copied.with_name("bundle-failure") / "reproduce.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1, done.stderr
    assert "hidden is off by" in done.stdout


@pytest.mark.nightly
def test_tuned_and_measured_export(tmp_path: Path) -> None:
    result = export(
        model(),
        inputs(),
        tmp_path / "bundle",
        formats=["onnx", "openvino"],
        dynamic={"ids": AXES, "mask": AXES},
        effort="quick",
        tune="30s",
        bench={"rounds": 2},
    )
    assert {outcome.format for outcome in result.tuned} == {"onnx", "openvino"}
    assert {figure.artifact.format for figure in result.bench.figures} >= {"onnx", "openvino"}
