"""The command ``optexport bench``, which compares the speed of exported files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import click

from optexport.cli._console import console
from optexport.cli._format_option import check_formats
from optexport.cli._group import Command, json_option, print_json
from optexport.cli._option_names import name_options_in_text
from optexport.errors import ConfigError


def _sizes(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[dict[str, int]]:  # noqa: ARG001
    """Parses a shape such as ``batch=8,sequence=128``."""
    shapes = []
    for text in values:
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            if not name or name in sizes or not re.fullmatch("[0-9]{1,10}", size) or not 1 <= int(size) < 2**31:
                raise click.BadParameter(
                    f'"{text}" does not have the form NAME=SIZE,..., such as batch=8,sequence=128.'
                )
            sizes[name] = int(size)
        shapes.append(sizes)
    return shapes


def _finite(context: click.Context, option: click.Parameter, value: float) -> float:  # noqa: ARG001
    """Rejects NaN, which click accepts in every range."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds.")
    return value


_PATH = click.Path(path_type=Path, exists=True)


@click.command(
    cls=Command,
    examples=[
        "optexport bench build/my-model --shape batch=8,sequence=128",
        "optexport bench build/my-model --against build/other",
    ],
)
@click.argument("paths", nargs=-1, required=True, type=_PATH, metavar="BUNDLE|FILE...")
@click.option(
    "--against", multiple=True, type=_PATH, metavar="BUNDLE|FILE", help="Compare with these files. May be repeated."
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    callback=_sizes,
    metavar="NAME=SIZE,...",
    help="Sizes of the dynamic axes, such as batch=8,sequence=128 (default for a bundle: as traced). May be repeated.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    default=1,
    show_default=True,
    help="Threads of each file, as bench.threads in a config.",
)
@click.option(
    "--rounds", type=click.IntRange(1, 10000), metavar="N", default=20, show_default=True, help="Turns of each file."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    metavar="S",
    default=0.1,
    show_default=True,
    callback=_finite,
    help="Length of one turn.",
)
@click.option(
    *("--format", "formats"),
    multiple=True,
    callback=check_formats,
    metavar="FORMAT",
    help="Measure only files of this format, such as onnx. May be repeated.",
)
@click.option(
    "--inputs",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A safetensors file with the inputs by name.",
)
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write the result to this JSON file."
)
@json_option
def bench(
    paths: tuple[Path, ...],
    against: tuple[Path, ...],
    shapes: list[dict[str, int]],
    threads: int,
    rounds: int,
    seconds: float,
    formats: tuple[str, ...],
    inputs: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the latency of files and compare them.

    Use this to choose between formats, rules or runtimes. It measures bundles and single files, such as
    model.onnx. The files take turns, each in its own process, so that other load on the machine affects all alike.

    Every file is compared with the files of --against. Without it, files of the same format are compared with the first
    of them, and other formats with the first file of all. If the times vary too much, the verdict is "inconclusive".

    Files have one thread by default, as in the comparison with PyTorch at the end of a run. A bundle has no code of the
    original model, so eager PyTorch is only measured in a run, with [bench].
    """
    from optexport._utils.platform import machine
    from optexport.bench import report, run
    from optexport.pipeline.benchmark import benchmark

    if output is not None and not output.parent.is_dir():
        raise click.UsageError(f"cannot write {output.name}: the folder {output.parent} does not exist.")
    if output is not None:
        run.check_output(output, [*paths, *against])
    result = benchmark(
        paths,
        against=against,
        shapes=shapes,
        threads=threads,
        rounds=rounds,
        seconds=seconds,
        formats=formats,
        inputs=inputs,
        progress=True,
    )
    result = replace(result, notes=tuple(map(name_options_in_text, result.notes)))
    document = {"machine": machine(), **report.as_json(result)}
    if output is not None:
        try:
            output.write_text(f"{json.dumps(document, indent=2)}\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the file: {error}", location=str(output)) from error
    if as_json:
        print_json(document)
    else:
        report.show(result, console())
