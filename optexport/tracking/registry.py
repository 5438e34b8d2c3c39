"""The registered model: its versions, the alias that one of them holds, and who held it before."""

from __future__ import annotations

import datetime
import json
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle.places import MANIFEST, MEASUREMENTS
from optexport.config.registering import RegisterConfig
from optexport.errors import BundleError, ConfigError, GateError, did_you_mean, first_line
from optexport.redaction import redact
from optexport.tracking import ratchet
from optexport.tracking.finished import BUNDLE, BUNDLE_TAG, Finished
from optexport.tracking.ratchet import Verdict
from optexport.tracking.store import made_once

# Of a version: what became of the alias when it was registered, and why.
DECISION_TAG = "optexport.register"
REASON_TAG = "optexport.register.why"
_ROLLED_BACK_TAG = "optexport.rolled_back"
_MOVED, _STAYED = "moved", "stayed"
# Of a registered model, for each alias: who held it, the last one last.
_HISTORY_TAG = "optexport.history."
# Of the same, while the alias is given back: from which version, and to which.
_ROLLING_BACK_TAG = "optexport.rolling_back."
# A key of its last entry while the alias moves.
_MOVING = "moving"
_LONGEST_HISTORY = 100
# In characters: what the databases of MLflow hold of a tag of the registry.
_LONGEST_TAG = 5000
_TRIES = 5


@dataclass(frozen=True)
class Registered:
    """A version, and what became of the alias.

    Attributes:
        holder: The version that holds the alias.
        moved: Whether the version was found good enough for it.
        why: The reasons, or what could not be compared.
        uri: The store, as far as it may be told: none whose URI holds a secret.
    """

    name: str
    version: str
    alias: str
    holder: str | None
    moved: bool
    why: tuple[str, ...]
    uri: str | None

    @property
    def told(self) -> str:
        """What happened, as one line."""
        if self.holder == self.version:
            return f"{self.name} version {self.version} holds {self.alias}"
        return f"{self.name} version {self.version} is registered, and {self.alias} is at version {self.holder}"

    @property
    def failure(self) -> GateError | None:
        """That the alias stays where it was, as an error; None where it need not have moved."""
        if self.moved:
            return None
        reasons = "".join(f"\n  {reason}" for reason in self.why)
        return GateError(
            f"{self.told}{reasons}",
            place="register",
            mend=f"To move it all the same: {promoting(self.name, self.version, self.alias, self.uri)}",
        )


def register(client: Any, run_id: str, model_id: str, finished: Finished, config: RegisterConfig) -> Registered:
    """Makes a version of a run's model, and gives it the alias if it is as good as the version that holds it.

    What was done before is not done again.
    """
    made = _version_of(client, run_id, model_id, finished, config.name)
    version = str(made.version)

    def told(holder: str | None, moved: bool, why: tuple[str, ...]) -> Registered:
        return Registered(config.name, version, config.alias, holder, moved, why, _tellable(client.tracking_uri))

    decision = made.tags.get(DECISION_TAG)
    if decision is None and (_ROLLED_BACK_TAG in made.tags or _gave_way(client, config.name, config.alias, version)):
        decision = _MOVED  # and someone went back on it since
    if decision is not None:
        why = tuple(filter(None, made.tags.get(REASON_TAG, "").split("\n")))
        if DECISION_TAG not in made.tags:
            _decide(client, config.name, version, True, why)
        return told(_holder(client, config.name, config.alias), decision == _MOVED, why)
    for _ in range(_TRIES):
        champion = _holder(client, config.name, config.alias)
        verdict = _verdict(client, finished, config, version, champion)
        moves = not verdict.worse
        why = (*verdict.worse, *(f"not compared: {what}" for what in verdict.not_compared))
        if champion == version:  # an earlier call moved it, and told why before
            why = tuple(filter(None, made.tags.get(REASON_TAG, "").split("\n")))
            break
        # The comparison took its time, and another run may have moved the alias.
        if not moves:
            if _holder(client, config.name, config.alias) == champion:
                break
            continue
        _tell_why(client, config.name, version, why)
        if _move(client, config.name, config.alias, version, "ratchet", champion):
            break
    else:
        raise TimeoutError(f"others move the alias {config.alias} of {config.name} all the time")
    _decide(client, config.name, version, moves, why)
    return told(version if moves else champion, moves, why)


def promote(client: Any, name: str, version: str, alias: str) -> str | None:
    """Gives a version the alias, by hand; returns the version that held it before.

    Raises:
        ConfigError: There is no such version.
    """
    before = _holder(client, name, alias)
    known = _versions(client, name)
    if version not in known:
        raise ConfigError("there is no such version", place=f"{name} {version}", mend=did_you_mean(version, known))
    if before != version:
        _move(client, name, alias, version, "promote", None)
    else:
        end_rollback(client, name, alias)
    # An earlier command may have moved the alias, and been ended before it came here.
    made = client.get_model_version(name, version)
    if before != version or made.tags.get(DECISION_TAG) != _MOVED:
        _decide(client, name, version, True, ("by hand",))
    _hold_again(client, made)
    return before


def rollback(client: Any, name: str, alias: str) -> tuple[str, str]:
    """Gives the alias back to the version that held it before; returns the one that lost it, and that one.

    What is to be done is written before the alias moves: where the program is ended, or an answer lost, the next call
    does what is left, and does not go back one version more. It stays written until `end_rollback`.

    Raises:
        ConfigError: No version holds it, or none did before that is still there.
    """
    holder = _holder(client, name, alias)
    if holder is None:
        raise ConfigError("no version holds it", place=f"{name}@{alias}", mend="optexport promote gives it to one.")
    history, known = _history(client, name, alias), _versions(client, name)
    if (begun := _begun(client, name, alias)) is not None and begun[1] == holder:
        return _give_back(client, name, alias, begun, history)
    # By their places: two entries may be equal, of one second.
    held = [index for index, entry in enumerate(history[:-1]) if entry["version"] in {*known} - {holder}]
    if not held:
        raise ConfigError(
            f"version {holder} holds it, and nothing tells of one that did before",
            place=f"{name}@{alias}",
            mend=f"Versions are {', '.join(known)}: {promoting(name, 'VERSION', alias, client.tracking_uri)}",
        )
    history = history[: held[-1] + 1]
    step = (holder, history[-1]["version"])
    client.set_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}", json.dumps(step))
    return _give_back(client, name, alias, step, history)


def _give_back(
    client: Any, name: str, alias: str, step: tuple[str, str], history: list[dict[str, str]]
) -> tuple[str, str]:
    """Gives the alias from one version back to another, which the history ends with; each part may be done already."""
    before, after = step
    _give(client, name, alias, after, before)
    _write_history(client, name, alias, history)
    if before in _versions(client, name):
        client.set_model_version_tag(name, before, _ROLLED_BACK_TAG, _now())
    _hold_again(client, client.get_model_version(name, after))
    return step


def _hold_again(client: Any, made: Any) -> None:
    """Forgets that a version was rolled back, which holds the alias once more."""
    if _ROLLED_BACK_TAG in made.tags:
        client.delete_model_version_tag(made.name, made.version, _ROLLED_BACK_TAG)


def end_rollback(client: Any, name: str, alias: str) -> None:
    """Forgets what a rollback was about to do, so that the next one goes back a version more."""
    if _begun(client, name, alias) is not None:
        client.delete_registered_model_tag(name, f"{_ROLLING_BACK_TAG}{alias}")


def _begun(client: Any, name: str, alias: str) -> tuple[str, str] | None:
    """From which version to which a rollback goes that did not come to its end; None where there is none."""
    try:
        before, after = json.loads(_model(client, name).tags.get(f"{_ROLLING_BACK_TAG}{alias}", "null"))
    except (ValueError, TypeError, RecursionError):  # none, or what someone wrote on MLflow's page
        return None
    return str(before), str(after)


def check_model(client: Any, name: str) -> None:
    """A first question, which moves nothing.

    Raises:
        As for `_model`.
    """
    _model(client, name)


def _tellable(uri: str) -> str | None:
    return uri if redact(uri) == uri else None


def promoting(name: str, version: str, alias: str, uri: str | None) -> str:
    """The command that gives a version an alias, for a shell; it does not name a store whose URI holds a secret."""
    store = [] if uri is None or _tellable(uri) is None else ["--uri", uri]
    options = ["--alias", alias, *store]
    given = [*options, "--", name, version] if name.startswith("-") else [name, version, *options]
    return shlex.join(["optexport", "promote", *given])


def _version_of(client: Any, run_id: str, model_id: str, finished: Finished, name: str) -> Any:
    """The version of a run's model, which is made where it is not there yet."""

    def model() -> Any:
        found = client.search_registered_models(named(name))
        return next((model for model in found if model.name == name), None)

    def known() -> str | None:
        made = client.search_model_versions(named(name))
        return min((str(version.version) for version in made if version.run_id == run_id), key=int, default=None)

    if model() is None:
        made_once(lambda: client.create_registered_model(name), model)
    origin = {BUNDLE_TAG: finished.identity[BUNDLE_TAG], "weights_sha256": finished.manifest.model.weights_sha256}
    source = f"models:/{model_id}"
    version = known() or made_once(
        lambda: str(client.create_model_version(name, source, run_id, tags=origin, model_id=model_id).version),
        known,
        lambda made: client.delete_model_version(name, made),
    )
    return client.get_model_version(name, version)


def _verdict(client: Any, new: Finished, config: RegisterConfig, version: str, champion: str | None) -> Verdict:
    if champion is None and (history := _history(client, config.name, config.alias)):
        last = history[-1]["version"]
        if last in _versions(client, config.name):
            return Verdict((), (f"{config.alias} was taken away from version {last}, which held it last",))
        return Verdict((), (f"version {last}, which held {config.alias} last, is gone",))
    if champion is None or champion == version:
        return Verdict((), ())
    # As where the answer was lost when the alias was to be moved, and another run has moved it since.
    if int(champion) > int(version):
        return Verdict((f"version {champion} is newer, and holds {config.alias}",), ())
    run_id = client.get_model_version(config.name, champion).run_id
    if not _kept(client, run_id) >= {f"{BUNDLE}/{MANIFEST}", f"{BUNDLE}/{MEASUREMENTS}"}:
        why = f"version {champion} is of no run of optexport, or of one that was deleted: nothing tells how good it is"
        return Verdict((why,), ())
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        try:
            documents = [
                client.download_artifacts(run_id, f"{BUNDLE}/{each}", scratch) for each in (MANIFEST, MEASUREMENTS)
            ]
            return ratchet.compare(new, Finished.read(Path(documents[0]).parent), config.ratchet)
        except (BundleError, ValueError, ArithmeticError) as error:
            told = f"{error.place}: {error.cause}" if isinstance(error, BundleError) else first_line(error)
            why = f"version {champion} cannot be compared with: {told}".replace(f"{scratch}/", "")
            return Verdict((ratchet.shown(why),), ())


def _kept(client: Any, run_id: str | None) -> set[str]:
    """What a run keeps of its bundle; nothing where there is no run, it was deleted, or it is gone for good."""
    from mlflow.exceptions import MlflowException

    if not run_id:
        return set()
    try:
        if client.get_run(run_id).info.lifecycle_stage != "active":
            return set()
        return {file.path for file in client.list_artifacts(run_id, BUNDLE)}
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return set()


def _tell_why(client: Any, name: str, version: str, why: tuple[str, ...]) -> None:
    client.set_model_version_tag(name, version, REASON_TAG, redact("\n".join(why))[:_LONGEST_TAG])


def _decide(client: Any, name: str, version: str, moved: bool, why: tuple[str, ...]) -> None:
    _tell_why(client, name, version, why)
    client.set_model_version_tag(name, version, DECISION_TAG, _MOVED if moved else _STAYED)


def _holder(client: Any, name: str, alias: str) -> str | None:
    held = _model(client, name).aliases.get(alias)
    return None if held is None else str(held)


def _model(client: Any, name: str) -> Any:
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
        raise ConfigError("there is no such registered model", place=name, mend=did_you_mean(name, known)) from error
    # As databases may hold them: some find names whatever their case.
    if str(found.name).casefold() != name.casefold():
        raise ConnectionError(f"what answers is no MLflow: asked for the model {name}, it gave {str(found.name)!r}")
    return found


def _versions(client: Any, name: str) -> list[str]:
    """Those of a registered model, the oldest first."""
    found = client.search_model_versions(named(name))
    return sorted((str(version.version) for version in found), key=int)


def named(name: str) -> str:
    """A filter for what has a name. MLflow knows no way to write a quote within quotes of the same kind."""
    quote = '"' if "'" in name else "'"
    return f"name = {quote}{name}{quote}"


def _move(client: Any, name: str, alias: str, version: str, by: str, champion: str | None) -> bool:
    """Moves the alias; says whether it did. MLflow has no lock, and the program may be ended: the history goes first.

    What it says of a version that the alias did not come to is left out when it is read.

    Args:
        champion: For a ratchet, the version that was compared with: from any other the alias is not taken.
    """
    entry = _entry(version, by)
    _write_history(client, name, alias, [*_history(client, name, alias), entry | {_MOVING: version}])
    end_rollback(client, name, alias)
    if (before := _holder(client, name, alias)) != champion and by == "ratchet":
        return False
    _give(client, name, alias, version, before)
    # Others may have written to it since.
    written = _entries(_model(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    _write_history(client, name, alias, [*(each for each in written if _MOVING not in each), entry])
    return True


def _give(client: Any, name: str, alias: str, version: str, before: str | None) -> None:
    """Gives a version the alias, and asks whether it has it.

    Raises:
        ConnectionError: It is where it was, whatever was answered.
    """
    client.set_registered_model_alias(name, alias, version)
    if (holder := _holder(client, name, alias)) == before != version:
        raise ConnectionError(f"the alias {alias} was moved to version {version}, and is at {holder} all the same")


def _history(client: Any, name: str, alias: str) -> list[dict[str, str]]:
    """Who held the alias, up to whoever holds it now: it may have been moved by others, on MLflow's page."""
    model = _model(client, name)
    history = _entries(model.tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
    holder = model.aliases.get(alias)
    if history and history[-1].pop(_MOVING, None) is not None and history[-1]["version"] != str(holder):
        del history[-1]
    if holder is None:
        return history
    places = [index for index, entry in enumerate(history) if entry["version"] == str(holder)]
    return history[: places[-1] + 1] if places else [*history, _entry(str(holder), "others")]


def _gave_way(client: Any, name: str, alias: str, version: str) -> bool:
    """Whether a version held the alias, and another was promoted by hand since.

    What follows a version in the tag was written while that held the alias.
    """
    entries = _entries(_model(client, name).tags.get(f"{_HISTORY_TAG}{alias}", "[]"))
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
    return {"version": version, "by": by, "at": _now()}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write_history(client: Any, name: str, alias: str, history: list[dict[str, str]]) -> None:
    """Writes the end of a history, as much as fits."""
    kept = history[-_LONGEST_HISTORY:]
    while len(text := json.dumps(kept, separators=(",", ":"))) > _LONGEST_TAG:
        kept = kept[1:]
    client.set_registered_model_tag(name, f"{_HISTORY_TAG}{alias}", text)
