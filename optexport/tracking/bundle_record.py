"""A complete bundle, read once for the upload to MLflow."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field

from optexport.bundle import digest_json, digests
from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured
from optexport.config.providers import OnnxConfig
from optexport.config.registration import RegisterConfig
from optexport.config.schema import TrackingConfig
from optexport.errors import BundleError

# Artifact path of the bundle in its run.
BUNDLE = "bundle"
# Tags with the digest of the manifest, which equal runs share, and of the measurements, which are unique to a run.
BUNDLE_TAG = "optexport.bundle"
RUN_TAG = "optexport.measurements"


class _Output(BaseModel):
    output: str
    onnx: OnnxConfig = OnnxConfig()


class BundleSettings(BaseModel):
    """Settings of a bundle's config for its upload and its registration."""

    export: _Output
    tracking: TrackingConfig
    # BaseModel inherits a `register` method from ABCMeta.
    registering: RegisterConfig | None = Field(default=None, alias="register")


@dataclass(frozen=True)
class BundleRecord:
    """A complete bundle: everything that an upload needs.

    Attributes:
        folder: The folder of the bundle.
        manifest: Its manifest.
        settings: The settings for its upload and its registration.
        measurements: The values that differ between equal runs.
        identity: The tags that identify its run. They stay the same if the report is written again.
        timestamp: The creation time in milliseconds since 1970. MLflow stores a metric once if it is sent twice with
            the same timestamp.
    """

    folder: Path
    manifest: Manifest
    settings: BundleSettings
    measurements: Measured
    identity: Mapping[str, str]
    timestamp: int

    @classmethod
    def read(cls, folder: Path) -> BundleRecord:
        """Reads the manifest and the measurements of a bundle; other files are not checked.

        Raises:
            BundleError: A document is missing or changed, has another schema, or belongs to another bundle.
        """
        manifest, document = digests.read_manifest_only(folder), digest_json.read(folder / MEASUREMENTS)
        if document.get("manifest") != manifest.digest:
            raise BundleError("the measurements belong to another bundle", location=str(folder / MEASUREMENTS))
        settings = digest_json.validated(BundleSettings, manifest.config, folder / MANIFEST)
        measurements = digest_json.validated(Measured, document, folder / MEASUREMENTS)
        try:
            timestamp = datetime.datetime.fromisoformat(measurements.date).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise BundleError(f"the date is not valid: {error}", location=str(folder / MEASUREMENTS)) from error
        if timestamp < 0:  # MLflow rejects negative timestamps
            raise BundleError(
                f"the date is before 1970 (found {measurements.date})", location=str(folder / MEASUREMENTS)
            )
        unchanging = {key: value for key, value in document.items() if key not in ("digest", "report_sha256")}
        digest = hashlib.sha256(json.dumps(unchanging, sort_keys=True).encode()).hexdigest()
        identity = {BUNDLE_TAG: measurements.manifest, RUN_TAG: digest}
        return cls(folder, manifest, settings, measurements, identity, int(timestamp * 1000))
