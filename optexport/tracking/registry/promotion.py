"""Promotion and rollback of an alias at a user's request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.config.registration import model_name
from optexport.errors import ConfigError, OptexportError
from optexport.tracking import store
from optexport.tracking.registry import aliases
from optexport.tracking.registry import registration as registry


@dataclass
class _Standing:
    """State of the alias and the next step, for the message of an interrupted command."""

    alias: str = "The alias stays where it was."
    again: str = "do it again."


def promote(uri: str, name: str, version: str, alias: str) -> str | None:
    """Moves the alias to a version and returns the previous holder, or None.

    Raises:
        ConfigError: The model or the version does not exist.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with _asking(uri, name) as (client, _):
        return registry.promote(client, name, version, alias)


def rollback(uri: str, name: str, alias: str) -> tuple[str, str]:
    """Moves the alias back to its previous holder and returns the old and new holder.

    Raises:
        ConfigError: No version holds the alias, or no earlier holder exists.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with _asking(uri, name) as (client, standing):
        before, after = registry.rollback(client, name, alias)
        # If the next answer is lost, the record of the rollback may be gone. A second rollback would then go too far.
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
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own errors
        raise store.failure(error, uri, f"{standing.alias} {store.when(error)}, {standing.again}") from error
