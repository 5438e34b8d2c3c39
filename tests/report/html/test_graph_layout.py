"""Tests of the layout of drawings."""

from __future__ import annotations

import itertools
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.report.html.graph_layout import HEIGHT, arrange
from tests.tiers import examples


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, float], dict[str, list[str]]]:
    count = draw(st.integers(1, 14))
    widths = {f"n{i}": draw(st.floats(20, 220)) for i in range(count)}
    reads = {
        f"n{i}": sorted(draw(st.sets(st.sampled_from([f"n{j}" for j in range(i)]), max_size=4))) if i else []
        for i in range(count)
    }
    return widths, reads


@settings(max_examples=examples(80))
@given(graphs())
def test_boxes_do_not_overlap_and_data_flows_down(graph: tuple[dict[str, float], dict[str, list[str]]]) -> None:
    widths, reads = graph
    layout = arrange(widths, reads)
    boxes = list(layout.boxes.values())
    for box in boxes:
        assert box.x >= -0.1
        assert box.x + box.width <= layout.width + 0.1
        assert 0 <= box.y <= layout.height - HEIGHT
    for a, b in itertools.combinations(boxes, 2):
        if a.y == b.y:
            assert a.x + a.width < b.x or b.x + b.width < a.x
    for name, sources in reads.items():
        for source in sources:
            assert layout.boxes[source].y + HEIGHT < layout.boxes[name].y
    assert len(layout.lines) == sum(map(len, reads.values()))
    for line in layout.lines:
        # A straight part of a line crosses a layer, and must not cross a box.
        for x, top, bottom in re.findall(r"([-\d.]+) ([-\d.]+)V([-\d.]+)", line):
            for box in boxes:
                if float(top) <= box.y < float(bottom):
                    assert not box.x < float(x) < box.x + box.width


def test_empty_graph_has_an_empty_layout() -> None:
    assert arrange({}, {}).boxes == {}
