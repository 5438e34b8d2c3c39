"""What continuous integration is told: one test case for each thing compared, and the tolerance that would do."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

from optexport.bundle.manifest import ParityRecord
from optexport.cli.main import cli
from optexport.errors import printable
from optexport.report import ci
from tests._helpers import exports
from tests._helpers.cli import Caller, config, message

# The rule of the one takes a division for a multiplication, that of the other divides by a thousandth more.
WRONG = '[[transformations]]\nuse = "python:halves:Doubles"'
NEARLY = '[[transformations]]\nuse = "python:halves:Nudges"'


@pytest.fixture
def call(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def proof(bundle: Path) -> ParityRecord:
    return ParityRecord.model_validate(json.loads((bundle / "manifest.json").read_bytes())["parity"])


def test_a_bundle_that_passes_has_a_test_case_for_each_output_place_and_batch() -> None:
    record = proof(exports.exported().output)
    root = ElementTree.fromstring(ci.junit(record))
    cases = root.findall("testsuite/testcase")
    assert {(c.get("classname"), c.get("name")) for c in cases} == {
        (f"optexport.{target.target}", f"{output} at {case}")
        for target in record.targets
        for output in record.bounds
        for case in record.cases
    }
    assert root.get("tests") == str(len(cases)) == root.find("testsuite").get("tests")  # type: ignore[union-attr]
    assert root.get("failures") == root.get("errors") == "0"
    assert not root.findall(".//failure")


def test_a_rule_that_is_nearly_right_fails_its_place_alone_and_says_what_would_have_passed(
    call: Caller, tmp_path: Path
) -> None:
    report = tmp_path / "reports" / "parity.xml"
    said = message(call("run", config(more=NEARLY), "--junit", str(report)), 4)
    assert "Nudges" in said
    root = ElementTree.parse(report).getroot()
    failed = {case.get("classname") for case in root.findall(".//testcase") if case.find("failure") is not None}
    assert failed == {"optexport.transformed graph"}
    for failure in root.findall(".//failure"):
        assert "allowed" in failure.get("message", "")
        assert failure.text is not None
        assert failure.text.startswith("With atol=")
    assert int(root.get("failures", 0)) == len(root.findall(".//failure")) > 0


def test_the_tolerance_that_is_told_does_pass(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    call("run", config(more=NEARLY), "--junit", str(report))
    failure = ElementTree.parse(report).getroot().find(".//failure")
    assert failure is not None
    assert failure.text is not None
    told = float(failure.text.split("atol=")[1].split()[0])
    # Two digits are told.
    assert call("run", config(more=f"{NEARLY}\n[parity]\natol = {told * 1.06}")).exit_code == 0
    assert call("run", config(more=f"{NEARLY}\n[parity]\natol = {told * 0.94}")).exit_code == 4


def test_of_a_rule_that_is_plainly_wrong_no_tolerance_is_told(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    message(call("run", config(more=WRONG), "--junit", str(report)), 4)
    for failure in ElementTree.parse(report).getroot().findall(".//failure"):
        assert failure.text is not None
        assert failure.text.startswith("A tolerance that it passed would prove nothing: it would be more than 0.1 of")
        assert "atol=" not in failure.text


@pytest.mark.parametrize(("tolerance", "told"), [(0.19, True), (0.21, False), (None, False)])
def test_a_tolerance_is_told_up_to_a_tenth_of_the_largest_value(tolerance: float | None, told: bool) -> None:
    record = proof(exports.exported().output)
    (target, *_), (output, *_) = record.targets, record.targets[0].outputs
    case = output.cases[0].model_copy(update={"failure": "wrong"})
    output = output.model_copy(update={"tolerance": tolerance, "cases": [case]})
    bounds = {output.output: record.bounds[output.output].model_copy(update={"largest": 2.0})}
    targets = [target.model_copy(update={"outputs": [output], "decisions": []})]
    record = record.model_copy(update={"places": targets, "bounds": bounds})
    for said in (ci.junit(record), "".join(ci.error_lines(record))):
        assert (f"With atol={tolerance} against the original" in said) is told
        assert ("would prove nothing" in said) is (tolerance == 0.21)


def test_the_largest_value_of_each_output_is_in_the_record() -> None:
    result = exports.exported()
    tensors = load_file(result.output / "reference.safetensors")
    largest = max(v.abs().max().item() for k, v in tensors.items() if k.endswith(".outputs.hidden") and k[0] == "0")
    bounds = proof(result.output).bounds
    assert bounds["hidden"].largest is not None
    assert largest <= bounds["hidden"].largest * 1.01 < 100 * largest
    assert bounds["longest"].largest is not None


def test_a_run_that_compares_nothing_is_one_error(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    message(call("run", config("halves:fails"), "--junit", str(report)), 3)
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert error.get("type") == "SourceError"
    assert "no weights" in error.get("message", "")


def test_a_config_that_is_refused_is_one_error_too(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    message(call("run", "[model", "--junit", str(report)), 2)
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert error.get("type") == "ConfigError"


def test_a_report_that_cannot_be_written_is_told(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    told = message(call("run", config(), "--junit", str(tmp_path / "file" / "parity.xml")), 2)
    assert "--junit" in told


@pytest.mark.parametrize("fails", [False, True])
def test_github_is_told(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("what an earlier step said\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = call("run", config(more=WRONG if fails else ""), "--json")
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("what an earlier step said\n### mine.toml: parity ")
    assert ("parity failed" in text, "parity passed" in text) == (fails, not fails)
    assert "| transformed graph |" in text
    assert "atol=" in text
    lines = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert len(lines) == fails
    if fails:
        assert "title=optexport%3A transformed graph%2C output::at traced: " in lines[0]
        assert "would prove nothing" in lines[0]
    else:
        assert json.loads(result.stdout)["passed"]


def test_github_is_told_of_other_errors_in_one_line(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = call("run", config("halves:laod"))
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("::error ")]
    assert line.endswith('Did you mean "load"?')
    assert "%0A" in line


NAMES = ["lo|g%its,a:b", "po\noled::error::x", "a\r\n::error::y", "`a` <b> *c* _d_ [e](f) ~~g~~ &lt; \\| https://h"]
ODD = f"""
class Odd(nn.Module):
    def forward(self, x):
        return {{name: x / (index + 2) for index, name in enumerate({NAMES!r})}}
"""


def odd(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, str]:
    """What a run says of outputs of any name that fail, and its summary as Markdown."""
    module = tmp_path / "halves.py"
    module.write_text(module.read_text(encoding="utf-8") + ODD, encoding="utf-8")
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = call("run", config("halves:Odd", more=WRONG))
    assert result.exit_code == 4
    return result, summary.read_text(encoding="utf-8")


def test_github_is_told_one_error_for_each_output_whatever_its_name(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, _ = odd(call, tmp_path, monkeypatch)
    commands = [line for line in result.stderr.splitlines() if line.lstrip().startswith("::")]
    titles = []
    for command in commands:
        found = re.fullmatch(r"::error title=([^:,]*)::(.*)", command)
        assert found is not None, command
        titles.append(unquote(found.group(1)))
    assert titles == [printable(f"optexport: transformed graph, {name}") for name in NAMES]


def test_a_summary_has_one_row_for_each_output_whatever_its_name(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, summary = odd(call, tmp_path, monkeypatch)
    html = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(summary)
    rows = ElementTree.fromstring(f"<html>{html}</html>").findall(".//tbody/tr")
    shown = [name.replace("\r", "\\r").replace("\n", "\\n") for name in NAMES]
    assert [row[1].text for row in rows] == shown * (len(rows) // len(NAMES))
    assert {len(row) for row in rows} == {8}
    assert [cell.tag for row in rows for cell in row[1].iter()] == ["td"] * len(rows), "no markup"


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nothing_set")
def test_elsewhere_nothing_is_said(call: Caller) -> None:
    assert "::error" not in call("run", config(more=WRONG)).stderr


def spoiled(bundle: Path) -> None:
    """A bundle of which one expected number is another, sealed again."""
    tensors = load_file(bundle / "reference.safetensors")
    for name, tensor in tensors.items():
        if name.endswith((".outputs.hidden", ".float64.hidden")):
            tensor.flatten()[0] += 1
    save_file(tensors, bundle / "reference.safetensors")
    exports.reseal(bundle, "reference.safetensors")


@pytest.mark.parametrize(("spoil", "code"), [(None, 0), (spoiled, 4)])
def test_verify_reports_too(tmp_path: Path, spoil: Callable[[Path], None] | None, code: int) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    if spoil is not None:
        spoil(bundle)
    report = tmp_path / "parity.xml"
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(report)])
    assert result.exit_code == code, result.stderr
    root = ElementTree.parse(report).getroot()
    assert (root.get("failures") != "0") == bool(code)
    assert {case.get("classname") for case in root.iter("testcase")} >= {"optexport.onnx", "optexport.pt2"}


def test_verify_tells_machines_of_a_failure_in_one_document(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    spoiled(bundle)
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--json"])
    read = json.loads(result.stdout)
    assert (read["passed"], read["exit_code"], result.exit_code) == (False, 4, 4)
    assert "no longer give the stored outputs" in read["error"]
    assert not all(row["passed"] for row in read["places"])
    assert read["parity"]["places"]
    (bundle / "model.onnx").unlink()
    changed = CliRunner().invoke(cli, ["verify", str(bundle), "--json"])
    assert json.loads(changed.stdout) == {
        "passed": False,
        "exit_code": 4,
        "error": f"{bundle}/model.onnx: it is missing",
        "parity": None,
    }


def test_a_summary_that_cannot_be_written_is_told_and_the_run_passes(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "not" / "mounted"))
    result = call("run", config())
    assert result.exit_code == 0
    assert "The summary of the job cannot be written" in result.stderr


def test_a_file_in_the_bundle_or_over_the_config_is_refused_and_nothing_is_written(
    call: Caller, tmp_path: Path
) -> None:
    bundle = exports.exported().output
    before = sorted(path.name for path in bundle.iterdir())
    result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(bundle / "parity.xml")])
    assert result.exit_code == 2
    assert sorted(path.name for path in bundle.iterdir()) == before
    told = message(call("run", config(), "--junit", str(tmp_path / "mine.toml")), 2)
    assert "it would change" in told
    assert (tmp_path / "mine.toml").read_text(encoding="utf-8") == config()


def test_until_the_work_ends_the_file_says_that_it_did_not(call: Caller, tmp_path: Path) -> None:
    report = tmp_path / "parity.xml"
    call("run", config(), "--junit", str(report))
    assert call("run", config("halves:interrupted"), "--junit", str(report)).exit_code == 130
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert error.get("message") == "it did not end"


def test_what_xml_cannot_hold_is_replaced(call: Caller, tmp_path: Path) -> None:
    module = tmp_path / "halves.py"
    module.write_text(
        module.read_text(encoding="utf-8") + '\ndef coloured(): raise RuntimeError("\\x1b[31m red \\udc80")\n',
        encoding="utf-8",
    )
    report = tmp_path / "parity.xml"
    assert call("run", config("halves:coloured"), "--junit", str(report)).exit_code == 3
    (error,) = ElementTree.parse(report).getroot().findall("testsuite/testcase/error")
    assert "?[31m red ?" in error.get("message", "")


def test_of_many_batches_of_data_the_first_and_the_last_are_named() -> None:
    few = ["traced", "data 1", "data 2", "batch 1"]
    assert ci.batches(few) == "traced; data 1; data 2; batch 1"
    many = ["traced", *(f"data {index}" for index in range(1, 250)), "batch 1"]
    assert ci.batches(many) == "traced; data 1 to 249; batch 1"


GONE = """
class Gone(Doubles if DOUBLES else Transformation):
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
GONE_RULE = '[[transformations]]\nuse = "python:halves:Gone"'


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_report_that_can_no_longer_be_written_hides_no_failure_and_is_told_alone_where_there_is_none(
    call: Caller, tmp_path: Path, full: bool, fails: bool
) -> None:
    module = tmp_path / "halves.py"
    added = GONE.replace("DOUBLES", str(fails)).replace("FULL", str(full))
    module.write_text(module.read_text(encoding="utf-8") + added, encoding="utf-8")
    report = tmp_path / "reports" / "parity.xml"
    result = call("run", config(more=GONE_RULE), "--junit", str(report))
    told = message(result, 4 if fails else 1 if full else 2)
    why = f"No space left on device: '{report}'" if full else f"No such file or directory: '{report}'"
    if fails:
        assert "python:halves:Gone is to blame" in told
        assert why in result.stderr.split("The JUnit file cannot be written: ")[1].splitlines()[0]
    else:
        assert why in told
        assert ("All else is done." in told) is not full
        assert (tmp_path / "build" / "model" / "manifest.json").is_file()


def test_verify_says_what_differs_though_its_report_cannot_be_written(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    spoiled(bundle)
    report = tmp_path / "parity.xml"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))  # room for "it did not end", and no more
    try:
        result = CliRunner().invoke(cli, ["verify", str(bundle), "--junit", str(report)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the files no longer give the stored outputs" in message(result, 4)
    assert "The JUnit file cannot be written: [Errno 27]" in result.stderr


def test_what_results_are_compared_with_is_told_where_a_tolerance_is_given(call: Caller, tmp_path: Path) -> None:
    """With one, distances are from the original in its own precision, and were said to be from float64."""
    record = proof(exports.exported().output)
    assert "Compared with the original in float64 on" in ci.markdown(record, "x")
    first, *others = record.bounds
    bounds = {first: record.bounds[first].model_copy(update={"atol": 1e-5})}
    some = record.model_copy(update={"bounds": bounds | {name: record.bounds[name] for name in others}})
    assert others
    assert f"Compared with the original in float64, {first} in its own precision on" in ci.markdown(some, "x").replace(
        "\\\\", ""
    )
    failed = call("run", config(more=f"{NEARLY}\n[parity]\natol = 1e-12"), "--junit", str(tmp_path / "parity.xml"))
    assert failed.exit_code == 4
    texts = [failure.text for failure in ElementTree.parse(tmp_path / "parity.xml").getroot().iter("failure")]
    assert texts
    assert all("times as far from the original as the original is from float64." in str(text) for text in texts)
