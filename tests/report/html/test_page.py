"""Tests of ``report.html``."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from optexport.bundle.verdict import passed_text, share_text
from optexport.report import terminal
from optexport.report.change_text import changed_text, short_target
from optexport.report.html import contents, page
from optexport.transformations.registry import RULES
from tests._helpers import exports
from tests.report.html import bundles
from tests.report.html.reading import Page

HOSTILE = {
    "a script": "<script>alert(1)</script>",
    "an end of an attribute": '"\' onfocus=alert(1) autofocus x="',
    "an end of a comment, a title and a style": "--></title></style></svg><img src=x onerror=alert(1)>",
    "an address": "javascript:alert(1)//",
    "a template": "{{ 7 * 7 }}{% raw %}",
    "control characters": "\x00\x07\x1b[31m\x7f\x85\u2028",
    "another direction": "\u202egnp.exe\u2066\u200f",
    "a formula": "$\\frac{1}{0}$ \\input{/etc/passwd}",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.copied(tmp_path_factory.mktemp("page") / "block")


@pytest.fixture(scope="module")
def read(bundle: Path) -> Page:
    return Page((bundle / "report.html").read_text(encoding="utf-8"))


def check_contained(read: Page) -> None:
    """Checks that a page is well formed and self-contained: our script only, no addresses, no handlers."""
    assert read.wrong == []
    (script,) = read.all("script")
    digest = base64.b64encode(hashlib.sha256(script.text.encode()).digest()).decode()
    (policy,) = [e.attributes["content"] for e in read.all("meta") if "http-equiv" in e.attributes]
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy
    assert {e.tag for e in read.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "form", "base"})
    for element in read.elements:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), name
            assert name not in ("src", "srcset", "action", "data", "formaction"), name
            assert name not in ("href", "xlink:href") or value.startswith("#"), value
    for style in (*read.all("style"), *(e.attributes.get("style", "") for e in read.elements)):
        text = style if isinstance(style, str) else style.text
        assert re.findall(r"url\((?!#)|@import", text) == []


def test_page_is_self_contained(read: Page) -> None:
    check_contained(read)


def test_page_has_the_verdict_and_all_sections(read: Page) -> None:
    assert read.text.index("Passed") < read.text.index("Parity")
    assert "Passed3 files, " in read.text
    titles = [e.text for e in read.all("h2")]
    assert titles == ["Parity", "What changed", "Latency", "Files", "What was skipped",
                      "Inputs and outputs", "How to reproduce it"]  # fmt: skip
    manifest = exports.exported().manifest
    for text in (
        *(target.title for target in manifest.parity.targets),
        *(f"{bound.floor:.3g}" for bound in manifest.parity.bounds.values()),
        *(rule.rule for rule in manifest.transformations),
        *(node for rule in manifest.transformations for change in rule.changes for node in change.nodes),
        *(file.sha256 for file in manifest.files),
        *(f"{name} {version}" for name, version in manifest.versions.items()),
        f"onnx=={manifest.versions['onnx']}",
        manifest.model.weights_sha256,
        "9 to 11",  # the interval of the median
        "1.2 (1.1 to 1.3)",
        "with attention",
        "it is too far",
        "speedup over the plain export 1.05 (0.97 to 1.1) at batch=1,sequence=16",
        "2 of 3 candidates tried; no time for: with sum-residuals",
    ):
        assert text in read.text, text


def test_commands_quote_texts_of_the_manifest(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["versions"] |= {"torch": "2.13+cpu;reboot", "onnx": "1 $(reboot)", "python": "3.11`reboot`.2"}
        document["optexport_version"] = "0.1\nreboot"

    manifest = bundles.manifest_of(bundles.edit(bundles.copied(tmp_path / "bundle"), change))
    lines = contents.commands(manifest, has_config_file=True)
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line, comments=True)
        assert all(re.search(r"reboot", word) is None or shlex.quote(word) in line for word in words)
        assert "reboot" not in words
    assert " onnx==" not in lines[1]
    assert "torch==" not in lines[1]
    assert "--extra-index-url" not in lines[1]


def test_commands_pass_pip_only_names_and_versions(tmp_path: Path) -> None:
    hostile = {"--index-url=http://here/#": "1", "-rX": "2", "evil @ http://here/e.whl#": "3", "./evil": "4"}

    def change(document: dict[str, Any]) -> None:
        document["versions"] |= hostile
        document["model"] |= {"source": "package:x/y", "revision": "--index-url=http://here/ 1"}

    manifest = bundles.manifest_of(bundles.edit(bundles.copied(tmp_path / "bundle"), change))
    install = contents.commands(manifest, has_config_file=True)[1]
    assert "here" not in install
    assert "evil" not in install
    assert "-rX" not in install
    assert f"onnxruntime=={manifest.versions['onnxruntime']}" in install


def test_commands_are_lines_and_install_the_models_package(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["model"] |= {"source": "package:of_models/small", "revision": "of-models 1.2"}

    folder = bundles.edit(bundles.copied(tmp_path / "bundle"), change)
    elements = Page((folder / "report.html").read_text(encoding="utf-8")).all("pre")
    (shown,) = [element for element in elements if element.attributes.get("aria-label") == "Commands"]
    lines = shown.text.strip().splitlines()
    assert lines == contents.commands(bundles.manifest_of(folder), has_config_file=(folder / "config.toml").is_file())
    assert " of-models==1.2" in lines[1]


@pytest.mark.parametrize("generation", [None, {"max_length": 8}])
def test_commands_reproduce_the_bundle(tmp_path: Path, generation: dict[str, Any] | None) -> None:
    folder = bundles.edit(
        bundles.copied(tmp_path / "bundle"), lambda document: document["config"].update(generation=generation)
    )
    (command,) = [
        line for line in contents.commands(bundles.manifest_of(folder), has_config_file=True) if "config.toml" in line
    ]
    assert command.startswith(".venv/bin/optexport " + ("run " if generation else "reproduce BUNDLE --folder "))
    assert "--without" in command or not generation


def test_page_of_a_bundle_without_times(tmp_path: Path) -> None:
    folder = bundles.copied(tmp_path / "bundle", measured=False)
    read = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "No benchmark was run" in read.text
    assert "benchmark" in [row.children[0].text for row in read.all("tr") if row.children]
    check_contained(read)


def test_page_of_a_bundle_with_only_the_quick_comparison(tmp_path: Path) -> None:
    folder = bundles.copied(tmp_path / "bundle", measured=False)
    gain = {"format": "onnx", "ms": 1.0, "original_ms": 3.0, "speedup": 3.0, "low": 2.9, "high": 3.1,
            "sizes": "batch=2", "threads": 1}  # fmt: skip
    exports.edit_json(folder / "measurements.json", lambda measurements: measurements.update(gain=[gain]))
    page.write(folder)
    read = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert "Only the quick comparison with PyTorch at the top of this page was made. For percentiles, set" in read.text
    assert "No benchmark was run" not in read.text
    assert "benchmark" not in [row.children[0].text for row in read.all("tr") if row.children]


def test_rules_have_a_purpose_and_functions_a_short_name(read: Page) -> None:
    (table,) = [e for e in read.all("div") if e.attributes.get("aria-label") == "Rules"]
    rules = exports.exported().manifest.transformations
    assert all(RULES[rule.rule].summary in table.text for rule in rules)
    targets = [change.target for rule in rules for change in rule.changes]
    assert "operator.mul" in targets
    assert "mul" in {e.text for e in read.all("summary")}
    assert "operator.mul" not in {e.text for e in read.all("code")}


@pytest.mark.parametrize(
    ("target", "shown"),
    [
        ("torch._ops.aten.select.int", "select"),
        ("torch.ops.aten.relu", "relu"),
        ("torch._C._nn.gelu", "gelu"),
        ("operator.mul", "mul"),
        ("encoder.layer.0.query", "encoder.layer.0.query"),
        ("", ""),
    ],
)
def test_functions_are_named_without_module_and_overload(target: str, shown: str) -> None:
    assert short_target(target) == shown


def test_failed_check_is_shown_as_failed(tmp_path: Path) -> None:
    def fail(document: dict[str, Any]) -> None:
        document["parity"]["targets"][2]["outputs"][0]["cases"][0]["failure"] = "it is 3 from the reference"

    folder = bundles.edit(bundles.copied(tmp_path / "bundle"), fail)
    read = Page((folder / "report.html").read_text(encoding="utf-8"))
    (verdict,) = [e for e in read.elements if e.attributes.get("class") == "verdict failed"]
    assert "Failed" in verdict.text
    assert "it is 3 from the reference" in verdict.text
    assert len([e for e in read.all("td") if "failed-cell" in e.attributes.get("class", "")]) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", HOSTILE)
def test_texts_of_model_and_config_are_escaped(bundle: Path, read: Page, tmp_path: Path, kind: str) -> None:
    folder = bundles.hostile(Path(shutil.copytree(bundle, tmp_path / "bundle")), HOSTILE[kind])
    html = (folder / "report.html").read_text(encoding="utf-8")
    hostile = Page(html)
    check_contained(hostile)
    assert ("{{ 7 * 7 }}" in hostile.all("title")[0].text) == (kind == "a template")
    assert re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\u200e\u200f]", html) == []
    assert {e.tag for e in hostile.elements} == {e.tag for e in read.elements}


def test_hostile_texts_are_shown_literally(bundle: Path, tmp_path: Path) -> None:
    folder = bundles.hostile(Path(shutil.copytree(bundle, tmp_path / "bundle")), "<script>alert(1)</script>")
    read = Page((folder / "report.html").read_text(encoding="utf-8"))
    for part in (
        "python:tests._helpers.exports:Block",
        "hidden",
        "batch",
        "node",
        "reason",
        "axis",
        "constant",
        "onnx",
        "with gemm",
        "a note",
    ):
        assert f"<script>alert(1)</script>{part}" in read.text, part
    folder = bundles.hostile(Path(shutil.copytree(bundle, tmp_path / "other")), "\u202e")
    assert "\\u202ehidden" in Page((folder / "report.html").read_text(encoding="utf-8")).text


def test_page_works_with_screen_readers(read: Page) -> None:
    (html,) = read.all("html")
    assert html.attributes["lang"] == "en"
    assert [len(read.all(tag)) for tag in ("h1", "main", "header", "footer", "nav")] == [1, 1, 1, 1, 1]
    levels = [int(e.tag[1]) for e in read.elements if re.fullmatch("h[1-6]", e.tag)]
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    for table in read.all("table"):
        assert table.children[0].tag == "caption"
        assert table.children[0].text.strip()
    for header in read.all("th"):
        assert header.attributes["scope"] in ("col", "row")
    for svg in read.all("svg"):
        assert svg.attributes["aria-hidden"] == "true"  # a table or label has the same content
    for scroller in [e for e in read.elements if e.attributes.get("class") in ("scroll", "pane")]:
        assert scroller.attributes["tabindex"] == "0"
        assert scroller.attributes["aria-label"]
    labels = {e.attributes["for"] for e in read.all("label")}
    assert {e.attributes["id"] for e in read.all("input")} == labels
    ids = [e.attributes["id"] for e in read.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    aims = {e.attributes["href"][1:] for e in read.all("a")}
    aims |= {e.attributes["aria-labelledby"] for e in read.elements if "aria-labelledby" in e.attributes}
    assert aims <= set(ids)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_contrast_meets_wcag_aa(read: Page) -> None:
    sheets = re.findall(r":root \{(.*?)\}", read.all("style")[0].text, re.DOTALL)
    assert len(sheets) == 3
    for sheet in sheets:
        colours = {
            name: value if len(value) == 7 else "#" + "".join(2 * digit for digit in value[1:])
            for name, value in re.findall(r"--([a-z-]+): (#[0-9a-f]+);", sheet)
        }
        for ground in ("paper", "card", "wash"):
            for text in ("ink", "muted", "accent", "good", "bad"):
                light, dark = sorted((luminance(colours[ground]), luminance(colours[text])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


def test_page_of_a_large_model_is_small(tmp_path: Path) -> None:
    lines = ["graph():", "    %x : [num_users=1] = placeholder[target=x]"]
    before, changes, last = [*lines], [], "x"
    for index in range(3000):
        kind = "abcdefghij"[index % 10] * (1 + index // 10 % 30)  # 300 kinds of change
        before.append(
            f"    %n_{index} : [num_users=1] = call_module[target={kind}.{index}](args = (%{last},), kwargs = {{}})"
        )
        changes.append({"nodes": [f"n_{index}"], "target": f"{kind}.{index}", "replaced": [f"n_{index}"]})
        last = f"n_{index}"

    def grow(document: dict[str, Any]) -> None:
        document["transformations"][0]["changes"] = changes
        document["transformations"][1]["near_misses"] = [
            {"node": f"node_{index}", "reason": f"reason {index}"} for index in range(2000)
        ]
        target = document["parity"]["targets"][0]
        target["outputs"] = [{**target["outputs"][0], "output": f"output {index}"} for index in range(500)]
        bound = document["parity"]["bounds"]["hidden"]
        document["parity"]["bounds"] |= {f"output {index}": bound for index in range(500)}
        document["parity"]["cases"] += [f"data {index}" for index in range(2000)]
        document["model"]["source"] = "x" * 100_000
        document["outputs"] *= 300

    folder = bundles.copied(tmp_path / "bundle")
    for name in ("graph_before.txt", "graph_after.txt"):
        (folder / name).write_text("\n".join([*before, f"    return {last}\n"]), encoding="utf-8")
    bundles.edit(folder, grow)
    assert (folder / "report.html").stat().st_size < 2_000_000
    read = Page((folder / "report.html").read_text(encoding="utf-8"))
    check_contained(read)
    for text in ("kinds of change are not drawn", "more kinds of change are in manifest.json", "1803 more",
                 "302 more outputs are in manifest.json", "characters more"):  # fmt: skip
        assert text in read.text, text


@pytest.mark.slow
def test_page_is_equal_in_every_process(bundle: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from optexport.report.html import page; page.write(Path(sys.argv[1]))"
    )
    first = (bundle / "report.html").read_bytes(), (bundle / "measurements.json").read_bytes()
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", script, str(bundle)],
            check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        )
        assert ((bundle / "report.html").read_bytes(), (bundle / "measurements.json").read_bytes()) == first


def test_equal_runs_differ_only_in_times_and_machine(tmp_path: Path) -> None:
    one, two = bundles.copied(tmp_path / "one"), bundles.copied(tmp_path / "two")
    times = {"date": "1999-12-31T23:59:59+00:00", "processor": "Z80", "seconds": {"trace": 86400.0}}
    exports.edit_json(two / "measurements.json", lambda m: m.update(times))
    page.write(two)
    pages = [(folder / "report.html").read_text(encoding="utf-8").splitlines() for folder in (one, two)]
    stage = r'<th scope="row">[\w -]+</th><td class="n">[\d.]+</td>'
    allowed = re.compile(rf"\d{{4}}-\d\d-\d\d|Z80|{stage}|>machine<|optexport 0|On .*thread")
    differing = set(pages[0]) ^ set(pages[1])
    assert differing
    assert [line for line in differing if not allowed.search(line)] == []


def test_the_report_shows_the_error_of_each_node(read: Page) -> None:
    record = exports.exported().manifest.node_errors
    assert record is not None
    (table,) = [e for e in read.all("div") if e.attributes.get("aria-label") == "Errors of the nodes"]
    assert all(point.node in table.text for point in record.points)
    assert "down, linear_5: original " in " ".join(title.text for title in read.all("title"))


def test_the_report_says_why_the_errors_of_nodes_are_missing(tmp_path: Path) -> None:
    folder = bundles.copied(tmp_path / "bundle")
    reason = {"targets": ["original"], "points": [], "skipped": "float64 is not available node by node: no memory"}
    bundles.edit(folder, lambda manifest: manifest.update(node_errors=reason))
    assert "Not measured: float64 is not available node by node: no memory." in (folder / "report.html").read_text()
    bundles.edit(folder, lambda manifest: manifest.pop("node_errors"))  # an older bundle
    assert "Error by depth" not in (folder / "report.html").read_text()


def test_terminal_and_report_give_the_verdict_in_the_same_words(read: Page) -> None:
    result = exports.exported()
    console = Console(width=200, file=io.StringIO(), record=True)
    terminal.show(result, console)
    words = passed_text(result.manifest)
    assert re.fullmatch(r"3 files, \d+ cases, at most \d+ % of the tolerance used", words)
    text = console.export_text()
    assert f"PASSED  {words}\n" in text
    assert words in read.text
    (merge,) = [rule for rule in result.manifest.transformations if rule.rule == "merge-linears"]
    assert changed_text(merge.changes) == "3 linear -> 1"
    assert changed_text(merge.changes) in read.text
    assert f"{changed_text(merge.changes)}, first at " in text


def test_the_top_of_the_report_shows_the_latency_of_the_exported_file(read: Page) -> None:
    (facts,) = [e for e in read.all("dl") if e.attributes.get("class") == "facts"]
    assert "Latency of onnx" in facts.text
    assert "10 ms" in facts.text
    assert "plain onnx" not in facts.text


def test_the_share_of_the_tolerance_has_one_form() -> None:
    assert share_text(0.249) == "25 %"
    assert share_text(12.0) == "1200 %"
    assert share_text(math.inf) == share_text(None) == ""
