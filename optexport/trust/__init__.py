"""Signing: what a folder holds is signed by a key, with a statement of where it comes from and what was installed.

The one door to ``model_signing``, ``cyclonedx`` and ``in_toto_attestation``, optional packages: their extra is
``optexport[trust]``. Needs no torch.

Raises:
    ConfigError: On import, where one of them is missing.
"""

from __future__ import annotations

import importlib.util

from optexport.errors import ConfigError

# pyOpenSSL is what model_signing imports and does not ask for.
for _name in ("cyclonedx", "in_toto_attestation", "model_signing", "OpenSSL"):
    if importlib.util.find_spec(_name) is None:
        raise ConfigError(f"{_name} is not installed", place="signing", mend='pip install "optexport[trust]"')
