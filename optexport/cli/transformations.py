"""The command ``optexport transformations``, which lists the rules."""

from __future__ import annotations

import json
from typing import Any

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, print_json


@click.command(cls=Command, examples=["optexport transformations", "optexport transformations --json"])
@json_option
def transformations(as_json: bool) -> None:
    """List the rules that a config can apply.

    Use this to choose the rules of [[transformations]]. It lists the built-in rules with their options and defaults,
    and the rules of installed packages. A rule is marked "preset" if it is applied when a config names no rules.
    """
    if as_json:
        print_json(_rules())
    else:
        echo(_rules_text())


def _rules() -> dict[str, Any]:
    """Returns the built-in rules by name, and the locations of plugins."""
    from optexport.transformations.registry import RULES, installed

    built_in = {
        name: {
            "summary": info.summary,
            "reversible": info.reversible,
            "preserves_computation": info.preserves_computation,
            "in_preset": info.in_preset,
            "options": {key: {"default": o.default, "summary": o.summary} for key, o in info.options.items()},
        }
        for name, info in RULES.items()
    }
    return built_in | {name: {"plugin": location} for name, location in installed().items()}


def _rules_text() -> str:
    """Returns one line for each rule."""
    from optexport.transformations.registry import RULES, installed

    width = max(map(len, [*RULES, *installed()]))
    lines = []
    for name, info in RULES.items():
        traits = [
            "reversible" if info.reversible else "not reversible",
            "preserving" if info.preserves_computation else "not preserving",
            *(["preset"] if info.in_preset else []),
            *(f"{key} = {json.dumps(option.default)}" for key, option in info.options.items()),
        ]
        lines.append(f"{name:{width}}  {info.summary} ({', '.join(traits)})")
    lines += [f"{name:{width}}  plugin ({location})" for name, location in installed().items()]
    return "\n".join(lines)
