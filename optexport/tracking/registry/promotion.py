"""Promotion and rollback of an alias at a user's request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.config.registration import DEFAULT_ALIAS, alias_name, model_name
from optexport.config.tracking_uri import find_uri
from optexport.config.validation import InvalidValueError
from optexport.errors import ConfigError, OptexportError, did_you_mean
from optexport.tracking import store
from optexport.tracking.registry import aliases
from optexport.tracking.registry.registration import (
    DECISION_TAG,
    MOVED,
    ROLLED_BACK_TAG,
    promote_command,
    record_decision,
)


@dataclass
class _Progress:
    """State of the alias and the next step, for the message of an interrupted command."""

    alias: str = "The alias did not move."
    next_step: str = "run the command again."


def promote(name: str, version: str | int, uri: str | None = None, *, alias: str = DEFAULT_ALIAS) -> str | None:
    """Moves the alias of a registered model to a version, like ``optexport promote``.

    The version is not compared with the current one.

    Args:
        name: The name of the model in MLflow's registry.
        version: The version that gets the alias.
        uri: The MLflow store; by default that of ``MLFLOW_TRACKING_URI``.
        alias: The alias to move.

    Returns:
        The version that held the alias before, or None.

    Raises:
        ConfigError: An argument is invalid, or the model or the version does not exist.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with _connect(uri, name, alias) as (client, _):
        return promote_version(client, name, str(version), alias)


def promote_version(client: Any, name: str, version: str, alias: str) -> str | None:
    """Does the same as `promote` with a client of the store."""
    before = aliases.find_holder(client, name, alias)
    versions = aliases.list_versions(client, name)
    if version not in versions:
        raise ConfigError("unknown version", location=f"{name} {version}", hint=did_you_mean(version, versions))
    if before != version:
        aliases.move(client, name, alias, version, "promote", None)
    else:
        aliases.end_rollback(client, name, alias)
    # An earlier command may have moved the alias and then been killed before this step.
    entry = client.get_model_version(name, version)
    if before != version or entry.tags.get(DECISION_TAG) != MOVED:
        record_decision(client, name, version, True, ("by hand",))
    _delete_rollback_tag(client, entry)
    return before


def rollback(name: str, uri: str | None = None, *, alias: str = DEFAULT_ALIAS) -> tuple[str, str]:
    """Moves the alias of a registered model back to the version that held it before, like ``optexport rollback``.

    A second rollback goes one more version back.

    Args:
        name: The name of the model in MLflow's registry.
        uri: The MLflow store; by default that of ``MLFLOW_TRACKING_URI``.
        alias: The alias to move.

    Returns:
        The version that held the alias, and the one that holds it now.

    Raises:
        ConfigError: An argument is invalid, no version holds the alias, or no earlier holder exists.
        TrackingError: The store cannot be reached or rejects the request.
    """
    with _connect(uri, name, alias) as (client, progress):
        before, after = roll_back_version(client, name, alias)
        # If the next answer is lost, the record of the rollback may be gone. A second rollback would then go too far.
        progress.alias = f"Version {after} holds {alias}."
        progress.next_step = (
            f"run this command, not another rollback:\n  {promote_command(name, after, alias, client.tracking_uri)}"
        )
        aliases.end_rollback(client, name, alias)
        return before, after


def roll_back_version(client: Any, name: str, alias: str) -> tuple[str, str]:
    """Moves the alias back to its previous holder and returns the old and new holder.

    The step is recorded before the alias moves. If the process is killed or an answer is lost, the next call completes
    this step and goes no further back. The record stays until `end_rollback`.

    Raises:
        ConfigError: No version holds the alias, or no earlier holder exists.
    """
    holder = aliases.find_holder(client, name, alias)
    if holder is None:
        raise ConfigError(
            "no version holds the alias",
            location=f"{name}@{alias}",
            hint="Give the alias to a version with optexport promote.",
        )
    history, versions = aliases.read_history(client, name, alias), aliases.list_versions(client, name)
    if (step := aliases.find_rollback(client, name, alias)) is not None and step[1] == holder:
        return _restore(client, name, alias, step, history)
    # Compared by index, because two entries of the same second may be equal.
    earlier = [index for index, entry in enumerate(history[:-1]) if entry["version"] in {*versions} - {holder}]
    if not earlier:
        command = promote_command(name, "VERSION", alias, client.tracking_uri)
        raise ConfigError(
            f"the history names no version that held the alias before version {holder}",
            location=f"{name}@{alias}",
            hint=f"Choose one of the versions {', '.join(versions)}: {command}",
        )
    history = history[: earlier[-1] + 1]
    step = (holder, history[-1]["version"])
    aliases.begin_rollback(client, name, alias, step)
    return _restore(client, name, alias, step, history)


def _restore(
    client: Any, name: str, alias: str, step: tuple[str, str], history: list[dict[str, str]]
) -> tuple[str, str]:
    """Completes a rollback. Every step is safe to repeat."""
    before, after = step
    aliases.set_alias(client, name, alias, after, before)
    aliases.write_history(client, name, alias, history)
    if before in aliases.list_versions(client, name):
        client.set_model_version_tag(name, before, ROLLED_BACK_TAG, aliases.now())
    _delete_rollback_tag(client, client.get_model_version(name, after))
    return step


def _delete_rollback_tag(client: Any, entry: Any) -> None:
    """Deletes the rollback tag of a version that holds the alias again."""
    if ROLLED_BACK_TAG in entry.tags:
        client.delete_model_version_tag(entry.name, entry.version, ROLLED_BACK_TAG)


@contextmanager
def _connect(uri: str | None, name: str, alias: str) -> Iterator[tuple[Any, _Progress]]:
    """Yields a client of the store, and adds the state of the alias to errors within the block."""
    for location, check, value in (("name", model_name, name), ("alias", alias_name, alias)):
        if not isinstance(value, str):
            raise ConfigError(f"{value!r} is not a text", location=location)
        try:
            check(value)
        except InvalidValueError as error:
            raise ConfigError(error.message, location=location, hint=error.hint) from error
    store_uri = find_uri(uri, "uri", "Pass uri=..., or set MLFLOW_TRACKING_URI.")
    store.check_not_new(store_uri, Path())
    progress = _Progress()
    try:
        client = store.open_store(store_uri, Path())
        aliases.get_model(client, name)
        progress.alias = "The alias may have moved; check it."
        yield client, progress
    except OptexportError:
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{progress.alias} To complete it, {progress.next_step}")
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own errors
        hint = f"{progress.alias} {store.retry_condition(error)}, {progress.next_step}"
        raise store.failure(error, store_uri, hint) from error
