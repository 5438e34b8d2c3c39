"""Moves an alias because someone says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from optexport.errors import OptexportError
from optexport.tracking import registry, store

T = TypeVar("T")


def promote(uri: str, name: str, version: str, alias: str) -> str | None:
    """Gives a version the alias; returns the version that held it before.

    Raises:
        ConfigError: There is no such version.
        TrackingError: The store cannot be reached, or refuses.
    """
    return _asked(uri, name, lambda client: registry.promote(client, name, version, alias))


def rollback(uri: str, name: str, alias: str) -> tuple[str, str]:
    """Gives the alias back; returns the version that lost it, and the one that has it.

    Raises:
        ConfigError: No version holds it, or none did before that is still there.
        TrackingError: The store cannot be reached, or refuses.
    """
    return _asked(uri, name, lambda client: registry.rollback(client, name, alias))


def _asked(uri: str, name: str, action: Callable[[Any], T]) -> T:
    where = "The alias stays where it was."
    try:
        client = store.open_store(uri, Path())
        registry.check_model(client, name)
        where = "Nothing says whether the alias moved: look."
        return action(client)
    except OptexportError:
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{where} Done again, it does what is left.")
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own
        raise store.failure(error, uri, f"{where} {store.when(error)}, do it again.") from error
