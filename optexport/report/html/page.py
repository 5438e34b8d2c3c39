"""Writes the pages: `report.html` of a bundle, and two bundles side by side."""

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
from optexport.bench.report import size_in_words
from optexport.bundle import digest_json
from optexport.bundle.digests import sha256
from optexport.bundle.layout import MANIFEST, MEASUREMENTS, REPORT
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import read_measured
from optexport.config.metrics import beside_gate
from optexport.errors import on_one_line, printable
from optexport.report.html import changes, contents, figures
from optexport.report.html.changes import View
from optexport.report.html.difference import Difference, shown
from optexport.report.html.drawing import draw

_FOLDER = Path(__file__).with_name("templates")
_LONGEST = 2_000
_NONE = "\N{EN DASH}"
_LONGEST_CONFIG = 50_000


def render(folder: Path, manifest: Manifest) -> str:
    """The report of a bundle, as one HTML document that needs nothing else.

    Args:
        folder: The bundle, of which the measurements and the graphs are read.
    """
    measured, from_file = read_measured(folder), (folder / "config.toml").is_file()
    return _environment().get_template("report.html.j2").render(
        manifest=manifest,
        measured=measured,
        verdict=contents.verdict(manifest),
        matrix=contents.matrix(manifest.parity),
        cases=contents.worst_of_cases(manifest.parity),
        batches=contents.shown_batches(manifest.parity),
        changes=changes.read_changes(folder, manifest),
        skipped=contents.skipped(manifest, measured),
        sizes=contents.sizes(manifest),
        config=_config(folder, manifest),
        from_file=from_file,
        commands=contents.commands(manifest, from_file=from_file),
        parity_plot=figures.parity_plot(manifest.parity),
        latency_plot=None if measured.bench is None else figures.latency_plot(measured.bench),
        speedup_plot=figures.ratio_plot(contents.speedups(measured), "times as fast (95 % interval)", "speedup"),
        tuning_plot=figures.ratio_plot(
            contents.trials(measured), "times as fast (95 % interval)", "tuning"
        ),
    )  # fmt: skip


def render_difference(difference: Difference) -> str:
    """Two bundles side by side, as one HTML document that needs nothing else."""
    return _environment().get_template("difference.html.j2").render(difference=difference)


def write(folder: Path) -> None:
    """Writes a bundle's report into it, in place of an earlier one; the measurements then hold its digest.

    Raises:
        BundleError: The manifest or the measurements are damaged.
    """
    html = render(folder, Manifest.model_validate(digest_json.read(folder / MANIFEST)))
    measurements = digest_json.read(folder / MEASUREMENTS)
    del measurements["digest"]
    before = sha256(folder / REPORT) if (folder / REPORT).is_file() else None
    # Each takes its place when it is whole: a bundle whose measurements are cut short is lost. In between these are of
    # both reports.
    with signals.deferred(), atomic_dir.scratch(folder) as draft:
        written, measured, both = draft / REPORT, draft / MEASUREMENTS, draft / "both.json"
        written.write_text(html, encoding="utf-8")
        measurements["report_sha256"] = sha256(written)
        digest_json.write(measured, measurements)
        digest_json.write(both, {**measurements, "report_sha256": [before, measurements["report_sha256"]]})
        both.replace(folder / MEASUREMENTS)
        written.replace(folder / REPORT)
        measured.replace(folder / MEASUREMENTS)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "percent": _percent,
        "bytes": size_in_words,
        "shown": shown,
        "beside": _beside,
    }
    script = _FOLDER.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "style": Markup(_FOLDER.joinpath("page.css").read_text(encoding="utf-8")),  # noqa: S704 - a file of ours
        "script": Markup(script),  # noqa: S704 - a file of ours
        "script_digest": Markup(digest),  # noqa: S704 - base64
        "draw": _draw,
        "named": contents.named,
        "trial_told": contents.trial_told,
        "most_listed": changes.MOST_LISTED,
        "most_rows": contents.MOST_ROWS,
    }
    return environment


def _draw(view: View) -> Markup:
    return Markup(_environment().get_template("drawing.svg.j2").render(drawing=draw(view)))  # noqa: S704 - a template's


def _visible(value: Any) -> Any:
    """A text of a model or a config as it can be shown: nothing in it turns the text around it, hides or ends it."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    if len(value) > _LONGEST:
        value = f"{value[:_LONGEST]}… ({len(value) - _LONGEST:,} characters more)"
    return on_one_line(value)


def _config(folder: Path, manifest: Manifest) -> Markup:
    """The config as it was given, or as it was resolved of a run from Python; its lines stay lines."""
    path = folder / "config.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else json.dumps(manifest.config, indent=2)
    return escape(printable(text[:_LONGEST_CONFIG].replace("\t", "    ")))


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"


def _beside(value: float | None, least: float) -> str:
    return _NONE if value is None else beside_gate(value, least)


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}" if value < 10 else f"{value:.3g} times"
