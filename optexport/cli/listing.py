"""Lists the rules and format passes that a config can use, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

from optexport.config.format_passes import PASSES
from optexport.transformations.registry import RULES, installed


def rules() -> dict[str, Any]:
    """Returns the built-in rules by name, and the locations of plugins."""
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


def rules_as_text() -> str:
    """Returns one line for each rule."""
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


def passes() -> dict[str, Any]:
    """Returns the format passes by name."""
    return {known.name: {"summary": known.summary, "formats": list(known.formats)} for known in PASSES}


def passes_as_text() -> str:
    """Returns one line for each format pass."""
    width = max(len(known.name) for known in PASSES)
    return "\n".join(f"{known.name:{width}}  {known.summary} ({', '.join(known.formats)})" for known in PASSES)
