"""Registration of a run's model: its version, and the move of the alias if the version is good enough."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.config.registration import RegisterConfig
from optexport.errors import BundleError, GateError, first_line, short_line
from optexport.redaction import redact
from optexport.tracking.bundle_record import BUNDLE, BUNDLE_TAG, BundleRecord
from optexport.tracking.registry import aliases, regression_gate
from optexport.tracking.registry.regression_gate import Verdict
from optexport.tracking.store import create_once

# Tags of a version: the decision about the alias at its registration, the reasons, and the time of a rollback.
DECISION_TAG = "optexport.register"
REASON_TAG = "optexport.register.why"
ROLLED_BACK_TAG = "optexport.rolled_back"
MOVED, _STAYED = "moved", "stayed"
_MAX_ATTEMPTS = 5


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
    def summary(self) -> str:
        """Returns a one-line summary of the registration."""
        if self.holder == self.version:
            return f"{self.name} version {self.version} holds {self.alias}"
        holder = "no version" if self.holder is None else f"version {self.holder}"
        return f"{self.name} version {self.version} is registered, and {self.alias} is at {holder}"

    @property
    def failure(self) -> GateError | None:
        """Returns the error for an alias that did not move, or None."""
        if self.moved:
            return None
        return GateError(
            self.summary,
            location="register",
            details="\n".join(self.why),
            hint=f"To move the alias anyway, run: {promote_command(self.name, self.version, self.alias, self.uri)}",
        )


def register(client: Any, run_id: str, model_id: str, bundle: BundleRecord, config: RegisterConfig) -> Registered:
    """Registers a run's model and moves the alias to it unless it is worse than the champion.

    The champion is the version that holds the alias. Steps that an earlier call completed are skipped.
    """
    entry = _create_version(client, run_id, model_id, bundle, config.name)
    version = str(entry.version)
    recorded_reasons = tuple(filter(None, entry.tags.get(REASON_TAG, "").split("\n")))

    def result(holder: str | None, moved: bool, reasons: tuple[str, ...]) -> Registered:
        uri = _uri_without_secret(client.tracking_uri)
        return Registered(config.name, version, config.alias, holder, moved, reasons, uri)

    decision = entry.tags.get(DECISION_TAG)
    if decision is None and (
        ROLLED_BACK_TAG in entry.tags or aliases.was_superseded(client, config.name, config.alias, version)
    ):
        decision = MOVED  # a user rolled it back later
    if decision is not None:
        if DECISION_TAG not in entry.tags:
            record_decision(client, config.name, version, True, recorded_reasons)
        holder = aliases.find_holder(client, config.name, config.alias)
        return result(holder, decision == MOVED, recorded_reasons)
    for _ in range(_MAX_ATTEMPTS):
        champion = aliases.find_holder(client, config.name, config.alias)
        verdict = _compare_with_champion(client, bundle, config, version, champion)
        moves = not verdict.worse
        reasons = (*verdict.worse, *(f"not compared: {part}" for part in verdict.not_compared))
        if champion == version:  # an earlier call moved it and recorded why
            reasons = recorded_reasons
            break
        # Another run may have moved the alias during the comparison.
        if not moves:
            if aliases.find_holder(client, config.name, config.alias) == champion:
                break
            continue
        _record_reasons(client, config.name, version, reasons)
        if aliases.move(client, config.name, config.alias, version, "run", champion):
            break
    else:
        raise TimeoutError(f"other processes keep moving the alias {config.alias} of {config.name}")
    record_decision(client, config.name, version, moves, reasons)
    return result(version if moves else champion, moves, reasons)


def _uri_without_secret(uri: str) -> str | None:
    return uri if redact(uri) == uri else None


def promote_command(name: str, version: str, alias: str, uri: str | None) -> str:
    """Returns the shell command that promotes a version; omits a URI with a secret."""
    options = ["--alias", alias, "--uri", (uri and _uri_without_secret(uri)) or "URI"]
    arguments = [*options, "--", name, version] if name.startswith("-") else [name, version, *options]
    return shlex.join(["optexport", "promote", *arguments])


def _create_version(client: Any, run_id: str, model_id: str, bundle: BundleRecord, name: str) -> Any:
    """Returns the registered version of a run's model; creates it if needed."""

    def find_model() -> Any:
        models = client.search_registered_models(aliases.name_filter(name))
        return next((model for model in models if model.name == name), None)

    def find_version() -> str | None:
        versions = client.search_model_versions(aliases.name_filter(name))
        return min((str(version.version) for version in versions if version.run_id == run_id), key=int, default=None)

    if find_model() is None:
        create_once(lambda: client.create_registered_model(name), find_model)
    origin = {BUNDLE_TAG: bundle.identity[BUNDLE_TAG], "weights_sha256": bundle.manifest.model.weights_sha256}
    source = f"models:/{model_id}"
    version = find_version() or create_once(
        lambda: str(client.create_model_version(name, source, run_id, tags=origin, model_id=model_id).version),
        find_version,
        lambda version: client.delete_model_version(name, version),
    )
    return client.get_model_version(name, version)


def _compare_with_champion(
    client: Any, bundle: BundleRecord, config: RegisterConfig, version: str, champion: str | None
) -> Verdict:
    if champion is None and (history := aliases.read_history(client, config.name, config.alias)):
        last = history[-1]["version"]
        if last in aliases.list_versions(client, config.name):
            return Verdict((), (f"{config.alias} was removed from version {last}, its last holder",))
        return Verdict((), (f"version {last}, the last holder of {config.alias}, was deleted",))
    if champion is None or champion == version:
        return Verdict((), ())
    # Happens if the answer to a move was lost and another run moved the alias later.
    if int(champion) > int(version):
        return Verdict((f"version {champion} is newer and holds {config.alias}",), ())
    run_id = client.get_model_version(config.name, champion).run_id
    if not _list_bundle(client, run_id) >= {f"{BUNDLE}/{MANIFEST}", f"{BUNDLE}/{MEASUREMENTS}"}:
        reason = f"version {champion} cannot be compared: its run was deleted or was not made by optexport"
        return Verdict((reason,), ())
    with tempfile.TemporaryDirectory(prefix="optexport-") as scratch:
        try:
            documents = [_download(client, run_id, document, scratch) for document in (MANIFEST, MEASUREMENTS)]
            record = BundleRecord.read(Path(documents[0]).parent)
            return regression_gate.compare(bundle, record, config.max_regression)
        except (BundleError, ValueError, ArithmeticError) as error:
            cause = f"{error.location}: {error.message}" if isinstance(error, BundleError) else first_line(error)
            reason = f"version {champion} cannot be compared: {cause}".replace(f"{scratch}/", "")
            return Verdict((short_line(reason),), ())


def _download(client: Any, run_id: str | None, document: str, folder: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(client.download_artifacts(run_id, f"{BUNDLE}/{document}", folder))
    except MlflowException:
        _list_bundle(client, run_id)  # raises a clearer error if the server is gone
        raise


def _list_bundle(client: Any, run_id: str | None) -> set[str]:
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


def _record_reasons(client: Any, name: str, version: str, reasons: tuple[str, ...]) -> None:
    client.set_model_version_tag(name, version, REASON_TAG, redact("\n".join(reasons))[: aliases.LONGEST_TAG])


def record_decision(client: Any, name: str, version: str, moved: bool, reasons: tuple[str, ...]) -> None:
    """Stores in the tags of a version whether the alias moved to it, and the reasons."""
    _record_reasons(client, name, version, reasons)
    client.set_model_version_tag(name, version, DECISION_TAG, MOVED if moved else _STAYED)
