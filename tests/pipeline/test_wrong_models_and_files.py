"""A model that cannot be exported, and a file that came out wrong or damaged, is caught, and no rule is blamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from optexport.errors import ExportError, OptexportError, ParityError, SourceError
from optexport.pipeline import run
from tests._helpers.tampering import bake_torchscript, tamper_onnx, tamper_pt2
from tests.pipeline.projects import at, config, nothing_is_left


def test_a_model_that_bakes_a_size_in_is_caught_and_no_rule_is_blamed(project: Path) -> None:
    with pytest.raises(OptexportError) as caught:
        run.run(config(project, factory="baking"))
    assert caught.value.exit_code in (3, 4)
    assert "merge-linears" not in str(caught.value)
    assert nothing_is_left(project)


@pytest.mark.slow
def test_what_onnx_cannot_express_ends_with_five_and_leaves_nothing(project: Path) -> None:
    with pytest.raises(ExportError, match="_linalg_eigh") as caught:
        run.run(config(project, factory="eigen", formats=("onnx",)))
    assert caught.value.exit_code == 5
    assert nothing_is_left(project)


@pytest.mark.slow
def test_a_source_that_fails_ends_with_three(project: Path) -> None:
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
        ("check onnx", "model.onnx", tamper_onnx, ["onnx", "onnx, optimised"]),
        ("check torchscript", "model.torchscript.pt", bake_torchscript, ["torchscript"]),
        ("check pt2", "model.pt2", tamper_pt2, ["pt2"]),
    ],
)
def test_a_file_that_came_out_wrong_is_caught_and_the_exporter_is_blamed(
    project: Path, stage: str, name: str, tamper: Callable[[Path], None], failing: list[str]
) -> None:
    progress = at(stage, lambda: [tamper(draft / name) for draft in drafts(project)])
    with pytest.raises(ParityError) as caught:
        run.run(config(project, formats=("torchscript", "onnx", "pt2")), progress=progress)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert {line.strip().partition(":")[0] for line in message.splitlines() if ": hidden, " in line} == set(failing)
    assert "the exporter or the runtime changed the numbers" in message
    assert nothing_is_left(project)


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [lambda content: content[:-100], None])
@pytest.mark.parametrize(
    ("file_format", "name"),
    [("onnx", "model.onnx"), ("torchscript", "model.torchscript.pt"), ("pt2", "model.pt2")],
)
def test_a_file_that_came_out_damaged_is_an_error_of_the_export_that_names_it_without_its_draft(
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
