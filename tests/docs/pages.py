"""The Markdown pages of the project, and the parts of them that tests read."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "serving" / "README.md",
]


def read(name: str) -> str:
    """Returns the text of a page, by its path from the root of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Returns the contents of the fenced code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def links(text: str) -> list[str]:
    """Returns the targets of the links of a page, without links in code blocks."""
    return re.findall(r"\]\(([^)]+)\)", _without_code(text))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
