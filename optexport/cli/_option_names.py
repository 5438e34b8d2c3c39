"""Names options in locations and hints of the engine, which names arguments of Python functions instead.

The engine writes an argument as `` `shapes` `` or, with a value, `` `without=merge-linears` ``.
"""

from __future__ import annotations

import re

import click
from click.core import ParameterSource

from optexport._utils.custom_code import VARIABLE
from optexport.errors import OptexportError

_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")
# A location that is one argument; its value may contain backquotes, as MLflow's filters do.
_LOCATION = re.compile(r"`(\w+)=(.*)`", re.DOTALL)
# What a user of Python does, and the option of a command for it.
_PHRASES = {"See the traceback": "See the traceback (--debug)", "bundle(**inputs)": "--data FILE"}


def name_options(error: OptexportError) -> None:
    """Replaces arguments of Python functions in an error by the options of the current command."""
    error.hint = error.hint and name_options_in_text(error.hint)
    if error.location is not None:
        pattern = _LOCATION if _LOCATION.fullmatch(error.location) else _ARGUMENT
        error.location = name_options_in_text(error.location, pattern)
    error.args = (str(error),)


def name_options_in_text(text: str, pattern: re.Pattern[str] = _ARGUMENT) -> str:
    """Replaces arguments of Python functions in a text by the options of the current command."""
    context = click.get_current_context()
    if context.get_parameter_source("no_custom_code") is ParameterSource.COMMANDLINE:
        text = text.replace(VARIABLE, "--no-custom-code")
    for phrase, option in _PHRASES.items():
        text = re.sub(rf"{re.escape(phrase)}(?! \()", option, text)
    options = {option.name: option.opts[0] for option in context.command.params if isinstance(option, click.Option)}

    def as_option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name == "without" and value and name not in options:  # a hint of diagnose, to run the config again
            return f"optexport run --without {value}"
        if name not in options:
            return match[0]
        return options[name] if value is None else f"{options[name]} {value}"

    return pattern.sub(as_option, text)
