"""Code of others that a config may call: a model's, a plugin's, a metric's. A platform can forbid it altogether."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from optexport.errors import ConfigError
from optexport.transformations import registry

if TYPE_CHECKING:
    from optexport.config.schema import Config

# Set to anything but 0, it holds for the whole process, also for its children and for calls from Python.
VARIABLE = "OPTEXPORT_NO_CUSTOM_CODE"


def check_custom_code(config: Config, location: str) -> None:
    """Checks that a config calls no code of others, where that is forbidden.

    Raises:
        ConfigError: It does.
    """
    if os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    for key, what in _called(config).items():
        raise ConfigError(
            f"{what} is code of others, and {VARIABLE} or --no-custom-code forbids to run any",
            location=f"{location}: {key}",
            hint="Read that code, and run the config without the option; or do without that code.",
        )


def _called(config: Config) -> dict[str, str]:
    """What a config calls, by the key that names it."""
    called = {}
    if config.model.source.startswith(registry.PLUGIN):
        called["model.source"] = f'"{config.model.source}"'
    if config.model.trust_remote_code:
        called["model.trust_remote_code"] = "what a model's folder brings"
    for index, rule in enumerate(config.rules()):
        if registry.canonical_name(rule.use) is None:  # of an installed package, or beside the config
            called[f"transformations[{index}].use"] = f'"{rule.use}"'
    for name in config.parity.metrics or ():
        if name.startswith(registry.PLUGIN):
            called[f"parity.metrics.{name}"] = f'"{name}"'
    return called
