"""Moves an alias because someone says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.config.registration import model_name
from optexport.errors import ConfigError, OptexportError
from optexport.tracking import aliases, registry, store


@dataclass
class _Standing:
    """What is told where a command does not come to its end: where the alias is, and what completes it."""

    alias: str = "The alias stays where it was."
    again: str = "do it again."


def promote(uri: str, name: str, version: str, alias: str) -> str | None:
    """Gives a version the alias; returns the version that held it before.

    Raises:
        ConfigError: There is no such model or version.
        TrackingError: The store cannot be reached, or refuses.
    """
    with _asking(uri, name) as (client, _):
        return registry.promote(client, name, version, alias)


def rollback(uri: str, name: str, alias: str) -> tuple[str, str]:
    """Gives the alias back; returns the version that lost it, and the one that has it.

    Raises:
        ConfigError: No version holds it, or none did before that is still there.
        TrackingError: The store cannot be reached, or refuses.
    """
    with _asking(uri, name) as (client, standing):
        before, after = registry.rollback(client, name, alias)
        # Whether the last answer was lost nobody knows, and another rollback could be one too many.
        standing.alias = f"Version {after} holds {alias}."
        standing.again = f"complete it, not with another rollback:\n  {registry.promoting(name, after, alias, uri)}"
        aliases.end_rollback(client, name, alias)
        return before, after


@contextmanager
def _asking(uri: str, name: str) -> Iterator[tuple[Any, _Standing]]:
    try:
        model_name(name)
    except ValueError as error:
        raise ConfigError(str(error), location="NAME") from error
    store.check_not_new(uri, Path())
    standing = _Standing()
    try:
        client = store.open_store(uri, Path())
        aliases.model_of(client, name)
        standing.alias = "Nothing says whether the alias moved: look."
        yield client, standing
    except OptexportError:
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{standing.alias} To have it done, {standing.again}")
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own
        raise store.failure(error, uri, f"{standing.alias} {store.when(error)}, {standing.again}") from error
