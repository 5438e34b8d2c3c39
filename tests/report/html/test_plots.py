"""Tests of the plots of a report."""

from __future__ import annotations

import pytest

from optexport.bundle.measurements import BenchRecord
from optexport.bundle.node_error_records import NodeErrorRecord, NodeErrorsRecord
from optexport.bundle.parity_records import ParityRecord
from optexport.report.html import plots
from optexport.report.html.plots import Interval
from tests._helpers import exports
from tests.report.html import bundles
from tests.report.html.reading import Page

BENCH = BenchRecord.model_validate(bundles.BENCH)


@pytest.fixture
def proof() -> ParityRecord:
    return exports.exported().manifest.parity


def node_errors(*errors: list[float | None], module: str = "layer") -> NodeErrorsRecord:
    points = [NodeErrorRecord(position=i, node=f"node_{i}", module=f"{module}.{i}", errors=e)
              for i, e in enumerate(errors)]  # fmt: skip
    return NodeErrorsRecord(targets=["original", "graph"], points=points)


def test_plots_are_reproducible_and_use_page_colours(proof: ParityRecord) -> None:
    for plot in (
        lambda: plots.parity_plot(proof),
        lambda: plots.latency_plot(BENCH),
        lambda: plots.ratio_plot([Interval("onnx", 1.2, 1.1, 1.3)], "times", "ratio"),
        lambda: plots.node_error_plot(node_errors([1e-7, 2e-7], [3e-7, None])),
    ):
        assert plot() == plot()
        assert "var(--accent)" in plot() or "var(--good)" in plot()
        assert "#0" not in plot()
        assert Page(f"<body>{plot()}</body>").wrong == []


def test_no_data_gives_no_plot(proof: ParityRecord) -> None:
    exact = {name: bound.model_copy(update={"floor": 0.0}) for name, bound in proof.bounds.items()}
    assert plots.parity_plot(proof.model_copy(update={"bounds": exact})) is None
    assert plots.latency_plot(BENCH.model_copy(update={"figures": []})) is None
    assert plots.ratio_plot([], "times", "ratio") is None
    assert plots.node_error_plot(node_errors()) is None
    assert plots.node_error_plot(node_errors([0.0, None])) is None


def test_points_of_the_node_errors_name_module_node_and_errors() -> None:
    plot = plots.node_error_plot(node_errors([1.5e-7, None], [0.0, 2e-7], module="<b>$x$"))
    assert plot is not None
    titles = [e.text for e in Page(f"<body>{plot}</body>").all("title")]
    assert titles == [
        "<b>$x$.0, node_0: original 1.5e-07, graph not computed",
        "<b>$x$.1, node_1: original 0, graph 2e-07",
    ]


def test_the_axis_of_node_errors_names_modules_of_about_equal_size() -> None:
    layers = [f"encoder.layer.{layer}.{part}" for layer in range(6) for part in ("attention", "dense", "norm")]
    points = [NodeErrorRecord(position=i, node=f"n{i}", module=module, errors=[1e-7])
              for i, module in enumerate(["embeddings", *layers, "pooler"])]  # fmt: skip
    assert plots._module_starts(points) == [
        ("embeddings", 0),
        *((f"encoder.layer.{layer}", 1 + 3 * layer) for layer in range(6)),
        ("pooler", 19),
    ]
    many = [NodeErrorRecord(position=i, node=f"n{i}", module=f"layer.{i}", errors=[1e-7]) for i in range(200)]
    assert len(plots._module_starts(many)) <= 20


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "$\\frac{1}{0}$", "\u202e\x00", "%s {x:g}", ""])
def test_labels_are_shown_literally(name: str) -> None:
    plot = plots.ratio_plot([Interval(name, 1.2, 1.1, 1.3)], "times", "ratio")
    assert plot is not None
    read = Page(f"<body>{plot}</body>")
    assert {e.tag for e in read.elements}.isdisjoint({"script"})
    shown = name.replace("\u202e\x00", "\\u202e\\x00")
    assert shown in read.text


@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks_give_no_warning() -> None:
    assert "分类" in plots.ratio_plot([Interval("分类", 1.2, 1.1, 1.3)], "times", "ratio")


def test_plots_of_a_page_have_unique_ids() -> None:
    drawn = [plots.ratio_plot([Interval("a", 1, 0.9, 1.1)], "times", name) for name in ("one", "two")]
    ids = [e.attributes["id"] for plot in drawn for e in Page(f"<body>{plot}</body>").elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
