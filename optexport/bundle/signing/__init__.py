"""Signing: what a folder holds is signed by a key, with a statement of where it comes from and what was installed.

The one door to ``model_signing``, ``cyclonedx`` and ``in_toto_attestation``, optional packages: their extra is
``trust``. Needs no torch.

Raises:
    ConfigError: On import, where one of them is missing.
"""

from __future__ import annotations

from optexport._utils.extras import check_extra

check_extra("trust", "signing")
