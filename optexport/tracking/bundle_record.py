"""A bundle that is whole, read once for all that MLflow is told of it."""

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
from optexport.config.registration import RegisterConfig
from optexport.config.schema import TrackingConfig
from optexport.errors import BundleError

# Where in the artifacts of a run its bundle lies.
BUNDLE = "bundle"
# The digest of a manifest, which equal runs share, and that of what was measured, which is of one run alone.
BUNDLE_TAG = "optexport.bundle"
RUN_TAG = "optexport.measurements"


class _Output(BaseModel):
    output: str


class Asked(BaseModel):
    """What the config of a bundle says of where it is to be sent, and under what name."""

    export: _Output
    tracking: TrackingConfig
    # BaseModel has a `register` of its own, from ABCMeta.
    registering: RegisterConfig | None = Field(default=None, alias="register")


@dataclass(frozen=True)
class BundleRecord:
    """A bundle that is whole, which is all that a run needs to be told.

    Attributes:
        measured: What differs between equal runs.
        identity: The tags by which a run is found again, also where the report was written again, and so its digest.
        timestamp: When it was made, in milliseconds. With a time of its own a metric that is sent twice is there once.
    """

    folder: Path
    manifest: Manifest
    asked: Asked
    measured: Measured
    identity: Mapping[str, str]
    timestamp: int

    @classmethod
    def read(cls, folder: Path) -> BundleRecord:
        """Reads the two documents of a bundle; its other files are not checked.

        Raises:
            BundleError: A document was changed, is missing, of another form, or of another bundle.
        """
        manifest, document = digests.manifest_alone(folder), digest_json.read(folder / MEASUREMENTS)
        if document.get("manifest") != manifest.digest:
            raise BundleError("it belongs to another bundle", location=str(folder / MEASUREMENTS))
        asked = digest_json.validated(Asked, manifest.config, folder / MANIFEST)
        measured = digest_json.validated(Measured, document, folder / MEASUREMENTS)
        try:
            made = datetime.datetime.fromisoformat(measured.date).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise BundleError(f"its date is none: {error}", location=str(folder / MEASUREMENTS)) from error
        if made < 0:  # which MLflow does not take
            raise BundleError(f"its date is before 1970: {measured.date}", location=str(folder / MEASUREMENTS))
        lasting = {key: value for key, value in document.items() if key not in ("digest", "report_sha256")}
        digest = hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()
        identity = {BUNDLE_TAG: measured.manifest, RUN_TAG: digest}
        return cls(folder, manifest, asked, measured, identity, int(made * 1000))
