"""Renders the HTML pages and writes ``report.html`` into a bundle."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from optexport._utils import atomic_dir, signals
from optexport._utils.markup import size_in_words, times_as_fast
from optexport.bundle import digest_json, parts
from optexport.bundle.digests import sha256
from optexport.bundle.gate_limits import list_gate_limits
from optexport.bundle.layout import MANIFEST, MEASUREMENTS, REPORT
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import read_measured
from optexport.bundle.verdict import share_text
from optexport.config.metrics import round_for_gate
from optexport.errors import on_one_line, printable
from optexport.report.change_text import changed_text, short_target
from optexport.report.difference import Difference, cell_text
from optexport.report.html import changes, contents, plots, whole_graph
from optexport.report.html.changes import View
from optexport.report.html.graph_drawing import draw
from optexport.transformations.registry import RULES

_TEMPLATES = Path(__file__).with_name("templates")
_MAX_TEXT = 2_000
_MAX_CONFIG = 50_000
_NONE = "\N{EN DASH}"


def render(folder: Path, manifest: Manifest) -> str:
    """Returns the report of a bundle as one self-contained HTML document.

    Args:
        folder: The bundle; its measurements, graphs and config are read.
        manifest: Its manifest.

    Raises:
        BundleError: The measurements are damaged.
    """
    measured, has_config_file = read_measured(folder), (folder / "config.toml").is_file()
    return _environment().get_template("report.html.j2").render(
        manifest=manifest,
        measured=measured,
        verdict=contents.verdict(manifest),
        matrix=contents.matrix(manifest.parity),
        cases=contents.worst_of_cases(manifest.parity),
        case_names=contents.short_case_names(manifest.parity),
        changes=changes.read_changes(folder, manifest),
        whole_graphs=whole_graph.read_whole_graphs(folder, manifest),
        skipped=contents.skipped(manifest, measured),
        sizes=contents.sizes(manifest),
        first_figures=contents.first_figures(measured),
        gate_limits=list(list_gate_limits(manifest, measured.bench)),
        config=_config_text(folder, manifest),
        has_config_file=has_config_file,
        commands=contents.commands(manifest, has_config_file=has_config_file),
        parity_plot=plots.parity_plot(manifest.parity),
        node_error_plot=manifest.node_errors and plots.node_error_plot(manifest.node_errors),
        latency_plot=None if measured.bench is None else plots.latency_plot(measured.bench),
        speedup_plot=plots.ratio_plot(contents.speedups(measured), "speedup (95 % interval)", "speedup"),
        tuning_plot=plots.ratio_plot(contents.trials(measured), "speedup (95 % interval)", "tuning"),
    )  # fmt: skip


def render_difference(difference: Difference) -> str:
    """Returns the comparison of two bundles as one self-contained HTML document."""
    return _environment().get_template("difference.html.j2").render(difference=difference)


def write(folder: Path) -> None:
    """Writes or replaces a bundle's report, and its digest in the measurements.

    Raises:
        BundleError: The manifest or the measurements are damaged.
    """
    html = render(folder, Manifest.model_validate(digest_json.read(folder / MANIFEST)))
    measurements = digest_json.read(folder / MEASUREMENTS)
    del measurements["digest"]
    old_digest = sha256(folder / REPORT) if (folder / REPORT).is_file() else None
    # An interruption must not leave a report that contradicts its digest: between the two renames, the measurements
    # accept both the old and the new report.
    with signals.deferred(), atomic_dir.scratch(folder, parts.outermost(folder)) as draft:
        report, final, transitional = draft / REPORT, draft / MEASUREMENTS, draft / "both.json"
        report.write_text(html, encoding="utf-8")
        measurements["report_sha256"] = sha256(report)
        digest_json.write(final, measurements)
        digest_json.write(transitional, {**measurements, "report_sha256": [old_digest, measurements["report_sha256"]]})
        transitional.replace(folder / MEASUREMENTS)
        report.replace(folder / REPORT)
        final.replace(folder / MEASUREMENTS)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_make_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "bytes": size_in_words,
        "times_as_fast": times_as_fast,
        "cell_text": cell_text,
        "changed_text": changed_text,
        "short_target": short_target,
        "beside_minimum": _beside_minimum,
    }
    script = _TEMPLATES.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "style": Markup(_TEMPLATES.joinpath("page.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        "script": Markup(script),  # noqa: S704 - our own file
        "script_digest": Markup(digest),  # noqa: S704 - base64
        "draw": _draw,
        "source_name": contents.source_name,
        "trial_result": contents.trial_result,
        "rule_summaries": {name: info.summary for name, info in RULES.items()},
        "max_listed": changes.MAX_LISTED,
        "max_rows": contents.MAX_ROWS,
        "max_nodes": whole_graph.MAX_NODES,
    }
    return environment


def _draw(view: View) -> Markup:
    template = _environment().get_template("drawing.svg.j2")
    return Markup(template.render(drawing=draw(view)))  # noqa: S704 - the template escapes


def _make_visible(value: Any) -> Any:
    """Shortens a text, and escapes characters that could hide or reorder other text."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if len(value) > _MAX_TEXT:
        value = f"{value[:_MAX_TEXT]}… ({len(value) - _MAX_TEXT:,} characters more)"
    return on_one_line(value)


def _config_text(folder: Path, manifest: Manifest) -> Markup:
    """Returns the config file, or the resolved config of an export from Python."""
    path = folder / "config.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else json.dumps(manifest.config, indent=2)
    return escape(printable(text[:_MAX_CONFIG].replace("\t", "    ")))


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value + 0:.3g}"  # + 0 makes 0 of -0


def _beside_minimum(value: float | None, minimum: float) -> str:
    return _NONE if value is None else round_for_gate(value, minimum)


def _percent(share: float | None) -> str:
    return share_text(share) or _NONE
