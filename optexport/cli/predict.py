"""The command ``optexport predict``, which runs a bundle on texts and files."""

from __future__ import annotations

from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, print_json


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@click.argument("inputs", nargs=-1, metavar="[TEXT|IMAGE|SOUND]...")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='A .jsonl file with {"text": ...}, or with inputs by name, on each line.',
)
@click.option(
    *("--format", "file_format"),
    type=click.Choice(["onnx", "torchscript", "pt2"]),
    help="Which file to run; by default ONNX, or the first that there is.",
)
@json_option
def predict(bundle: Path, inputs: tuple[str, ...], data: Path | None, file_format: str | None, as_json: bool) -> None:
    """Run BUNDLE on texts, image files or WAV files.

    Says what its task calls for: labels with scores, fills for a mask, what was said, embeddings and how similar they
    are. Needs neither the original model nor its code.
    """
    if bool(inputs) == (data is not None):
        raise click.UsageError("give texts or files, or --data." if data is None else "give one, or --data.")
    from optexport.cli import prediction
    from optexport.inference import answers
    from optexport.inference.bundle import Bundle

    opened = Bundle.load(bundle, file_format)
    given = prediction.given_as_arguments(opened, inputs) if data is None else prediction.given_in_file(opened, data)
    found = prediction.predict(opened, given)
    table = answers.similarities(found)
    if as_json:
        print_json(
            {
                "task": opened.application.task,
                "format": opened.format,
                "results": [{"input": one.shown, **answer} for one, answer in zip(given, found, strict=True)],
                **({} if table is None else {"similarity": table}),
            }
        )
        return
    for one, answer in zip(given, found, strict=True):
        echo(one.shown)
        for line in answers.as_text(answer):
            echo(f"  {line}")
    for line in [] if table is None else answers.similarities_as_text(table):
        echo(line)
