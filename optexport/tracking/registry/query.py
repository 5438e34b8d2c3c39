"""Registered models that match a filter and whose newest version is not exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.errors import ConfigError, OptexportError, first_line
from optexport.tracking import store
from optexport.tracking.bundle_record import BUNDLE_TAG, BundleRecord
from optexport.tracking.registry import aliases

# Tag of a version: the digest of the bundle that was exported from it.
EXPORTED_TAG = "optexport.exported"


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str


def find_versions_to_export(uri: str, folder: Path, query: str) -> tuple[list[Version], list[str]]:
    """Returns the newest version of each matching model that is not exported.

    Args:
        folder: The start of a relative path in the tracking URI.
        query: A filter for ``search_registered_models``, such as ``tags.export = 'true'``.

    Returns:
        The versions to export, and the names of the skipped models. A model is skipped if its newest version has a
            bundle or is the model of one.

    Raises:
        ConfigError: The store rejects the filter.
        TrackingError: The store cannot be reached.
    """
    try:
        client = store.open_store(uri, folder)
        versions, skipped = list[Version](), list[str]()
        token: str | None = None
        while True:
            page = client.search_registered_models(filter_string=query, page_token=token)
            for model in page:
                if (version := _find_newest(client, model.name)) is None:
                    skipped.append(model.name)
                else:
                    versions.append(version)
            token = page.token
            if not token:
                return versions, skipped
    except OptexportError:
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own errors
        if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":
            raise ConfigError(
                f"the filter is not valid: {first_line(error)}",
                location=f"`from_registry={query}`",
                hint="Write a filter like \"tags.export = 'true'\" or \"name LIKE 'bert%'\".",
            ) from error
        raise store.failure(error, uri, "No config was run.") from error


def _find_newest(client: Any, name: str) -> Version | None:
    versions = client.search_model_versions(aliases.name_filter(name), order_by=["version_number DESC"], max_results=1)
    if not versions or {BUNDLE_TAG, EXPORTED_TAG} & versions[0].tags.keys():
        return None
    return Version(name, str(versions[0].version))


def mark_exported(uri: str, folder: Path, version: Version, bundle: Path) -> None:
    """Tags a version with the digest of the bundle that was exported from it.

    Raises:
        TrackingError: The store cannot be reached.
    """
    try:
        digest = BundleRecord.read(bundle).identity[BUNDLE_TAG]
        store.open_store(uri, folder).set_model_version_tag(version.name, version.version, EXPORTED_TAG, digest)
    except OptexportError:
        raise
    except Exception as error:
        raise store.failure(
            error, uri, f"The bundle {bundle} is complete, but the next batch will export it again."
        ) from error
