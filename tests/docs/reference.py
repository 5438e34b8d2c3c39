"""Writes the parts of the reference pages that come from the program: commands, config keys, rules, public names."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

import optexport
from optexport.config.json_schema import config_schema
from optexport.exporters.registry import all_passes
from optexport.transformations.registry import RULES


def render(kind: str, *arguments: str) -> str:
    """Returns a part of a page.

    Args:
        kind: overview, commands, config, names, errors, rules or passes.
        arguments: The table of a config, or the module of names.
    """
    from optexport.cli.main import cli

    parts: dict[str, Callable[..., str]] = {
        "overview": lambda: overview(cli, "optexport"),
        "commands": lambda: commands(cli, "optexport"),
        "config": config_table,
        "names": public_names,
        "errors": errors,
        "rules": rules,
        "passes": passes,
    }
    return parts[kind](*arguments)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (header, *rows))
    return "".join(f"{line}\n" for line in (f"| {first} |", f"|{'---|' * len(header)}", *(f"| {o} |" for o in others)))


def overview(group: click.Group, program: str) -> str:
    """Returns a table of the commands of a group, with links to their sections."""
    names = sorted(group.commands)
    links = (f"[`{program} {name}`](#{program}-{name})" for name in names)
    return _table(
        ("command", "purpose"),
        zip(links, (group.commands[name].get_short_help_str(200) for name in names), strict=True),
    )


def commands(group: click.Group, program: str) -> str:
    """Returns a section for each command of a group: its usage, its help and its options."""
    root = click.Context(group, info_name=program)
    shared = {name for param in group.get_params(root) for name in param.opts}
    return "\n".join(_command(name, group.commands[name], root, shared) for name in sorted(group.commands))


def _command(name: str, command: click.Command, parent: click.Context, shared: set[str]) -> str:
    context = click.Context(command, parent=parent, info_name=name)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"### {context.command_path}\n", f"```text\n{usage}\n```\n", _help(command.help or "")]
    options = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    own = [option for option in options if not shared & set(option.opts)]
    records = [record for option in own if (record := option.get_help_record(context))]
    if records:
        parts.append(_table(("option", "effect"), ((f"`{names}`", text) for names, text in records)))
    if isinstance(command, click.Group):
        parts += [_command(child, command.commands[child], context, shared) for child in sorted(command.commands)]
    return "\n".join(parts)


def _help(text: str) -> str:
    """Returns the help of a command as Markdown. A backspace at the start of a paragraph keeps its line breaks."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    kept = (
        f"```text\n{part.removeprefix(chr(8)).strip(chr(10))}\n```" if part[:1] == chr(8) else part
        for part in paragraphs
    )
    return "\n\n".join(kept) + "\n"


def config_table(name: str) -> str:
    """Returns the keys of a table of the config, and of the tables in it, from the JSON schema."""
    schema = config_schema()
    rows = list(_keys(schema["properties"][name], "", schema["$defs"]))
    summary = schema["properties"][name]["description"].partition(": ")[2]
    return f"{summary[:1].upper()}{summary[1:]}\n\n{_table(('key', 'type', 'default', 'meaning'), rows)}"


def _keys(value: dict[str, Any], prefix: str, tables: dict[str, Any]) -> Iterator[list[str]]:
    table = _find_table(value, tables)
    for key, property_ in table["properties"].items():
        if "const" in property_ or property_ is True:
            continue
        default = "required" if key in table.get("required", ()) else _default(property_.get("default"))
        yield [f"`{prefix}{key}`", _type(property_, tables), default, property_["description"]]
        if (nested := _find_name(property_)) and nested != "FormatLimits":
            name = ".NAME" if "additionalProperties" in json.dumps(property_) else ""
            yield from _keys({"$ref": f"#/$defs/{nested}"}, f"{prefix}{key}{name}.", tables)


def _find_name(value: dict[str, Any]) -> str | None:
    """Returns the name of the table that a property is or contains; None if it has none."""
    names = re.findall(r"#/\$defs/(\w+)", json.dumps(value))
    return names[0] if names else None


def _find_table(value: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = tables[_find_name(value) or ""]
    return table


def _default(value: Any) -> str:
    if value in (None, [], {}) or isinstance(value, dict):
        return ""
    return f"`{json.dumps(value)}`"


def _type(value: dict[str, Any], tables: dict[str, Any]) -> str:
    """Returns the type of a property in words."""
    if "anyOf" in value:
        kinds = dict.fromkeys(_type(kind, tables) for kind in value["anyOf"] if kind != {"type": "null"})
        return " or ".join(kind for kind in kinds if "text" not in kinds or "`" not in kind)
    if "enum" in value or "const" in value:
        return ", ".join(f"`{json.dumps(item)}`" for item in value.get("enum", [value.get("const")]))
    if "$ref" in value:
        return "table"
    kind = value.get("type", "any")
    if kind == "array":
        return f"list of {_type(value['items'], tables)}".replace("of text", "of texts") if "items" in value else "list"
    if kind == "object":
        inner = value.get("additionalProperties")
        words = _type(inner, tables) if isinstance(inner, dict) and inner else ""
        return f"table of {words}s" if words in ("number", "whole number") else "table"
    words = {"string": "text", "integer": "whole number", "boolean": "true or false"}.get(kind, kind)
    smallest, largest = value.get("minimum"), value.get("maximum", 2**31)
    return f"{words}, {smallest} to {largest}" if smallest is not None and largest < 10**5 else words


def rules() -> str:
    """Returns a table of the built-in rules."""
    rows = (
        [
            f"`{name}`",
            info.summary,
            "yes" if info.in_preset else "",
            "yes" if info.reversible else "",
            ", ".join(f"`{key}`" for key in info.options),
        ]
        for name, info in RULES.items()
    )
    return _table(("rule", "effect", "preset", "can be undone", "options"), rows)


def passes() -> str:
    """Returns a table of the format passes."""
    rows = ([f"`{entry.name}`", entry.summary, ", ".join(formats)] for entry, formats in all_passes())
    return _table(("pass", "effect", "formats"), rows)


def _summary(value: object) -> str:
    first, *_ = (inspect.getdoc(value) or "").replace("``", "`").split("\n\n")
    return " ".join(first.split())


def public_names(module: str) -> str:
    """Returns a table of the public names of a module, without its errors."""
    package = importlib.import_module(module)
    values = {name: getattr(package, name) for name in package.__all__ if not name.startswith("__")}
    others = ((f"`{name}`", _summary(value)) for name, value in values.items() if not _is_error(value))
    return _table(("name", "purpose"), others)


def errors() -> str:
    """Returns a table of the error classes with their exit codes."""
    classes = [getattr(optexport, name) for name in optexport.__all__ if _is_error(getattr(optexport, name))]
    rows = sorted((str(error.exit_code), f"`{error.__name__}`", _summary(error)) for error in classes)
    return _table(("exit code", "class", "meaning"), rows)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)
