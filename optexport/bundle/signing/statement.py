"""The origin of a bundle as an in-toto statement with SLSA provenance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1.statement import STATEMENT_TYPE_URI, Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from packageurl import PackageURL

from optexport.bundle.layout import MEASUREMENTS, STATEMENT
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import read_measured
from optexport.errors import BundleError

PREDICATE = "https://slsa.dev/provenance/v1"
# Build type: the external parameters have the meaning that the config page documents.
BUILD = "urn:optexport:run:v1"


def make(folder: Path, bundles: Mapping[Path, Manifest], files: Mapping[str, str]) -> str:
    """Returns the statement for files, based on the manifests and measurements of bundles.

    Args:
        folder: The folder that paths of files are relative to.
        bundles: The manifests by folder; several for a generative model.
        files: The SHA-256 by path.

    Raises:
        BundleError: The measurements of a bundle have another schema.
    """
    try:
        document = _document(folder, bundles, files)
        _parse(document)
    except (LookupError, TypeError, AttributeError, json_format.Error) as error:
        raise BundleError("the measurements lack fields of a statement", location=str(folder / MEASUREMENTS)) from error
    return f"{json.dumps(document, indent=2, ensure_ascii=False)}\n"


def check(folder: Path, bundles: Mapping[Path, Manifest], files: Mapping[str, str]) -> None:
    """Checks that the statement in a folder is valid and covers these files and models.

    Args:
        files: The SHA-256 by path of all files that the statement must cover.

    Raises:
        BundleError: The statement is missing, invalid, or of other files or models.
    """
    try:
        document = json.loads((folder / STATEMENT).read_text(encoding="utf-8"))
        _parse(document)
        stated = {subject["name"]: subject["digest"]["sha256"] for subject in document["subject"]}
        dependencies = document["predicate"]["buildDefinition"]["resolvedDependencies"]
        models = [dependency for dependency in dependencies if dependency.get("name") == "model"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, json_format.Error) as error:
        raise BundleError(
            f"the file is not a statement of a bundle: {error}", location=str(folder / STATEMENT)
        ) from error
    if len(stated) != len(document["subject"]) or stated != files:
        raise BundleError("the statement lists other files than the folder contains", location=str(folder / STATEMENT))
    if models != list(_models(folder, bundles)):
        raise BundleError("the statement names another model than the manifest", location=str(folder / STATEMENT))


def _document(folder: Path, bundles: Mapping[Path, Manifest], files: Mapping[str, str]) -> dict[str, Any]:
    (location, manifest), *_ = bundles.items()
    measured = read_measured(location)
    origin = measured.origin
    run = {} if origin.mlflow_run is None else {"invocationId": origin.mlflow_run}
    host = quote(measured.host, safe="")
    return {
        "_type": STATEMENT_TYPE_URI,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"config": manifest.config},
                "resolvedDependencies": [
                    *_models(folder, bundles),
                    *_configs(folder, location, files, origin.lock_sha256),
                    *_code(origin.git),
                    *_packages(manifest),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": f"urn:optexport:host:{host}",
                    "version": {name: manifest.versions[name] for name in ("optexport", "python")},
                },
                "metadata": {**run, "finishedOn": measured.date},
            },
        },
    }


def _parse(document: Any) -> None:
    """Validates a document against the published in-toto and SLSA schemas."""
    if not isinstance(document, dict) or document.get("predicateType") != PREDICATE:
        raise ValueError(f"the predicate type is not {PREDICATE}")
    Statement.copy_from_pb(json_format.ParseDict(document, StatementMessage())).validate()
    json_format.ParseDict(document["predicate"], provenance_pb2.Provenance())


def _models(folder: Path, bundles: Mapping[Path, Manifest]) -> Iterator[dict[str, Any]]:
    for location, manifest in bundles.items():
        model = manifest.model
        annotations = {"source": model.source, "class": model.class_name}
        annotations |= {} if model.revision is None else {"revision": model.revision}
        annotations |= {} if location == folder else {"part": location.name}
        # This is a digest of the state_dict's names, dtypes, shapes and bytes, and not of a file.
        yield {"name": "model", "digest": {"weightsSha256": model.weights_sha256}, "annotations": annotations}


def _configs(folder: Path, location: Path, files: Mapping[str, str], lock: str | None) -> Iterator[dict[str, Any]]:
    config = (location / "config.toml").relative_to(folder).as_posix()
    if config in files:
        yield {"name": "config", "digest": {"sha256": files[config]}}
    if lock is not None:
        yield {"name": "lock", "digest": {"sha256": lock}}


def _code(git: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    if "commit" in git:
        uri = {"uri": f"git+{git['repository']}"} if "repository" in git else {}
        branch = {"annotations": {"branch": git["branch"]}} if "branch" in git else {}
        yield {"name": "repository", **uri, "digest": {"gitCommit": git["commit"]}, **branch}


def _packages(manifest: Manifest) -> Iterator[dict[str, Any]]:
    for name, version in manifest.versions.items():
        if name != "python":
            yield {"name": name, "uri": PackageURL("pypi", name=name, version=version).to_string()}
