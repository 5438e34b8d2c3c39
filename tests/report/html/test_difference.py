"""``optexport diff``: first whether two bundles compute the same, then all that differs, and nothing that does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from optexport import export
from optexport.cli.main import cli
from tests._helpers import exports
from tests._helpers.models import randomise
from tests.report.html import bundles
from tests.report.html.reading import Page
from tests.report.html.test_page import check_contained


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["diff", *map(str, arguments)])


def document(*arguments: object) -> dict[str, Any]:
    done = diff(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.copied(tmp_path_factory.mktemp("one") / "block")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without rules, in one format."""
    target = tmp_path_factory.mktemp("plain") / "plain"
    export(exports.block(), exports.batch(), target, dynamic=exports.DYNAMIC, transformations=[], formats=["pt2"])
    return target


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.quick(exports.Block(), exports.batch(), tmp_path_factory.mktemp("other") / "<b>other</b>").output


def test_a_bundle_and_itself_are_the_same_to_the_byte(one: Path) -> None:
    done = diff(one, one)
    assert done.exit_code == 0
    assert "They compute the same: all model files are equal to the byte." in done.stdout.splitlines()
    found = document(one, one)
    assert found["computes"] == "same"
    assert {title for title, section in found["sections"].items() if section["rows"]} == {"Latency"}


def test_another_graph_of_the_same_model_is_the_same_to_rounding(one: Path, plain: Path) -> None:
    found = document(one, plain)
    assert found["computes"] == "same to rounding"
    assert found["reasons"] == ["pt2 differs"]
    sections = {title: section["rows"] for title, section in found["sections"].items()}
    assert sections["Model"] == []
    (merged,) = [row for row in sections["Rules"] if row["rule"] == "merge-linears"]
    assert (merged["changes in A"], merged["changes in B"]) == (1, "not there")
    assert merged["only in A"] == "query_key_value_merged"
    gone = {row["place"] for row in sections["Parity"] if row["distance in B"] == "not there"}
    assert {"onnx", "torchscript"} <= gone
    sizes = {row["file"]: row for row in sections["Sizes"]}
    assert sizes["model.onnx"]["bytes in A"] == (one / "model.onnx").stat().st_size
    assert sizes["model.onnx"]["bytes in B"] == "not there"
    formats = {row[""]: (row["A"], row["B"]) for row in sections["Config"]}["export.formats"]
    assert formats == ("torchscript, onnx, pt2", "pt2")


def test_another_model_computes_something_else(one: Path, other_model: Path) -> None:
    found = document(one, other_model)
    assert found["computes"] == "different"
    assert found["reasons"] == ["the weights"]
    assert found["told"] == "They do not compute the same: the weights differ."


class Scaled(nn.Module):
    """A number in its code tells two of them apart, and no weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3, bias=False), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.factor
        return y


def scaled(target: Path, factor: float, size: int = 2) -> Path:
    """The bundle of a model with the same weights as all others of it."""
    x = torch.linspace(-1, 1, 4 * size).reshape(size, 4)
    return exports.quick(randomise(Scaled(factor)), {"x": x}, target).output


@pytest.mark.parametrize(
    ("factor", "computes"), [(2.0, "same"), (2.0 + 2**-22, "same to rounding"), (2.1, "different")]
)
def test_models_of_equal_weights_are_told_apart_by_what_they_gave(tmp_path: Path, factor: float, computes: str) -> None:
    found = document(scaled(tmp_path / "a", 2.0), scaled(tmp_path / "b", factor))
    assert found["computes"] == computes
    if computes == "different":
        assert found["reasons"] == ["the originals' results"]
        assert "the originals' output are 0." in found["told"]


def test_of_other_graphs_without_an_input_in_common_nothing_is_known(tmp_path: Path) -> None:
    found = document(scaled(tmp_path / "a", 2.0), scaled(tmp_path / "b", 200.0, size=3))
    assert found["computes"] == "not known"
    assert "their traced graphs differ, and they share no inputs" in found["told"]


def test_other_layers_in_lower_precision_compute_something_else(one: Path, tmp_path: Path) -> None:
    def lower(kept: str | None) -> Any:
        def change(manifest: dict[str, Any]) -> None:
            layers = [{"layer": "up", "kept": kept, "alone": []}, {"layer": "down", "kept": None, "alone": []}]
            manifest["artifacts"][0]["precision"] = {
                "precision": "bfloat16", "layers": layers, "lowered": [], "chosen": []
            }  # fmt: skip

        return change

    targets = [Path(shutil.copytree(one, tmp_path / name)) for name in ("a", "b")]
    for target, kept in zip(targets, (None, "measured"), strict=True):
        bundles.edit(target, lower(kept))
    assert document(*targets)["reasons"] == ["the precision of a file"]
    assert document(targets[0], targets[0])["computes"] == "same"


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (1.0, "overlap: cannot tell"),
        (1.15, "overlap: cannot tell"),
        (2.0, "apart: A is faster"),
        (0.5, "apart: B is faster"),
    ],
)
def test_times_are_told_by_whether_their_intervals_overlap(one: Path, tmp_path: Path, factor: float, told: str) -> None:
    other = Path(shutil.copytree(one, tmp_path / "other"))

    def slow(measurements: dict[str, Any]) -> None:
        for row in measurements["bench"]["figures"]:
            row |= {key: factor * row[key] for key in ("p50_ms", "low_ms", "high_ms")}

    exports.edit_json(other / "measurements.json", slow)
    (row,) = document(one, other)["sections"]["Latency"]["rows"]
    assert (row["file"], row["ms in A"], row["intervals"]) == ("onnx", 10.0, told)


def test_times_without_intervals_tell_nothing(one: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(one, tmp_path / "other"))
    figures = [{**row, "low_ms": None, "high_ms": None} for row in bundles.BENCH["figures"]]  # type: ignore[attr-defined]
    exports.edit_json(other / "measurements.json", lambda m: m["bench"].update(figures=figures))
    (row,) = document(one, other)["sections"]["Latency"]["rows"]
    assert row["intervals"] == "not known"


def test_a_list_that_is_empty_in_one_is_told_by_what_it_holds_in_the_other(one: Path, tmp_path: Path) -> None:
    """Of measured shapes a row said that the one that has them has none."""
    targets = [Path(shutil.copytree(one, tmp_path / name)) for name in ("a", "b")]
    for target, shapes in zip(targets, ([], [{"batch": 3}]), strict=True):
        bundles.edit(target, lambda manifest: manifest["config"].update(bench={"shapes": shapes}))  # noqa: B023
    rows = [list(row.values()) for row in document(*targets)["sections"]["Config"]["rows"]]
    assert rows == [["bench.shapes[0].batch", "not there", "3"]]


def test_versions_and_dimensions_that_differ_are_told(one: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(one, tmp_path / "other"))

    def change(manifest: dict[str, Any]) -> None:
        manifest["versions"]["onnx"] = "0.1"
        manifest["dims"]["batch"]["max"] = None

    bundles.edit(other, change)
    sections = document(one, other)["sections"]
    assert [(row[""], row["B"]) for row in sections["Versions"]["rows"]] == [("onnx", "0.1")]
    assert sections["Inputs, outputs and sizes"]["rows"] == [{"": "size batch", "A": "1 to 32", "B": "1 to any"}]


def test_the_page_is_whole_and_names_are_escaped(one: Path, other_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    assert diff(one, other_model, "--html", page).exit_code == 0
    read = Page(page.read_text(encoding="utf-8"))
    check_contained(read)
    assert "They do not compute the same" in read.text
    assert "<b>other</b>" in read.text
    assert read.all("b") == []


def test_a_bundle_that_is_damaged_or_absent_ends_as_verify_does(one: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(one, tmp_path / "damaged"))
    (damaged / "model.onnx").write_bytes(b"")
    assert diff(one, damaged).exit_code == 4
    assert diff(damaged, one).exit_code == 4
    assert f"{damaged}/model.onnx: " in diff(one, damaged).stderr
    assert diff(one, tmp_path / "absent").exit_code == 2
    inside = diff(one, one, "--html", one / "diff.html")
    assert inside.exit_code == 2
    assert "it would change" in inside.stderr
