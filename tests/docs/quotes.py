"""Keeps parts of pages equal to the files, commands and tables of the program that they quote.

A comment before a fenced block names the source of the block:

    <!-- quote: file examples/minilm.toml -->          a file of the repository
    <!-- quote: new-rule drop_negations.py -->         a file that `optexport new-rule drop-negations` writes
    <!-- quote: new-format optexport_plain.py -->      a file that `optexport new-format plain` writes

Text between two comments comes from `tests.docs.reference`:

    <!-- generated: config model -->                   a table of the config
    <!-- generated: commands -->                       all commands with their options
    <!-- end -->

``python -m tests.docs.quotes`` updates the pages; a test fails while one differs.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

from tests.docs import reference
from tests.docs.pages import PAGES, ROOT

_QUOTE = re.compile(r"(<!-- quote: (\S+) (.+?) -->\n```\w+\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)
_GENERATED = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(^<!-- end -->$)", re.DOTALL | re.MULTILINE)


@functools.cache
def _new_rule() -> dict[str, str]:
    from optexport.cli.new_rule import write_rule

    with tempfile.TemporaryDirectory() as folder:
        paths = write_rule("drop-negations", Path(folder))
        return {path.name: path.read_text(encoding="utf-8") for path in paths}


@functools.cache
def _new_format() -> dict[str, str]:
    from optexport.cli.new_format import write_format

    with tempfile.TemporaryDirectory() as folder:
        return {path.name: path.read_text(encoding="utf-8") for path in write_format("plain", Path(folder))}


def _source(kind: str, name: str) -> str:
    if kind == "file":
        return (ROOT / name).read_text(encoding="utf-8")
    if kind == "new-rule":
        return _new_rule()[name]
    if kind == "new-format":
        return _new_format()[name]
    raise ValueError(f"quote: unknown kind (expected file, new-rule or new-format, found {kind})")


def render(text: str) -> str:
    """Returns a page with all quotes and generated parts replaced by the current text of their sources."""
    text = _QUOTE.sub(lambda match: f"{match[1]}{_source(match[2], match[3])}{match[5]}", text)
    return _GENERATED.sub(lambda match: f"{match[1]}\n{reference.render(*match[2].split())}\n{match[4]}", text)


if __name__ == "__main__":
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = render(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")
