"""Builds the site of docs/ and looks at its pages."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # A proxy that does not exist: the build must not use the network.
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def _section(page: Path, name: str) -> str:
    """Returns the HTML between the heading of a public name and the next one."""
    text = page.read_text(encoding="utf-8").partition(f'<h3 id="{name}"')[2]
    assert text, f"{page.name} does not show {name}"
    return html.unescape(text.partition("<h3 id=")[0])


def test_docstrings_are_rendered_with_their_sections(site: Path) -> None:
    page = site / "reference" / "python-api.html"
    export = _section(page, "optexport.export")
    assert all(word in export for word in ("Parameters:", "noise_multiple", "Returns:", "Raises:", "ParityError"))
    laws = _section(page, "optexport.testing.check_laws")
    assert all(word in laws for word in ("Parameters:", "scale", "Returns:"))
    assert "Args:" not in page.read_text(encoding="utf-8")


def test_docstring_of_a_rule_is_a_code_block_and_a_list(site: Path) -> None:
    section = _section(site / "reference" / "rules.html", "optexport.transformations.FoldScale")
    assert re.search(r"<pre>.*<code>.*  ->  ", section)
    assert re.search(r"<li>\s*(<p>)?<strong>Exact</strong>", section)


def test_links_to_other_files_lead_to_the_repository(site: Path) -> None:
    text = (site / "explanation" / "limitations.html").read_text(encoding="utf-8")
    assert 'href="https://github.com/optexport/optexport/blob/main/tests/zoo/COVERAGE.md"' in text


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page.read_text(encoding="utf-8"))
        loaded = [
            tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag) and 'rel="canonical"' not in tag
        ]
        assert loaded == [], page
