"""Drawings: no two boxes overlap, all data flows downwards, and lines go around boxes."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from optexport.report.html.layout import HEIGHT, arrange


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, float], dict[str, list[str]]]:
    count = draw(st.integers(1, 14))
    widths = {f"n{i}": draw(st.floats(20, 220)) for i in range(count)}
    reads = {
        f"n{i}": sorted(draw(st.sets(st.sampled_from([f"n{j}" for j in range(i)]), max_size=4))) if i else []
        for i in range(count)
    }
    return widths, reads


@settings(max_examples=80)
@given(graphs())
def test_boxes_are_apart_and_everything_flows_down(graph: tuple[dict[str, float], dict[str, list[str]]]) -> None:
    widths, reads = graph
    found = arrange(widths, reads)
    boxes = list(found.boxes.values())
    for box in boxes:
        assert box.x >= -0.1
        assert box.x + box.width <= found.width + 0.1
        assert 0 <= box.y <= found.height - HEIGHT
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            if one.y == other.y:
                assert one.x + one.width < other.x or other.x + other.width < one.x
    for name, sources in reads.items():
        for source in sources:
            assert found.boxes[source].y + HEIGHT < found.boxes[name].y
    assert len(found.lines) == sum(map(len, reads.values()))
    for line in found.lines:
        # Where a line goes straight down it passes a layer, and no box of it.
        for x, top, bottom in re.findall(r"([-\d.]+) ([-\d.]+)V([-\d.]+)", line):
            for box in boxes:
                if float(top) <= box.y < float(bottom):
                    assert not box.x < float(x) < box.x + box.width


def test_nothing_is_drawn_of_nothing() -> None:
    assert arrange({}, {}).boxes == {}
