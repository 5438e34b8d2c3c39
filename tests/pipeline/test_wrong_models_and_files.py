"""A failed export and a wrong or damaged file are caught, and no rule is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optexport.errors import ExportError, OptexportError, ParityError, SourceError
from optexport.pipeline import run
from tests._helpers.tampering import bake_torchscript, tamper_onnx, tamper_pt2
from tests.pipeline.projects import at, config, nothing_is_left


@pytest.mark.slow
def test_model_with_a_hard_coded_size_is_caught_without_a_rule(project: Path) -> None:
    with pytest.raises(OptexportError) as caught:
        run.run(config(project, factory="baking"))
    assert caught.value.exit_code in (3, 4)
    assert "merge-linears" not in str(caught.value)
    assert nothing_is_left(project)


@pytest.mark.slow
def test_model_unsupported_by_onnx_exits_with_5(project: Path) -> None:
    with pytest.raises(ExportError, match="_linalg_eigh") as caught:
        run.run(config(project, factory="eigen", formats=("onnx",)))
    assert caught.value.exit_code == 5
    assert nothing_is_left(project)


@pytest.mark.slow
def test_source_that_fails_exits_with_3(project: Path) -> None:
    (project / "pipeline_models.py").write_text("def block():\n    raise OSError('disk gone')")
    with pytest.raises(SourceError, match="disk gone") as caught:
        run.run(config(project))
    assert caught.value.exit_code == 3
    assert nothing_is_left(project)


def drafts(project: Path) -> list[Path]:
    return list((project / "out").glob(".block.partial-*"))


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("stage", "name", "tamper", "failing"),
    [
        ("check onnx", "model.onnx", tamper_onnx, ["onnx", "onnx-optimized"]),
        ("check torchscript", "model.torchscript.pt", bake_torchscript, ["torchscript"]),
        ("check pt2", "model.pt2", tamper_pt2, ["pt2"]),
    ],
)
def test_wrong_file_is_caught_and_blamed_on_the_exporter(
    project: Path, stage: str, name: str, tamper: Callable[[Path], None], failing: list[str]
) -> None:
    progress = at(stage, lambda: [tamper(draft / name) for draft in drafts(project)])
    with pytest.raises(ParityError) as caught:
        run.run(config(project, formats=("torchscript", "onnx", "pt2")), progress=progress)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert {line.partition(":")[0] for line in message.splitlines() if ": hidden" in line} == set(failing)
    assert "The graph passes, so the exporter or " in message
    assert nothing_is_left(project)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("damage", [lambda content: content[:-100], None])
@pytest.mark.parametrize(
    ("file_format", "name"),
    [("onnx", "model.onnx"), ("torchscript", "model.torchscript.pt"), ("pt2", "model.pt2")],
)
def test_damaged_file_is_an_export_error_with_its_final_name(
    project: Path, file_format: str, name: str, damage: Callable[[bytes], bytes] | None
) -> None:
    def act() -> None:
        (file,) = (draft / name for draft in drafts(project))
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(ExportError) as caught:
        run.run(config(project, formats=(file_format,)), progress=at(f"check {file_format}", act))
    assert caught.value.exit_code == 5
    assert caught.value.location == name
    assert "partial" not in str(caught.value)
    assert f'leave "{file_format}" out of export.formats' in str(caught.value).replace("Leave", "leave")
    assert nothing_is_left(project)
