"""Registered models that ask for a bundle: those that a filter finds, and whose newest version has none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optexport.errors import ConfigError, OptexportError, first_line
from optexport.tracking import aliases, store
from optexport.tracking.bundle_record import BUNDLE_TAG, BundleRecord

# Of a version: the bundle that was made of it.
EXPORTED_TAG = "optexport.exported"


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    name: str
    version: str


def wanted(uri: str, folder: Path, query: str) -> tuple[list[Version], list[str]]:
    """The newest version of each model that a filter of MLflow's finds, but for those that have a bundle, or are one.

    The names of the models of these come second.

    Args:
        folder: What a relative path in the URI is taken from.
        query: As ``search_registered_models`` takes it: ``tags.export = 'true'``.

    Raises:
        ConfigError: The store does not understand the filter.
        TrackingError: It cannot be reached.
    """
    try:
        client = store.open_store(uri, folder)
        found, left = list[Version](), list[str]()
        token: str | None = None
        while True:
            page = client.search_registered_models(filter_string=query, page_token=token)
            for model in page:
                if (version := _newest(client, model.name)) is None:
                    left.append(model.name)
                else:
                    found.append(version)
            token = page.token
            if not token:
                return found, left
    except OptexportError:
        raise
    except Exception as error:  # mlflow, SQLAlchemy and requests each raise their own
        if getattr(error, "error_code", None) == "INVALID_PARAMETER_VALUE":
            raise ConfigError(
                f"MLflow does not understand it: {first_line(error)}",
                location=f"--from-registry {query}",
                hint="Write a filter of registered models, as in \"tags.export = 'true'\" or \"name LIKE 'bert%'\".",
            ) from error
        raise store.failure(error, uri, "Nothing was run.") from error


def _newest(client: Any, name: str) -> Version | None:
    versions = client.search_model_versions(aliases.named(name), order_by=["version_number DESC"], max_results=1)
    if not versions or {BUNDLE_TAG, EXPORTED_TAG} & versions[0].tags.keys():
        return None
    return Version(name, str(versions[0].version))


def mark(uri: str, folder: Path, version: Version, bundle: Path) -> None:
    """Notes at a version that a bundle was made of it.

    Raises:
        TrackingError: The store cannot be reached.
    """
    try:
        digest = BundleRecord.read(bundle).identity[BUNDLE_TAG]
        store.open_store(uri, folder).set_model_version_tag(version.name, version.version, EXPORTED_TAG, digest)
    except OptexportError:
        raise
    except Exception as error:
        raise store.failure(error, uri, f"{bundle} is whole; the next batch makes it again.") from error
