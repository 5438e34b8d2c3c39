"""Registration of models: versions, moves of the alias, promotion and rollback."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.config.registration import RegisterConfig
from optexport.errors import BundleError, ConfigError, GateError, did_you_mean, first_line, short_line
from optexport.redaction import redact
from optexport.tracking.bundle_record import BUNDLE, BUNDLE_TAG, BundleRecord
from optexport.tracking.registry import aliases, regression_gate
from optexport.tracking.registry.regression_gate import Verdict
from optexport.tracking.store import made_once

# Tags of a version: the decision about the alias at its registration, and the reasons.
DECISION_TAG = "optexport.register"
REASON_TAG = "optexport.register.why"
_ROLLED_BACK_TAG = "optexport.rolled_back"
_MOVED, _STAYED = "moved", "stayed"
_TRIES = 5


@dataclass(frozen=True)
class Registered:
    """A registered version and the state of the alias.

    Attributes:
        name: The name of the registered model.
        version: The version.
        alias: The alias.
        holder: The version that holds the alias.
        moved: True if the version was good enough for the alias.
        why: The reasons, or the parts that could not be compared.
        uri: The tracking URI; None if it contains a secret.
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
        """Returns a one-line summary of the registration."""
        if self.holder == self.version:
            return f"{self.name} version {self.version} holds {self.alias}"
        return f"{self.name} version {self.version} is registered, and {self.alias} is at version {self.holder}"

    @property
    def failure(self) -> GateError | None:
        """Returns the error for an alias that did not move, or None."""
        if self.moved:
            return None
        reasons = "".join(f"\n  {reason}" for reason in self.why)
        return GateError(
            f"{self.told}{reasons}",
            location="register",
            hint=f"To move it all the same: {promoting(self.name, self.version, self.alias, self.uri)}",
        )


def register(client: Any, run_id: str, model_id: str, finished: BundleRecord, config: RegisterConfig) -> Registered:
    """Registers a run's model and moves the alias to it unless it is worse than the champion.

    The champion is the version that holds the alias. Steps that an earlier call completed are skipped.
    """
    made = _version_of(client, run_id, model_id, finished, config.name)
    version = str(made.version)

    def told(holder: str | None, moved: bool, why: tuple[str, ...]) -> Registered:
        return Registered(config.name, version, config.alias, holder, moved, why, _tellable(client.tracking_uri))

    decision = made.tags.get(DECISION_TAG)
    if decision is None and (
        _ROLLED_BACK_TAG in made.tags or aliases.gave_way(client, config.name, config.alias, version)
    ):
        decision = _MOVED  # a user rolled it back later
    if decision is not None:
        why = tuple(filter(None, made.tags.get(REASON_TAG, "").split("\n")))
        if DECISION_TAG not in made.tags:
            _decide(client, config.name, version, True, why)
        return told(aliases.holder_of(client, config.name, config.alias), decision == _MOVED, why)
    for _ in range(_TRIES):
        champion = aliases.holder_of(client, config.name, config.alias)
        verdict = _verdict(client, finished, config, version, champion)
        moves = not verdict.worse
        why = (*verdict.worse, *(f"not compared: {what}" for what in verdict.not_compared))
        if champion == version:  # an earlier call moved it and recorded why
            why = tuple(filter(None, made.tags.get(REASON_TAG, "").split("\n")))
            break
        # Another run may have moved the alias during the comparison.
        if not moves:
            if aliases.holder_of(client, config.name, config.alias) == champion:
                break
            continue
        _tell_why(client, config.name, version, why)
        if aliases.move(client, config.name, config.alias, version, "ratchet", champion):
            break
    else:
        raise TimeoutError(f"others move the alias {config.alias} of {config.name} all the time")
    _decide(client, config.name, version, moves, why)
    return told(version if moves else champion, moves, why)


def promote(client: Any, name: str, version: str, alias: str) -> str | None:
    """Moves the alias to a version by hand and returns the previous holder, or None.

    Raises:
        ConfigError: The version does not exist.
    """
    before = aliases.holder_of(client, name, alias)
    known = aliases.versions(client, name)
    if version not in known:
        raise ConfigError("there is no such version", location=f"{name} {version}", hint=did_you_mean(version, known))
    if before != version:
        aliases.move(client, name, alias, version, "promote", None)
    else:
        aliases.end_rollback(client, name, alias)
    # An earlier command may have moved the alias and then been killed before this step.
    made = client.get_model_version(name, version)
    if before != version or made.tags.get(DECISION_TAG) != _MOVED:
        _decide(client, name, version, True, ("by hand",))
    _hold_again(client, made)
    return before


def rollback(client: Any, name: str, alias: str) -> tuple[str, str]:
    """Moves the alias back to its previous holder and returns the old and new holder.

    The step is recorded before the alias moves. If the process is killed or an answer is lost, the next call completes
    this step and goes no further back. The record stays until `end_rollback`.

    Raises:
        ConfigError: No version holds the alias, or no earlier holder exists.
    """
    holder = aliases.holder_of(client, name, alias)
    if holder is None:
        raise ConfigError("no version holds it", location=f"{name}@{alias}", hint="optexport promote gives it to one.")
    history, known = aliases.history_of(client, name, alias), aliases.versions(client, name)
    if (begun := aliases.begun(client, name, alias)) is not None and begun[1] == holder:
        return _give_back(client, name, alias, begun, history)
    # Compared by index, because two entries of the same second may be equal.
    held = [index for index, entry in enumerate(history[:-1]) if entry["version"] in {*known} - {holder}]
    if not held:
        raise ConfigError(
            f"version {holder} holds it, and nothing tells of one that did before",
            location=f"{name}@{alias}",
            hint=f"Versions are {', '.join(known)}: {promoting(name, 'VERSION', alias, client.tracking_uri)}",
        )
    history = history[: held[-1] + 1]
    step = (holder, history[-1]["version"])
    aliases.begin_rollback(client, name, alias, step)
    return _give_back(client, name, alias, step, history)


def _give_back(
    client: Any, name: str, alias: str, step: tuple[str, str], history: list[dict[str, str]]
) -> tuple[str, str]:
    """Completes a rollback. Every step is safe to repeat."""
    before, after = step
    aliases.give(client, name, alias, after, before)
    aliases.write_history(client, name, alias, history)
    if before in aliases.versions(client, name):
        client.set_model_version_tag(name, before, _ROLLED_BACK_TAG, aliases.now())
    _hold_again(client, client.get_model_version(name, after))
    return step


def _hold_again(client: Any, made: Any) -> None:
    """Removes the rollback tag of a version that holds the alias again."""
    if _ROLLED_BACK_TAG in made.tags:
        client.delete_model_version_tag(made.name, made.version, _ROLLED_BACK_TAG)


def _tellable(uri: str) -> str | None:
    return uri if redact(uri) == uri else None


def promoting(name: str, version: str, alias: str, uri: str | None) -> str:
    """Returns the shell command that promotes a version; omits a URI with a secret."""
    options = ["--alias", alias, "--uri", (uri and _tellable(uri)) or "URI"]
    given = [*options, "--", name, version] if name.startswith("-") else [name, version, *options]
    return shlex.join(["optexport", "promote", *given])


def _version_of(client: Any, run_id: str, model_id: str, finished: BundleRecord, name: str) -> Any:
    """Returns the registered version of a run's model; creates it if needed."""

    def model() -> Any:
        found = client.search_registered_models(aliases.named(name))
        return next((model for model in found if model.name == name), None)

    def known() -> str | None:
        made = client.search_model_versions(aliases.named(name))
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


def _verdict(client: Any, new: BundleRecord, config: RegisterConfig, version: str, champion: str | None) -> Verdict:
    if champion is None and (history := aliases.history_of(client, config.name, config.alias)):
        last = history[-1]["version"]
        if last in aliases.versions(client, config.name):
            return Verdict((), (f"{config.alias} was taken away from version {last}, which held it last",))
        return Verdict((), (f"version {last}, which held {config.alias} last, is gone",))
    if champion is None or champion == version:
        return Verdict((), ())
    # Happens if the answer to a move was lost and another run moved the alias later.
    if int(champion) > int(version):
        return Verdict((f"version {champion} is newer, and holds {config.alias}",), ())
    run_id = client.get_model_version(config.name, champion).run_id
    if not _kept(client, run_id) >= {f"{BUNDLE}/{MANIFEST}", f"{BUNDLE}/{MEASUREMENTS}"}:
        why = f"version {champion} is of no run of optexport, or of one that was deleted: nothing tells how good it is"
        return Verdict((why,), ())
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        try:
            documents = [_downloaded(client, run_id, each, scratch) for each in (MANIFEST, MEASUREMENTS)]
            return regression_gate.compare(new, BundleRecord.read(Path(documents[0]).parent), config.max_regression)
        except (BundleError, ValueError, ArithmeticError) as error:
            told = f"{error.location}: {error.message}" if isinstance(error, BundleError) else first_line(error)
            why = f"version {champion} cannot be compared with: {told}".replace(f"{scratch}/", "")
            return Verdict((short_line(why),), ())


def _downloaded(client: Any, run_id: str | None, document: str, folder: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.download_artifacts(run_id, f"{BUNDLE}/{document}", folder))
    except MlflowException:
        _kept(client, run_id)  # raises a clearer error if the server is gone
        raise


def _kept(client: Any, run_id: str | None) -> set[str]:
    """Returns the artifact paths of a run's bundle; empty if the run is missing or deleted."""
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
    client.set_model_version_tag(name, version, REASON_TAG, redact("\n".join(why))[: aliases.LONGEST_TAG])


def _decide(client: Any, name: str, version: str, moved: bool, why: tuple[str, ...]) -> None:
    _tell_why(client, name, version, why)
    client.set_model_version_tag(name, version, DECISION_TAG, _MOVED if moved else _STAYED)
