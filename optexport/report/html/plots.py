"""Draws the plots of a report as reproducible inline SVG in the page's colors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from optexport._utils.plots import plot_file
from optexport.bundle.measurements import BenchRecord
from optexport.bundle.node_error_records import NodeErrorRecord, NodeErrorsRecord
from optexport.bundle.parity_records import ParityRecord
from optexport.errors import on_one_line

# Stand-ins for the CSS variables of the page, whose style sheet has values for light, dark and print.
_COLOURS = {"#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--line)", "#040404": "var(--accent)",
            "#050505": "var(--good)", "#060606": "var(--bad)", "#070707": "var(--card)"}  # fmt: skip
_INK, _MUTED, _LINE, _ACCENT, _GOOD, _BAD, _CARD = _COLOURS
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "optexport",
    "text.parse_math": False,  # a name may contain a dollar sign
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _INK,
    "xtick.minor.width": 0.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
_WIDTH = 4.9
_ROW = 0.24
# More rows would be unreadable; the tables have all of them.
_MAX_ROWS = 24
_MARKERS = "osD^vPX*<>"
_MAX_LABEL = 26
_MAX_MODULES = 20
# A module with more than this part of all points is divided into its submodules.
_DIVIDED_PARTS = 5


@dataclass(frozen=True)
class Interval:
    """A labeled ratio and its 95 % interval."""

    label: str
    value: float
    low: float
    high: float


def parity_plot(parity: ParityRecord) -> Markup | None:
    """Plots errors as multiples of the noise floor; returns None if all floors are zero."""
    outputs = [name for name, bound in parity.bounds.items() if bound.floor > 0][:_MAX_ROWS]
    targets = [target for target in parity.targets if target.precision is None]
    if not outputs or not targets:
        return None
    with _figure(len(outputs) * max(1, len(targets) / 3) + 2 + len(targets) / 2) as figure:
        axes = _axes(figure, outputs)
        axes.set_xscale("log")
        for row, name in enumerate(outputs):
            bound = parity.bounds[name]
            tolerance = bound.limit / bound.floor
            axes.plot([tolerance] * 2, [row - 0.4, row + 0.4], color=_BAD, linewidth=1.6, solid_capstyle="butt")
        axes.axvline(1, color=_MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        for index, target in enumerate(targets):
            offset = (index - (len(targets) - 1) / 2) * 0.8 / len(targets)
            multiples = {output.output: output.floor_ratio for output in target.outputs}
            points = [(multiple, row + offset) for row, name in enumerate(outputs)
                      if (multiple := multiples.get(name)) is not None and multiple > 0]  # fmt: skip
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                markersize=5,
                color=_INK if index == 0 else _ACCENT,
                markerfacecolor=_CARD if index % 2 == 0 else _INK if index == 0 else _ACCENT,
                label=_label(target.title),
            )
        axes.set_xlabel("error in noise floors (dashed: noise floor; bar: tolerance)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        figure.legend(loc="outside upper left", ncols=2, fontsize=8, handletextpad=0.1, columnspacing=1.0)
        return _inline(figure, "parity")


def latency_plot(bench: BenchRecord) -> Markup | None:
    """Plots the latency of each file, with a panel for each shape."""
    shapes = bench.shapes[: _MAX_ROWS // 3]
    if not shapes:
        return None
    rows = {shape: [row for row in bench.figures if row.shape == shape] for shape in shapes}
    counts = [len(records) for records in rows.values()]
    with _figure(sum(counts) + 2.4 * len(shapes)) as figure:
        panels = figure.subplots(len(shapes), squeeze=False, gridspec_kw={"height_ratios": [n + 1.2 for n in counts]})
        for (shape, records), (axes,) in zip(rows.items(), panels, strict=True):
            _prepare(axes, [record.artifact for record in records])
            axes.set_title(_label(shape), loc="left", fontsize=9, color=_INK)
            for row, record in enumerate(records):
                axes.plot([record.p50_ms, record.p99_ms], [row, row], color=_MUTED, linewidth=0.8)
                axes.plot([record.p90_ms], [row], color=_MUTED, marker="|", markersize=7)
                low, high = record.low_ms, record.high_ms
                if low is not None and high is not None:
                    axes.plot([low, high], [row, row], color=_ACCENT, linewidth=5, solid_capstyle="butt")
                axes.plot([record.p50_ms], [row], color=_INK, marker="o", markersize=4.5)
            axes.set_xlim(left=0)
        panels[-1][0].set_xlabel("ms per call")
        return _inline(figure, "latency")


def ratio_plot(rows: Sequence[Interval], label: str, name: str) -> Markup | None:
    """Plots ratios with their intervals around 1; returns None if there are none.

    Args:
        rows: Ratios to plot.
        label: Label of the axis.
        name: Prefix of the ids, unique within the page.
    """
    rows = rows[:_MAX_ROWS]
    if not rows:
        return None
    with _figure(len(rows) + 2) as figure:
        axes = _axes(figure, [row.label for row in rows])
        axes.axvline(1, color=_MUTED, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
        for y, row in enumerate(rows):
            colour = _GOOD if row.low > 1 else _BAD if row.high < 1 else _INK
            axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.4)
            axes.plot([row.low, row.high], [y, y], color=colour, linestyle="none", marker="|", markersize=6)
            axes.plot([row.value], [y], color=colour, marker="o", markersize=4.5)
        axes.set_xlabel(label)
        return _inline(figure, name)


def node_error_plot(errors: NodeErrorsRecord) -> Markup | None:
    """Plots the error of each node in the order of execution; returns None if all errors are zero."""
    points = errors.points
    if not any(error for point in points for error in point.errors):
        return None
    with _figure(11) as figure:
        axes = figure.add_subplot()
        for index, target in enumerate(errors.targets):
            drawn = [(x, error) for x, point in enumerate(points) if (error := point.errors[index])]
            axes.plot(
                [x for x, _ in drawn],
                [y for _, y in drawn],
                color=_INK if index == 0 else _ACCENT,
                linewidth=1.1,
                linestyle="-" if index < 2 else (0, (3, index)),
                marker=_MARKERS[index] if 0 < index < len(_MARKERS) else "",
                markersize=2.5,
                label=_label(target),
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(visible=True, axis="y", color=_LINE, linewidth=0.5, linestyle=(0, (1, 3)))
        axes.set_ylabel("relative error")
        starts = _module_starts(points)
        labels = [_label(name) for name, _ in starts]
        axes.set_xticks([position for _, position in starts], labels, rotation=45, ha="right", fontsize=7)
        axes.set_xlim(-0.5, len(points) - 0.5)
        figure.legend(loc="outside upper left", ncols=2, fontsize=8, columnspacing=1.0)
        return _with_titles(_inline(figure, "nodes"), figure, errors)


def _module_starts(points: Sequence[NodeErrorRecord]) -> list[tuple[str, int]]:
    """Returns modules and the indices of their first points, far enough apart to be read.

    Modules with many points are divided into their submodules.
    """
    starts: list[tuple[str, int]] = []
    modules = list(enumerate(point.module for point in points))
    for name, index in sorted(_divide(modules, 1, len(points) / _DIVIDED_PARTS), key=lambda start: start[1]):
        if not starts or index - starts[-1][1] >= len(points) / _MAX_MODULES:
            starts.append((name, index))
    return starts


def _divide(modules: Sequence[tuple[int, str]], depth: int, limit: float) -> Iterator[tuple[str, int]]:
    groups: dict[str, list[tuple[int, str]]] = {}
    for index, module in modules:
        groups.setdefault(_prefix(module, depth), []).append((index, module))
    for name, group in groups.items():
        if len(group) > limit and any(_prefix(module, depth + 1) != name for _, module in group):
            yield from _divide(group, depth + 1, limit)
        elif name:
            yield name, group[0][0]


def _prefix(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth])


def _with_titles(svg: Markup, figure: Figure, errors: NodeErrorsRecord) -> Markup:
    """Adds a text to each point that browsers show under the pointer."""
    box, strips = figure.axes[0].get_position(), []
    width, height = (72 * size for size in figure.get_size_inches())
    step = width * box.width / len(errors.points)
    for index, point in enumerate(errors.points):
        pairs = zip(errors.targets, point.errors, strict=True)
        values = [f"{target} {'not computed' if error is None else f'{error:.2g}'}" for target, error in pairs]
        text = on_one_line(f"{point.module or 'the model'}, {point.node}: {', '.join(values)}")
        strips.append(
            f'<rect x="{width * box.x0 + index * step:.1f}" y="{height * (1 - box.y1):.1f}" width="{step:.1f}" '
            f'height="{height * box.height:.1f}" fill="transparent"><title>{escape(text)}</title></rect>'
        )
    return Markup(f"{svg.rpartition('</svg>')[0]}{''.join(strips)}</svg>")  # noqa: S704 - texts are escaped


@contextmanager
def _figure(rows: float) -> Iterator[Figure]:
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(_WIDTH, 0.35 + _ROW * rows), layout="constrained")


def _axes(figure: Figure, rows: Sequence[str]) -> Axes:
    axes = figure.add_subplot()
    _prepare(axes, rows)
    return axes


def _prepare(axes: Axes, rows: Sequence[str]) -> None:
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=True, axis="y", color=_LINE, linewidth=0.5, linestyle=(0, (1, 3)))
    axes.set_axisbelow(True)


def _label(text: str) -> str:
    text = on_one_line(text)
    return text if len(text) <= _MAX_LABEL else f"{text[:12]}…{text[-13:]}"


def _inline(figure: Figure, name: str) -> Markup:
    """Returns the SVG with ids and colors of the page, hidden from screen readers.

    Matplotlib escapes labels. A table next to the plot has the same numbers.
    """
    no_metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    svg = plot_file(figure, "svg", metadata=no_metadata).decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)  # a style would apply to the whole page
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>plot-{name}-", svg)
    for stand_in, colour in _COLOURS.items():
        svg = svg.replace(stand_in, colour)
    width, height = (72 * size for size in figure.get_size_inches())
    head = f'<svg class="plot" viewBox="0 0 {width:g} {height:g}" aria-hidden="true" focusable="false">'
    return Markup(re.sub(r"<svg\b[^>]*>", head, svg, count=1))  # noqa: S704 - written by matplotlib, which escapes
