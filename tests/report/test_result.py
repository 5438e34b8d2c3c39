"""Texts of a result in Python: its repr, its summary, and its page in a notebook."""

from __future__ import annotations

import re

from tests._helpers import exports


def test_repr_is_one_line_with_the_verdict() -> None:
    result = exports.exported()
    assert re.fullmatch(
        r"Result\(passed, \d+ cases, at most \d+ % of the tolerance used, torchscript, onnx, pt2 in .+\)", repr(result)
    )


def test_summary_is_the_text_of_the_command_without_colors() -> None:
    result = exports.exported()
    summary = result.summary()
    assert "\nPASSED  3 files" in summary
    assert str(result.output) in summary
    assert "\x1b" not in summary


def test_notebook_shows_the_summary_as_html() -> None:
    html = exports.exported()._repr_html_()
    assert html.startswith("<pre")
    text = re.sub("<[^>]+>", "", html).replace("&gt;", ">").replace("&lt;", "<").replace("&#x27;", "'")
    assert text.split() == exports.exported().summary().split()


def test_rules_that_found_nothing_and_cases_are_listed_on_request() -> None:
    result = exports.exported()
    idle = [rule.rule for rule in result.manifest.transformations if not rule.changes and not rule.near_misses]
    assert idle
    short, long = result.summary(), result.summary(verbose=True)
    assert f"{len(idle)} rules found nothing" in short
    assert [rule for rule in idle if rule in short] == []
    assert [rule for rule in idle if rule not in long] == []
    assert f"Parity on {len(result.manifest.parity.cases)} cases\n" in short
    assert f"{len(result.manifest.parity.cases)} cases: traced" in long
