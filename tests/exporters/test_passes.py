"""Tests of all format passes: files open, agree at any size and are reproducible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexport.exporters import registry
from tests._helpers.graphs import Program
from tests.exporters import files
from tests.exporters.pass_files import AXES, X, assert_files_agree, batches, plain_file, prepared, save, write_both

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

EACH = [(entry.name, file_format) for entry, formats in registry.all_passes() for file_format in formats]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "model",
    [
        "masked",
        pytest.param("bert", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "mlp", "resnet")),
    ],
)
@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_every_format_pass_gives_a_file_that_agrees_at_any_size(
    name: str, file_format: str, model: str, tmp_path: Path
) -> None:
    lowered = save(prepared(model), file_format, tmp_path, (name,))
    assert_files_agree(lowered, plain_file(model, file_format), file_format, prepared(model), batches(model))


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
def test_all_passes_together_agree_in_any_order(file_format: str, tmp_path: Path) -> None:
    subject, names = prepared("bert"), registry.list_passes(file_format)
    lowered = save(subject, file_format, tmp_path / "lowered", names)
    backwards = save(subject, file_format, tmp_path / "backwards", names[::-1])
    assert_files_agree(lowered, plain_file("bert", file_format), file_format, subject, batches("bert"))
    assert lowered.read_bytes() == backwards.read_bytes()


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_file_is_reproducible_and_holds_no_paths_of_the_machine(name: str, file_format: str, tmp_path: Path) -> None:
    first, second = (save(replace(prepared("masked")), file_format, tmp_path / part, (name,)) for part in "ab")
    assert first.read_bytes() == second.read_bytes()
    assert all(text not in first.read_bytes() for text in (b"site-packages", str(tmp_path).encode()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum-residuals", "gemm", "onednn-linear"])
def test_format_pass_without_a_match_gives_the_same_file(name: str, tmp_path: Path) -> None:
    subject = files.prepare(Program(lambda m, x: x.sin() + x @ x.mT @ x), {"x": X}, {"x": AXES})
    for file_format in [file_format for changed, file_format in EACH if changed == name]:
        plain, lowered = write_both(subject, file_format, name, tmp_path)
        assert lowered.read_bytes() == plain.read_bytes()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "file_format"), EACH)
def test_format_pass_does_not_change_the_graph_or_the_program(name: str, file_format: str, tmp_path: Path) -> None:
    subject = replace(prepared("masked"))
    before = str(subject.flat.graph), str(subject.program)
    weights = {name: (value.data_ptr(), value.clone()) for name, value in subject.program.state_dict.items()}
    save(subject, file_format, tmp_path, (name,))
    assert (str(subject.flat.graph), str(subject.program)) == before
    for key, (address, value) in weights.items():
        assert subject.program.state_dict[key].data_ptr() == address
        assert torch.equal(subject.program.state_dict[key], value)


def test_passes_of_a_format_are_listed_in_application_order() -> None:
    assert registry.list_passes("onnx").index("sum-residuals") < registry.list_passes("onnx").index(
        "transformers-fusions"
    )
    assert set(registry.list_passes("pt2")) == {"shared-masks", "onednn-linear", "channels-last"}


def test_passes_for_the_cpu_are_not_used_for_cuda() -> None:
    assert registry.list_passes("pt2", "cuda") == ()
    assert registry.list_passes("torchscript", "cuda") == ("freeze",)
    assert registry.list_passes("onnx", "cuda") == ("sum-residuals", "split-linears", "attention", "gemm")
