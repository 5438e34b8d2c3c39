"""Tests that resealed documents with wrong values never crash the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.bundle import digests
from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.errors import OptexportError
from optexport.report import bundle_comparison
from optexport.report.html import page
from tests._helpers import exports
from tests.bundle.test_hostile_manifests import ANYTHING, every_place, put
from tests.report.html import bundles
from tests.report.html.reading import Page
from tests.tiers import examples


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.copied(tmp_path_factory.mktemp("forged") / "bundle")


@settings(max_examples=examples(40))
@given(st.data())
def test_changed_document_gives_a_page_or_an_error(small: Path, data: st.DataObject) -> None:
    originals = {name: (small / name).read_bytes() for name in (MANIFEST, MEASUREMENTS)}
    name = data.draw(st.sampled_from((MANIFEST, MEASUREMENTS)))
    target = data.draw(st.sampled_from([p for p in every_place(json.loads(originals[name])) if p[0] != "digest"]))
    value = data.draw(ANYTHING | st.floats(-1e300, 1e300) | st.just("x"))
    try:
        exports.edit_json(small / name, lambda document: put(document, target, value))
        html = page.render(small, digests.read_manifest(small))
        assert Page(html).wrong == []
        side = bundle_comparison.read_side(small)
        assert Page(page.render_difference(bundle_comparison.compare(side, side))).wrong == []
    except OptexportError:
        pass
    finally:
        for file, content in originals.items():
            (small / file).write_bytes(content)
