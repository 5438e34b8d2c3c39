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
    return _asked(uri, lambda client: registry.promote(client, name, version, alias))


def rollback(uri: str, name: str, alias: str) -> tuple[str, str]:
    """Gives the alias back; returns the version that lost it, and the one that has it.

    Raises:
        ConfigError: No version holds it, or none did before that is still there.
        TrackingError: The store cannot be reached, or refuses.
    """
    return _asked(uri, lambda client: registry.rollback(client, name, alias))


def _asked(uri: str, action: Callable[[Any], T]) -> T:
    try:
        return action(store.open_store(uri, Path()))
    except OptexportError:
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own
        raise store.failure(error, uri, "Nothing says whether the alias moved: look, and do it again.") from error
