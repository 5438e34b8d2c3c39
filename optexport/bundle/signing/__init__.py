"""Signatures of bundles, with a statement of origin and a list of installed packages.

Only this package imports ``model_signing``, ``cyclonedx`` and ``in_toto_attestation``. They belong to the extra
``trust``. Needs no torch.

Raises:
    ConfigError: On import, if one of them is missing.
"""

from __future__ import annotations

from optexport._utils.extras import check_extra

check_extra("trust", "signing")
