"""Adapts the pages and docstrings to the site: links to files outside of docs/, and docstrings of rules."""

import os
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

_DOCS = Path(__file__).parent
_REPOSITORY = "https://github.com/optexport/optexport/blob/main"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns relative links to files outside of docs/ into links to the repository."""
    folder = (_DOCS / page.file.src_uri).parent

    def replace(link: re.Match[str]) -> str:
        path, hash_mark, anchor = link[1].partition("#")
        target = Path(os.path.normpath(folder / path))
        if "://" in path or target.is_relative_to(_DOCS):
            return link[0]
        if not target.exists():
            raise PluginError(f"{page.file.src_uri}: broken link {link[1]}")
        return f"]({_REPOSITORY}/{target.relative_to(_DOCS.parent).as_posix()}{hash_mark}{anchor})"

    return re.sub(r"\]\(([^)\s#]+(?:#[^)\s]*)?)\)", replace, markdown)


class RuleDocstrings(griffe.Extension):
    """Shows the rewriting and the conditions of a rule as a code block and a list."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Changes the docstring of a class if it lists what a rule skips."""
        if cls.docstring and re.search(r"^Skips: ", cls.docstring.value, re.MULTILINE):
            paragraphs = re.split(r"\n\n|\n(?=(?:Skips|Exact|Inverse):)", cls.docstring.value)
            cls.docstring.value = "\n\n".join(map(_as_markdown, paragraphs))


def _as_markdown(paragraph: str) -> str:
    if condition := re.match(r"(Skips|Exact|Inverse):\s+", paragraph):
        return f"- **{condition[1]}**: {' '.join(paragraph[condition.end() :].split())}"
    return f"```text\n{paragraph}\n```" if "  ->  " in paragraph else paragraph
