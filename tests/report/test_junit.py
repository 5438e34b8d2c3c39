"""Tests of the JUnit file of ``--junit``."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from optexport.bundle.parity_records import ParityRecord
from optexport.cli.main import cli
from optexport.errors import GateError
from optexport.report import github, junit
from optexport.report.parity_text import case_names
from tests._helpers import exports
from tests._helpers.cli import Caller, config, message

# One rule takes a division for a multiplication, the other divides by a thousandth more.
WRONG = '[[transformations]]\nuse = "python:halves:Doubles"'
NEARLY_RIGHT = '[[transformations]]\nuse = "python:halves:Nudges"'


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def read_parity(bundle: Path) -> ParityRecord:
    return ParityRecord.model_validate(json.loads((bundle / "manifest.json").read_bytes())["parity"])


def test_passed_bundle_has_a_test_per_output_target_and_case() -> None:
    record = read_parity(exports.exported().output)
    root = ElementTree.fromstring(junit.render(record))
    tests = root.findall("testsuite/testcase")
    assert {(test.get("classname"), test.get("name")) for test in tests} == {
        (f"optexport.{target.target}", f"{output} at {case}")
        for target in record.targets
        for output in record.bounds
        for case in record.cases
    }
    assert root.get("tests") == str(len(tests)) == root.find("testsuite").get("tests")  # type: ignore[union-attr]
    assert root.get("failures") == root.get("errors") == "0"
    assert not root.findall(".//failure")


def test_error_beside_passed_checks_has_a_test_of_its_own() -> None:
    """A run that a gate on the size ended was shown as 78 passed tests and a passed summary."""
    record, error = read_parity(exports.exported().output), GateError("onnx has 2 MB", location="gate.max_size_mb")
    root = ElementTree.fromstring(junit.render(record, error))
    assert (root.get("failures"), root.get("errors")) == ("1", "0")
    (failed,) = [test for test in root.findall(".//testcase") if test.find("failure") is not None]
    assert failed.get("name") == "run"
    text = github.markdown(record, "x", error)
    assert text.startswith("### x: failed with exit code 6, parity passed")
    assert "`gate.max_size_mb`: onnx has 2 MB" in text


def test_nearly_right_rule_fails_only_its_target(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "reports" / "parity.xml"
    error = message(call("run", config(more=NEARLY_RIGHT), "--junit", str(report)), 4)
    assert "Nudges" in error
    root = ElementTree.parse(report).getroot()
    failed = {case.get("classname") for case in root.findall(".//testcase") if case.find("failure") is not None}
    assert failed == {"optexport.graph"}
    for failure in root.findall(".//failure"):
        assert "tolerance" in failure.get("message", "")
        assert failure.text is not None
        assert failure.text.startswith("With atol=")
    assert int(root.get("failures", 0)) == len(root.findall(".//failure")) > 0


@pytest.mark.slow
def test_suggested_tolerance_passes(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    call("run", config(more=NEARLY_RIGHT), "--junit", str(report))
    failure = ElementTree.parse(report).getroot().find(".//failure")
    assert failure is not None
    assert failure.text is not None
    atol = float(failure.text.split("atol=")[1].split()[0])
    # The suggestion has two digits.
    assert call("run", config(more=f"{NEARLY_RIGHT}\n[parity]\natol = {atol * 1.06}")).exit_code == 0
    assert call("run", config(more=f"{NEARLY_RIGHT}\n[parity]\natol = {atol * 0.94}")).exit_code == 4


def test_plainly_wrong_rule_gets_no_suggested_tolerance(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    message(call("run", config(more=WRONG), "--junit", str(report)), 4)
    for failure in ElementTree.parse(report).getroot().findall(".//failure"):
        assert failure.text is not None
        assert failure.text.startswith("A tolerance that passes would prove nothing: it is more than 0.1 of")
        assert "atol=" not in failure.text


@pytest.mark.parametrize(("tolerance", "suggested"), [(0.19, True), (0.21, False), (None, False)])
def test_tolerance_is_suggested_up_to_a_tenth_of_largest_value(tolerance: float | None, suggested: bool) -> None:
    record = read_parity(exports.exported().output)
    (target, *_), (output, *_) = record.targets, record.targets[0].outputs
    case = output.cases[0].model_copy(update={"failure": "wrong"})
    output = output.model_copy(update={"passing_atol": tolerance, "cases": [case]})
    bounds = {output.output: record.bounds[output.output].model_copy(update={"largest": 2.0})}
    targets = [target.model_copy(update={"outputs": [output], "gate_results": []})]
    record = record.model_copy(update={"targets": targets, "bounds": bounds})
    for text in (junit.render(record), "".join(github.error_lines(record))):
        assert (f"With atol={tolerance} against the original" in text) is suggested
        assert ("would prove nothing" in text) is (tolerance == 0.21)


def test_record_has_the_largest_value_of_each_output() -> None:
    result = exports.exported()
    tensors = load_file(result.output / "reference.safetensors")
    largest = max(v.abs().max().item() for k, v in tensors.items() if k.endswith(".outputs.hidden") and k[0] == "0")
    bounds = read_parity(result.output).bounds
    assert bounds["hidden"].largest is not None
    assert largest <= bounds["hidden"].largest * 1.01 < 100 * largest
    assert bounds["longest"].largest is not None


@pytest.mark.parametrize(
    ("text", "code", "error_type", "words"),
    [(config("halves:fails"), 3, "SourceError", "no weights"), ("[model", 2, "ConfigError", "")],
    ids=["load fails", "config is wrong"],
)
def test_run_without_comparisons_is_one_error(
    call: Caller, tmp_path: Path, text: str, code: int, error_type: str, words: str
) -> None:
    report = tmp_path / "parity.xml"
    message(call("run", text, "--junit", str(report)), code)
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert error.get("type") == error_type
    assert words in error.get("message", "")


def test_report_that_cannot_be_written_is_an_error(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = message(call("run", config(), "--junit", str(tmp_path / "file" / "parity.xml")), 2)
    assert "--junit" in error


def change_reference(bundle: Path) -> None:
    """Changes one expected number of a bundle, and seals it again."""
    tensors = load_file(bundle / "reference.safetensors")
    for name, tensor in tensors.items():
        if name.endswith((".outputs.hidden", ".float64.hidden")):
            tensor.flatten()[0] += 1
    save_file(tensors, bundle / "reference.safetensors")
    exports.reseal(bundle, "reference.safetensors")


@pytest.mark.parametrize(("change", "code"), [(None, 0), (change_reference, 4)])
def test_verify_writes_a_report(tmp_path: Path, change: Callable[[Path], None] | None, code: int) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    if change is not None:
        change(bundle)
    report = tmp_path / "parity.xml"
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(report)])
    assert result.exit_code == code, result.stderr
    root = ElementTree.parse(report).getroot()
    assert (root.get("failures") != "0") == bool(code)
    assert {case.get("classname") for case in root.iter("testcase")} >= {"optexport.onnx", "optexport.pt2"}


def test_verify_json_has_failures_in_one_document(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    change_reference(bundle)
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--json"])
    document = json.loads(result.stdout)
    assert (document["passed"], document["exit_code"], result.exit_code) == (False, 4, 4)
    assert "do not reproduce the stored outputs" in document["error"]
    assert not all(row["passed"] for row in document["targets"])
    assert document["parity"]["targets"]
    (bundle / "model.onnx").unlink()
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--json"])
    assert json.loads(result.stdout) == {
        "passed": False,
        "exit_code": 4,
        "error": f"{bundle}/model.onnx: the file is missing",
        "mlflow_run_id": None,
        "parity": None,
    }


def test_report_may_not_replace_the_config_or_be_in_the_bundle(call: Caller, tmp_path: Path) -> None:
    bundle = exports.exported().output
    before = sorted(path.name for path in bundle.iterdir())
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(bundle / "parity.xml")])
    assert result.exit_code == 2
    assert sorted(path.name for path in bundle.iterdir()) == before
    error = message(call("run", config(), "--junit", str(tmp_path / "mine.toml")), 2)
    assert "writing this path would change" in error
    assert (tmp_path / "mine.toml").read_text(encoding="utf-8") == config()


def test_report_of_an_interrupted_run_says_it_did_not_finish(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    call("run", config(), "--junit", str(report))
    assert call("run", config("halves:interrupted"), "--junit", str(report)).exit_code == 130
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert error.get("message") == "the run did not finish"


@pytest.mark.slow
def test_characters_that_xml_forbids_are_replaced(call: Caller, tmp_path: Path) -> None:
    module = tmp_path / "halves.py"
    module.write_text(
        module.read_text(encoding="utf-8") + '\ndef coloured(): raise RuntimeError("\\x1b[31m red \\udc80")\n',
        encoding="utf-8",
    )
    report = tmp_path / "parity.xml"
    assert call("run", config("halves:coloured"), "--junit", str(report)).exit_code == 3
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert "?[31m red ?" in error.get("message", "")


def test_many_data_cases_are_shortened_to_a_range() -> None:
    few = ["traced", "data 1", "data 2", "batch 1"]
    assert case_names(few) == "traced; data 1; data 2; batch 1"
    many = ["traced", *(f"data {index}" for index in range(1, 250)), "batch 1"]
    assert case_names(many) == "traced; data 1 to 249; batch 1"


# A rule that makes the JUnit file unwritable during the run.
UNWRITABLE = """
class Unwritable(Doubles if DOUBLES else Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        import pathlib, shutil
        folder = pathlib.Path(__file__).parent / "reports"
        shutil.rmtree(folder, ignore_errors=True)
        if FULL:
            folder.mkdir()
            (folder / "parity.xml").symlink_to("/dev/full")
        return super().transform(graph_module) if DOUBLES else graph_module
"""
UNWRITABLE_RULE = '[[transformations]]\nuse = "python:halves:Unwritable"'


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_unwritable_report_does_not_hide_the_error_of_the_run(
    call: Caller, tmp_path: Path, full: bool, fails: bool
) -> None:
    module = tmp_path / "halves.py"
    rule = UNWRITABLE.replace("DOUBLES", str(fails)).replace("FULL", str(full))
    module.write_text(module.read_text(encoding="utf-8") + rule, encoding="utf-8")
    report = tmp_path / "reports" / "parity.xml"
    result = call("run", config(more=UNWRITABLE_RULE), "--junit", str(report))
    error = message(result, 4 if fails else 1 if full else 2)
    problem = f"No space left on device: '{report}'" if full else f"No such file or directory: '{report}'"
    if fails:
        assert "python:halves:Unwritable caused the difference" in error
        assert problem in result.stderr.split("Cannot write the JUnit file: ")[1].splitlines()[0]
    else:
        assert problem in error
        assert ("The bundle is complete." in error) is not full
        assert (tmp_path / "build" / "model" / "manifest.json").is_file()


def test_verify_reports_differences_despite_an_unwritable_report(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    change_reference(bundle)
    report = tmp_path / "parity.xml"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # enough for the first text, not for the result
    try:
        result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(report)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the files do not reproduce the stored outputs" in message(result, 4)
    assert "Cannot write the JUnit file: [Errno 27]" in result.stderr


def test_all_reports_recommend_one_tolerance_above_the_noise_floor(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    text = config(more="[parity]\natol = 1e-12").replace('"pt2"', '"onnx"')
    error = message(call("run", text, "--junit", str(report)), 4)
    recommended = error.split("Set parity.atol to at least ")[1].split(",")[0]
    texts = [str(failure.text) for failure in ElementTree.parse(report).getroot().iter("failure")]
    assert texts
    assert all(text.startswith(f"With atol={recommended} against") for text in texts)


def test_failures_name_the_reference_of_a_fixed_tolerance(call: Caller, tmp_path: Path) -> None:
    failed = call(
        "run", config(more=f"{NEARLY_RIGHT}\n[parity]\natol = 1e-12"), "--junit", str(tmp_path / "parity.xml")
    )
    assert failed.exit_code == 4
    texts = [failure.text for failure in ElementTree.parse(tmp_path / "parity.xml").getroot().iter("failure")]
    assert texts
    assert all("times as far from the original as the original is from float64." in str(text) for text in texts)
