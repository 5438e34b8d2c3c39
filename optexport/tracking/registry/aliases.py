"""Aliases of registered models: their holder, their history, and moves between versions.

MLflow has no lock and no history of an alias. A tag of the registered model stores the history.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from optexport.errors import ConfigError, did_you_mean

# Tag of a registered model, one per alias: the versions that held the alias, oldest first.
_HISTORY_TAG = "optexport.history."
# Tag of a registered model during a rollback: the version that loses the alias and the one that gets it.
_ROLLING_BACK_TAG = "optexport.rolling_back."
# Key of the last history entry while the alias moves.
_MOVING = "moving"
_MAX_HISTORY = 100
# In characters: the limit of MLflow's databases for a tag of the registry.
LONGEST_TAG = 5000


def get_model(client: Any, name: str) -> Any:
    """Returns the registered model.

    Raises:
        ConfigError: The model does not exist.
        ConnectionError: The server is not MLflow, for example a login page. Its incomplete answer must not be read as a
            model without aliases and history.
    """
    from mlflow.exceptions import MlflowException

    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        names = [model.name for model in client.search_registered_models()]
        raise ConfigError("unknown registered model", location=name, hint=did_you_mean(name, names)) from error
    # Some databases ignore case when they look up names.
    if str(model.name).casefold() != name.casefold():
        raise ConnectionError(
            f"the server is not an MLflow server: asked for the model {name}, it returned {str(model.name)!r}"
        )
    return model


def find_holder(client: Any, name: str, alias: str) -> str | None:
    """Returns the version that holds the alias, or None."""
    version = get_model(client, name).aliases.get(alias)
    return None if version is None else str(version)


def list_versions(client: Any, name: str) -> list[str]:
    """Returns the versions of a registered model, oldest first."""
    versions = client.search_model_versions(name_filter(name))
    return sorted((str(version.version) for version in versions), key=int)


def name_filter(name: str) -> str:
    """Returns an MLflow filter for a name. MLflow cannot escape quotes of the same kind."""
    quote = '"' if "'" in name else "'"
    return f"name = {quote}{name}{quote}"


def move(client: Any, name: str, alias: str, version: str, by: str, champion: str | None) -> bool:
    """Moves the alias to a version and returns True if it moved.

    MLflow has no lock, and the process may be killed at any time, so the history is written first. Readers ignore its
    last entry if the alias never reached that version.

    Args:
        champion: The version that the regression gate compared with. With `by="run"` the alias moves only if this
            version still holds it.
    """
    entry = _entry(version, by)
    write_history(client, name, alias, [*read_history(client, name, alias), entry | {_MOVING: version}])
    end_rollback(client, name, alias)
    if (before := find_holder(client, name, alias)) != champion and by == "run":
        return False
    set_alias(client, name, alias, version, before)
    # Other processes may have written to the history in the meantime.
    entries = _parse_history(get_model(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    write_history(client, name, alias, [*(old for old in entries if _MOVING not in old), entry])
    return True


def set_alias(client: Any, name: str, alias: str, version: str, before: str | None) -> None:
    """Sets the alias to a version and checks that the registry agrees.

    Raises:
        ConnectionError: The alias did not move, although the server reported success.
    """
    client.set_registered_model_alias(name, alias, version)
    if (holder := find_holder(client, name, alias)) == before != version:
        position = "still unset" if holder is None else f"still at version {holder}"
        raise ConnectionError(
            f"the server reported that the alias {alias} moved to version {version}, but the alias is {position}"
        )


def find_rollback(client: Any, name: str, alias: str) -> tuple[str, str] | None:
    """Returns the old and new version of an unfinished rollback, or None."""
    try:
        before, after = json.loads(get_model(client, name).tags.get(f"{_ROLLING_BACK_TAG}{alias}", "null"))
    except (ValueError, TypeError, RecursionError):  # missing, or edited on MLflow's page
        return None
    return str(before), str(after)


def begin_rollback(client: Any, name: str, alias: str, step: tuple[str, str]) -> None:
    """Records the old and new version of a rollback before the alias moves."""
    client.set_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}", json.dumps(step))


def end_rollback(client: Any, name: str, alias: str) -> None:
    """Deletes the record of a rollback, so that the next one goes one version further back."""
    if find_rollback(client, name, alias) is not None:
        client.delete_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}")


def read_history(client: Any, name: str, alias: str) -> list[dict[str, str]]:
    """Returns the history of the alias, ending with its current holder.

    Users may move an alias on MLflow's page. The current holder is appended if the history lacks it.
    """
    model = get_model(client, name)
    history = _parse_history(model.tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    holder = model.aliases.get(alias)
    if history and history[-1].pop(_MOVING, None) is not None and history[-1]["version"] != str(holder):
        del history[-1]
    if holder is None:
        return history
    indices = [index for index, entry in enumerate(history) if entry["version"] == str(holder)]
    return history[: indices[-1] + 1] if indices else [*history, _entry(str(holder), "others")]


def was_superseded(client: Any, name: str, alias: str, version: str) -> bool:
    """Returns True if a version held the alias and another one was promoted by hand later.

    The history is in order of time, so the entries after the version's last one come from later moves.
    """
    entries = _parse_history(get_model(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    indices = [index for index, entry in enumerate(entries) if entry["version"] == version]
    return bool(indices) and any(entry.get("by") == "promote" for entry in entries[indices[-1] + 1 :])


def _parse_history(text: str) -> list[dict[str, str]]:
    """Parses a history tag. Invalid content gives an empty list, because anyone may edit tags."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = document if isinstance(document, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("version"), str)]


def _entry(version: str, by: str) -> dict[str, str]:
    return {"version": version, "by": by, "at": now()}


def write_history(client: Any, name: str, alias: str, history: list[dict[str, str]]) -> None:
    """Writes the most recent entries of a history that fit into its tag."""
    recent = history[-_MAX_HISTORY:]
    while len(text := json.dumps(recent, separators=(",", ":"))) > LONGEST_TAG:
        recent = recent[1:]
    client.set_registered_model_tag(name, f"{_HISTORY_TAG}{alias}", text)


def now() -> str:
    """Returns the current time in UTC, in ISO 8601 format with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
