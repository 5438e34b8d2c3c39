"""Tests of ``optexport diff``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import optexport
from optexport.cli.main import cli
from optexport.errors import ConfigError
from tests._helpers import exports
from tests._helpers.graphs import Program
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
    """Exports the same model without rules, in one format."""
    target = tmp_path_factory.mktemp("plain") / "plain"
    options: dict[str, Any] = {"dynamic": exports.DYNAMIC, "effort": "quick"}
    return exports.quick(exports.block(), exports.batch(), target, **options).output


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.quick(
        exports.Block(), exports.batch(), tmp_path_factory.mktemp("other") / "<b>other</b>", effort="quick"
    ).output


def test_bundle_equals_itself_to_the_byte(one: Path) -> None:
    done = diff(one, one)
    assert done.exit_code == 0
    assert "They compute the same: all model files are equal to the byte." in done.stdout.splitlines()
    differences = document(one, one)
    assert differences["computes"] == "same"
    assert {title for title, section in differences["sections"].items() if section["rows"]} == {"Latency"}


@pytest.mark.slow
def test_bundle_with_a_format_more_is_the_same(plain: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dynamic": exports.DYNAMIC, "effort": "quick", "formats": ["pt2", "torchscript"]}
    both = exports.quick(exports.block(), exports.batch(), tmp_path / "both", **options).output
    sentence = "They compute the same: equal to the byte in pt2. Only one of them has torchscript."
    assert sentence in diff(plain, both).stdout.splitlines()


def test_other_graph_of_a_model_is_the_same_to_rounding(one: Path, plain: Path) -> None:
    differences = document(one, plain)
    assert differences["computes"] == "same to rounding"
    assert differences["reasons"] == ["pt2 differs"]
    sections = {title: section["rows"] for title, section in differences["sections"].items()}
    assert sections["Model"] == []
    (merged,) = [row for row in sections["Rules"] if row["rule"] == "merge-linears"]
    assert (merged["changes in A"], merged["changes in B"]) == (1, "not there")
    assert merged["only in A"] == "query_key_value_merged"
    absent = {row["target"] for row in sections["Parity"] if row["distance in B"] == "not there"}
    assert {"onnx", "torchscript"} <= absent
    sizes = {row["file"]: row for row in sections["Sizes"]}
    assert sizes["model.onnx"]["bytes in A"] == (one / "model.onnx").stat().st_size
    assert sizes["model.onnx"]["bytes in B"] == "not there"
    formats = {row[""]: (row["A"], row["B"]) for row in sections["Config"]}["export.formats"]
    assert formats == ("torchscript, onnx, pt2", "pt2")


def test_other_model_is_different(one: Path, other_model: Path) -> None:
    differences = document(one, other_model)
    assert differences["computes"] == "different"
    assert differences["reasons"] == ["the weights"]
    assert differences["verdict"] == "They do not compute the same: the weights differ."


def test_python_gives_what_the_command_prints(one: Path, other_model: Path) -> None:
    difference = optexport.diff(one, str(other_model))
    assert repr(difference) == "Difference(different: They do not compute the same: the weights differ.)"
    assert difference.as_json() == document(one, other_model)
    assert "They do not compute the same: the weights differ." in difference.summary()
    assert "They do not compute the same: the weights differ." in difference._repr_html_()
    assert optexport.diff(one / "model.onnx", other_model).as_json() == difference.as_json()
    with pytest.raises(ConfigError, match="not a bundle"):
        optexport.diff(one, one.parent)
    shutil.copyfile(one / "model.onnx", one.parent / "alone.onnx")
    with pytest.raises(ConfigError, match="the file is not in a bundle"):
        optexport.diff(one, one.parent / "alone.onnx")


class Scaled(nn.Module):
    """Instances differ by a constant in the code, not by weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3, bias=False), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.factor
        return y


def scaled(target: Path, factor: float, size: int = 2) -> Path:
    """Exports the model with weights that do not depend on the factor."""
    x = torch.linspace(-1, 1, 4 * size).reshape(size, 4)
    return exports.quick(randomise(Scaled(factor)), {"x": x}, target).output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "computes"), [(2.0, "same"), (2.0 + 2**-22, "same to rounding"), (2.1, "different")]
)
def test_models_with_equal_weights_differ_by_their_results(tmp_path: Path, factor: float, computes: str) -> None:
    differences = document(scaled(tmp_path / "a", 2.0), scaled(tmp_path / "b", factor))
    assert differences["computes"] == computes
    if computes == "different":
        assert differences["reasons"] == ["the originals' results"]
        assert "the originals' output differ by 0." in differences["verdict"]


def test_graphs_without_a_shared_input_are_not_known(tmp_path: Path) -> None:
    differences = document(scaled(tmp_path / "a", 2.0), scaled(tmp_path / "b", 200.0, size=3))
    assert differences["computes"] == "not known"
    assert "their traced graphs differ, and they share no inputs" in differences["verdict"]


def test_other_layers_in_lower_precision_are_different(one: Path, tmp_path: Path) -> None:
    def lower(reason: str | None) -> Any:
        def change(manifest: dict[str, Any]) -> None:
            layers = [{"layer": "up", "kept": reason, "alone": []}, {"layer": "down", "kept": None, "alone": []}]
            manifest["artifacts"][0]["precision"] = {
                "precision": "bfloat16", "layers": layers, "lowered": [], "chosen": []
            }  # fmt: skip

        return change

    targets = [Path(shutil.copytree(one, tmp_path / name)) for name in ("a", "b")]
    for target, reason in zip(targets, (None, "measured"), strict=True):
        bundles.edit(target, lower(reason))
    assert document(*targets)["reasons"] == ["the precision of a file"]
    assert document(targets[0], targets[0])["computes"] == "same"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.0, "overlap: inconclusive"),
        (1.15, "overlap: inconclusive"),
        (2.0, "apart: A is faster"),
        (0.5, "apart: B is faster"),
    ],
)
def test_times_differ_if_their_intervals_are_apart(one: Path, tmp_path: Path, factor: float, verdict: str) -> None:
    slower = Path(shutil.copytree(one, tmp_path / "other"))

    def slow(measurements: dict[str, Any]) -> None:
        for row in measurements["bench"]["figures"]:
            row |= {key: factor * row[key] for key in ("p50_ms", "low_ms", "high_ms")}

    exports.edit_json(slower / "measurements.json", slow)
    (row,) = document(one, slower)["sections"]["Latency"]["rows"]
    assert (row["file"], row["ms in A"], row["intervals"]) == ("onnx", 10.0, verdict)


def test_times_without_intervals_are_not_compared(one: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(one, tmp_path / "other"))
    figures = [{**row, "low_ms": None, "high_ms": None} for row in bundles.BENCH["figures"]]  # type: ignore[attr-defined]
    exports.edit_json(copy / "measurements.json", lambda m: m["bench"].update(figures=figures))
    (row,) = document(one, copy)["sections"]["Latency"]["rows"]
    assert row["intervals"] == "not known"


def test_empty_list_differs_by_the_items_of_the_other(one: Path, tmp_path: Path) -> None:
    targets = [Path(shutil.copytree(one, tmp_path / name)) for name in ("a", "b")]
    for target, shapes in zip(targets, ([], [{"batch": 3}]), strict=True):
        bundles.edit(target, lambda manifest: manifest["config"].update(bench={"shapes": shapes}))  # noqa: B023
    rows = [list(row.values()) for row in document(*targets)["sections"]["Config"]["rows"]]
    assert rows == [["bench.shapes[0].batch", "not there", "3"]]


def test_versions_and_sizes_that_differ_are_listed(one: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(one, tmp_path / "other"))

    def change(manifest: dict[str, Any]) -> None:
        manifest["versions"]["onnx"] = "0.1"
        manifest["dims"]["batch"]["max"] = None

    bundles.edit(changed, change)
    sections = document(one, changed)["sections"]
    assert [(row[""], row["B"]) for row in sections["Versions"]["rows"]] == [("onnx", "0.1")]
    assert sections["Inputs, outputs and sizes"]["rows"] == [{"": "size batch", "A": "1 to 32", "B": "1 or more"}]


def test_difference_page_is_valid_and_names_are_escaped(one: Path, other_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "diff.html"
    assert diff(one, other_model, "--html", page).exit_code == 0
    read = Page(page.read_text(encoding="utf-8"))
    check_contained(read)
    assert "They do not compute the same" in read.text
    assert "<b>other</b>" in read.text
    assert read.all("b") == []


def test_damaged_or_absent_bundle_has_the_codes_of_verify(one: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(one, tmp_path / "damaged"))
    (damaged / "model.onnx").write_bytes(b"")
    assert diff(one, damaged).exit_code == 4
    assert diff(damaged, one).exit_code == 4
    assert f"{damaged}/model.onnx: " in diff(one, damaged).stderr
    assert diff(one, tmp_path / "absent").exit_code == 2
    inside = diff(one, one, "--html", one / "diff.html")
    assert inside.exit_code == 2
    assert "writing this path would change" in inside.stderr


# Without format passes, whose defaults depend on the processor: gemm contains the bias of a linear.
LAYERS: dict[str, Any] = {
    "dynamic": exports.DYNAMIC,
    "formats": ["onnx"],
    "passes": {"onnx": []},
    "effort": "quick",
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports a block whose linears are merged, so that names inside its file differ from those of a plain one."""
    output = tmp_path_factory.mktemp("merged") / "merged"
    return optexport.export(exports.block(), exports.batch(), output, **LAYERS).output


def layers(*arguments: object) -> dict[str, float]:
    """Returns the difference of each layer that differs, by its weight or output."""
    section = document(*arguments, "--layers")["sections"]["Layers"]
    assert section["rows"] or section["equal"]
    return {row["weight"] or row["value in A"]: row["difference"] for row in section["rows"]}


def test_layers_compares_values_inside_the_onnx_files(merged: Path, tmp_path: Path) -> None:
    plain_onnx = exports.quick(exports.block(), exports.batch(), tmp_path / "plain", **LAYERS).output
    section = document(plain_onnx, merged, "--layers")["sections"]["Layers"]
    assert len(section["rows"]) + section["equal"] >= 10
    assert all(0 < row["difference"] < 1e-5 for row in section["rows"] if row["value in B"] is not None)
    alone = {row["weight"].partition(".")[0] for row in section["rows"] if row["value in B"] is None}
    assert alone <= {"query", "key", "value"}  # merged in B
    assert layers(merged, merged) == {}


def test_layers_show_where_another_model_begins_to_differ(merged: Path, tmp_path: Path) -> None:
    model = exports.block()
    with torch.no_grad():
        model.up.bias += 0.01
    changed = exports.quick(model, exports.batch(), tmp_path / "changed", **LAYERS).output
    page = tmp_path / "page.html"
    differences = layers(merged, changed)
    assert differences["up.bias"] > 1e-3
    assert differences["hidden"] > 1e-5
    assert all(differences.get(weight, 0.0) < 1e-5 for weight in ("out.bias", "norm.weight"))
    assert (
        "floating-point values of A have a counterpart in B" in diff(merged, changed, "--layers", "--html", page).stdout
    )
    assert "Values inside the ONNX files" in page.read_text(encoding="utf-8")


def test_layers_show_an_output_that_is_far_off(tmp_path: Path) -> None:
    """Values that differed by more than a tenth were left out, and the rest was called equal."""
    bundles = []
    for factor in (1.0, -2.0):
        model = nn.Linear(8, 8)
        nn.init.constant_(model.weight, factor)
        nn.init.zeros_(model.bias)
        options = {"formats": ["onnx"], "effort": "quick"}
        bundles.append(exports.quick(model, torch.ones(2, 8), tmp_path / f"{factor}", **options).output)
    assert max(layers(*bundles).values()) == pytest.approx(3.0)


def test_layers_of_inputs_with_other_dtypes_or_sizes_are_refused(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2.0)
    options: dict[str, Any] = {"formats": ["onnx"], "effort": "quick", "dynamic": {}}
    made = {
        name: exports.quick(model, {"x": x}, tmp_path / name, **options).output
        for name, x in {"two": torch.ones(2, 8), "five": torch.ones(5, 8), "double": torch.ones(2, 8).double()}.items()
    }
    done = diff(made["two"], made["five"], "--layers")
    assert (done.exit_code, "take inputs of different sizes" in done.output) == (2, True)
    done = diff(made["two"], made["double"], "--layers")
    assert (done.exit_code, "take inputs of different dtypes or ranks" in done.output) == (2, True)


def test_layers_need_onnx_files_with_the_same_inputs(one: Path, plain: Path, tmp_path: Path) -> None:
    done = diff(one, plain, "--layers")
    assert done.exit_code == 2
    assert f"--layers: {plain}: the bundle has no ONNX file" in done.output
    linear = exports.quick(nn.Linear(8, 8), torch.ones(2, 8), tmp_path / "linear", formats=["onnx"], effort="quick")
    done = diff(one, linear.output, "--layers")
    assert done.exit_code == 2
    assert "take different inputs (x, mask and input)" in done.output
