"""Custom code that a config may run: from a model, a plugin, a metric, or a format.

An environment variable forbids it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from optexport._utils.custom_code import VARIABLE, is_forbidden
from optexport.errors import ConfigError
from optexport.exporters.registry import BUILT_IN
from optexport.transformations import registry

if TYPE_CHECKING:
    from optexport.config.schema import Config


def check_custom_code(config: Config, location: str) -> None:
    """Checks that a config runs no custom code, if the environment forbids it.

    Raises:
        ConfigError: It runs custom code.
    """
    if not is_forbidden():
        return
    for key, code in _list_custom_code(config).items():
        raise ConfigError(
            f"{code} is custom code, and {VARIABLE} forbids custom code",
            location=f"{location}: {key}",
            hint=f"Read that code, then run again without {VARIABLE}; or remove this key.",
        )


def _list_custom_code(config: Config) -> dict[str, str]:
    """Returns descriptions of the custom code that a config runs, by key."""
    descriptions = {}
    if config.model.source.startswith(registry.PLUGIN):
        descriptions["model.source"] = f'"{config.model.source}"'
    if config.model.trust_remote_code:
        descriptions["model.trust_remote_code"] = "code in the model's folder"
    for index, rule in enumerate(config.rules()):
        if registry.canonical_name(rule.use) is None:  # from an installed package, or next to the config
            descriptions[f"transformations[{index}].use"] = f'"{rule.use}"'
    for name in config.parity.metrics or ():
        if name.startswith(registry.PLUGIN):
            descriptions[f"parity.metrics.{name}"] = f'"{name}"'
    for name in config.export.formats:
        if name not in BUILT_IN:
            descriptions["export.formats"] = f'the format "{name}" of an installed package'
    return descriptions
