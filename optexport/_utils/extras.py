"""Optional packages of each extra, and the error if one is missing."""

from __future__ import annotations

import importlib.util

from optexport.errors import ConfigError

# Modules that show if an extra is installed. model_signing imports pyOpenSSL without requiring it. The extra `cuda` is
# missing here: it has the same modules as onnxruntime, so optexport.runtime.devices asks ONNX Runtime.
_MODULES = {
    "adapters": ("peft",),
    "images": ("PIL",),
    "ray": ("ray",),
    "sentence-transformers": ("sentence_transformers",),
    "trust": ("cyclonedx", "in_toto_attestation", "model_signing", "OpenSSL"),
}


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra from a checkout.

    The package is not in a registry.
    """
    return f"Install the extra from the checkout of optexport: pip install -c constraints.txt -e '.[{extra}]'"


def check_extra(extra: str, location: str, alternative: str | None = None) -> None:
    """Checks that the packages of an extra are installed, without importing them.

    Args:
        extra: The name of the extra.
        location: The key or option that needs the extra.
        alternative: A hint for an alternative without the extra.

    Raises:
        ConfigError: A package is missing.
    """
    if missing := [module for module in _MODULES[extra] if importlib.util.find_spec(module) is None]:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise ConfigError(
            f'the extra "{extra}" is not installed ({names})',
            location=location,
            hint="\n".join(filter(None, [how_to_install(extra), alternative])),
        )
