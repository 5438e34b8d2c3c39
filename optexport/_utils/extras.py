"""Packages that only some work needs: which extra of this one brings them, and what is told where one is missing."""

from __future__ import annotations

import importlib.util

from optexport.errors import ConfigError

# The modules that are imported of each extra; pyOpenSSL is what model_signing imports and does not ask for. That of
# `cuda` has the modules of onnxruntime itself, so that only ONNX Runtime can tell, see optexport.runtime.devices.
_MODULES = {
    "adapters": ("peft",),
    "images": ("PIL",),
    "ray": ("ray",),
    "sentence-transformers": ("sentence_transformers",),
    "trust": ("cyclonedx", "in_toto_attestation", "model_signing", "OpenSSL"),
}


def how_to_install(extra: str) -> str:
    """The command for an extra. The package is in no registry: it is installed from a checkout."""
    return f"In the checkout of optexport: pip install -c constraints.txt -e '.[{extra}]'"


def check_extra(extra: str, location: str, otherwise: str | None = None) -> None:
    """Checks that what an extra brings is installed, without importing it.

    Args:
        location: What needs it.
        otherwise: What can be done without it.

    Raises:
        ConfigError: It is not.
    """
    for module in _MODULES[extra]:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"it needs the extra {extra}, of which {module} is not installed",
                location=location,
                hint="\n  ".join(filter(None, [how_to_install(extra), otherwise])),
            )
