"""An alias of a registered model: which version holds it, who held it before, and how it moves.

MLflow has no lock, and no history of an alias: that stands in a tag of the model.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from optexport.errors import ConfigError, did_you_mean

# Of a registered model, for each alias: who held it, the last one last.
_HISTORY_TAG = "optexport.history."
# Of the same, while the alias is given back: from which version, and to which.
_ROLLING_BACK_TAG = "optexport.rolling_back."
# A key of its last entry while the alias moves.
_MOVING = "moving"
_LONGEST_HISTORY = 100
# In characters: what the databases of MLflow hold of a tag of the registry.
LONGEST_TAG = 5000


def model_of(client: Any, name: str) -> Any:
    """The registered model.

    Raises:
        ConfigError: There is none.
        ConnectionError: What answers is no MLflow: a page may stand before it, or something else at its address. What
            it leaves out must not be taken for a model without aliases and history.
    """
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        known = [model.name for model in client.search_registered_models()]
        raise ConfigError("there is no such registered model", location=name, hint=did_you_mean(name, known)) from error
    # As databases may hold them: some find names whatever their case.
    if str(found.name).casefold() != name.casefold():
        raise ConnectionError(f"what answers is no MLflow: asked for the model {name}, it gave {str(found.name)!r}")
    return found


def holder_of(client: Any, name: str, alias: str) -> str | None:
    held = model_of(client, name).aliases.get(alias)
    return None if held is None else str(held)


def versions(client: Any, name: str) -> list[str]:
    """Those of a registered model, the oldest first."""
    found = client.search_model_versions(named(name))
    return sorted((str(version.version) for version in found), key=int)


def named(name: str) -> str:
    """A filter for what has a name. MLflow knows no way to write a quote within quotes of the same kind."""
    quote = '"' if "'" in name else "'"
    return f"name = {quote}{name}{quote}"


def move(client: Any, name: str, alias: str, version: str, by: str, champion: str | None) -> bool:
    """Moves the alias; says whether it did. MLflow has no lock, and the program may be ended: the history goes first.

    What it says of a version that the alias did not come to is left out when it is read.

    Args:
        champion: For a ratchet, the version that was compared with: from any other the alias is not taken.
    """
    entry = _entry(version, by)
    write_history(client, name, alias, [*history_of(client, name, alias), entry | {_MOVING: version}])
    end_rollback(client, name, alias)
    if (before := holder_of(client, name, alias)) != champion and by == "ratchet":
        return False
    give(client, name, alias, version, before)
    # Others may have written to it since.
    written = _entries(model_of(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    write_history(client, name, alias, [*(each for each in written if _MOVING not in each), entry])
    return True


def give(client: Any, name: str, alias: str, version: str, before: str | None) -> None:
    """Gives a version the alias, and asks whether it has it.

    Raises:
        ConnectionError: It is where it was, whatever was answered.
    """
    client.set_registered_model_alias(name, alias, version)
    if (holder := holder_of(client, name, alias)) == before != version:
        raise ConnectionError(f"the alias {alias} was moved to version {version}, and is at {holder} all the same")


def begun(client: Any, name: str, alias: str) -> tuple[str, str] | None:
    """From which version to which a rollback goes that did not come to its end; None where there is none."""
    try:
        before, after = json.loads(model_of(client, name).tags.get(f"{_ROLLING_BACK_TAG}{alias}", "null"))
    except (ValueError, TypeError, RecursionError):  # none, or what someone wrote on MLflow's page
        return None
    return str(before), str(after)


def begin_rollback(client: Any, name: str, alias: str, step: tuple[str, str]) -> None:
    """Writes from which version to which the alias is about to be given back."""
    client.set_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}", json.dumps(step))


def end_rollback(client: Any, name: str, alias: str) -> None:
    """Forgets what a rollback was about to do, so that the next one goes back a version more."""
    if begun(client, name, alias) is not None:
        client.delete_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}")


def history_of(client: Any, name: str, alias: str) -> list[dict[str, str]]:
    """Who held the alias, up to whoever holds it now: it may have been moved by others, on MLflow's page."""
    model = model_of(client, name)
    history = _entries(model.tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    holder = model.aliases.get(alias)
    if history and history[-1].pop(_MOVING, None) is not None and history[-1]["version"] != str(holder):
        del history[-1]
    if holder is None:
        return history
    places = [index for index, entry in enumerate(history) if entry["version"] == str(holder)]
    return history[: places[-1] + 1] if places else [*history, _entry(str(holder), "others")]


def gave_way(client: Any, name: str, alias: str, version: str) -> bool:
    """Whether a version held the alias, and another was promoted by hand since.

    What follows a version in the tag was written while that held the alias.
    """
    entries = _entries(model_of(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    places = [index for index, entry in enumerate(entries) if entry["version"] == version]
    return bool(places) and any(entry.get("by") == "promote" for entry in entries[places[-1] + 1 :])


def _entries(text: str) -> list[dict[str, str]]:
    """The history that a tag holds; of what is none, nothing: anyone may write tags on MLflow's page."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("version"), str)]


def _entry(version: str, by: str) -> dict[str, str]:
    return {"version": version, "by": by, "at": now()}


def write_history(client: Any, name: str, alias: str, history: list[dict[str, str]]) -> None:
    """Writes the end of a history, as much as fits."""
    kept = history[-_LONGEST_HISTORY:]
    while len(text := json.dumps(kept, separators=(",", ":"))) > LONGEST_TAG:
        kept = kept[1:]
    client.set_registered_model_tag(name, f"{_HISTORY_TAG}{alias}", text)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
