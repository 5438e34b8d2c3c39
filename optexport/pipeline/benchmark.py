"""Measures bundles and files, and compares them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport.bench import run
from optexport.bench.report import Report
from optexport.bench.turns import Settings
from optexport.config.benchmarks import BenchConfig
from optexport.config.validation import explain_errors
from optexport.errors import ConfigError, did_you_mean
from optexport.exporters import registry
from optexport.pipeline.api_arguments import as_list, as_texts
from optexport.report.progress import show_progress

_Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_MAX_SECONDS = 3600


def benchmark(  # noqa: PLR0913 - options of the public API
    paths: _Paths,
    *,
    against: _Paths = (),
    shapes: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
    threads: int = 1,
    rounds: int = 20,
    seconds: float = 0.1,
    formats: str | Sequence[str] = (),
    inputs: str | os.PathLike[str] | None = None,
    progress: bool | Progress | None = None,
) -> Report:
    """Measures the latency of files and compares them, like ``optexport bench``.

    Args:
        paths: A bundle or a file such as ``model.onnx``, or several.
        against: Bundles and files to compare with; by default, files are compared with the first one of their format,
            and the first ones of the formats with the first file.
        shapes: The sizes of the dynamic axes, as ``{"batch": 8}``, or several such; by default those of the trace.
        threads: The threads of each file, as ``bench.threads`` in a config.
        rounds: The turns of each file. Fewer than 12 give no verdict.
        seconds: The length of one turn.
        formats: The formats to measure; by default all.
        inputs: A safetensors file with the inputs by name; by default those of the first bundle, or random inputs for
            an ONNX file.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Returns:
        The figures and comparisons; ``summary()`` is the text of the command.

    Raises:
        ConfigError: An argument is invalid, or a path does not exist.
        BundleError: A bundle was changed.
        BenchError: A file cannot run.
    """
    sizes = [shapes] if isinstance(shapes, Mapping) else as_list(shapes)
    table = {"shapes": sizes, "threads": threads, "rounds": rounds}
    try:
        config = BenchConfig.model_validate(table)
    except ValidationError as error:
        raise explain_errors(error, BenchConfig, "benchmark") from error
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _MAX_SECONDS:
        message = f"expected a number from 0 to {_MAX_SECONDS}, found {seconds!r}"
        raise ConfigError(message, location="benchmark: seconds")
    settings = Settings(config.threads, config.rounds, seconds)
    names = as_texts(formats, "benchmark: formats")
    for name in names:
        if not registry.is_format(name):
            hint = did_you_mean(name, registry.list_formats())
            raise ConfigError(f'unknown format "{name}"', location="benchmark: formats", hint=hint)
    inputs_file = None if inputs is None else as_path(inputs, "inputs")
    with show_progress(progress) as shown, contextlib.ExitStack() as step:

        def announce(text: str) -> None:
            step.close()
            step.enter_context(shown.step(text))

        measured, baselines = _as_paths(paths, "paths"), _as_paths(against, "against")
        return run.bench(measured, baselines, config.shapes, settings, names, inputs_file, announce)


def _as_paths(value: _Paths, name: str) -> list[Path]:
    """Converts a path, or several, and checks that they exist."""
    items = as_list(value)
    paths = [as_path(path, name) for path in (items if isinstance(items, list) else [items])]
    for path in paths:
        if not path.exists():
            raise ConfigError("the path does not exist", location=f"{name}: {path}", hint="Give a bundle or a file.")
    if not paths and name == "paths":
        raise ConfigError("there is nothing to measure", location=name, hint="Give a bundle or a file.")
    return paths
