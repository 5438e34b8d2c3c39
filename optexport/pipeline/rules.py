"""The rules of a run: those of its config, or the preset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optexport.config.schema import Config
from optexport.errors import ConfigError, did_you_mean
from optexport.transformations import registry
from optexport.transformations.apply import NamedRule


def load_rules(config: Config, folder: Path, without: Sequence[str]) -> tuple[NamedRule, ...]:
    """Returns the rules of a config, or the preset, except the omitted ones.

    Args:
        folder: The folder of the config, which may contain plugins.
        without: Names of rules to omit.

    Raises:
        ConfigError: The config does not have an omitted rule, or a rule cannot be loaded.
    """
    omitted = {registry.canonical_name(name) or name for name in without}
    named = [(registry.canonical_name(rule.use) or rule.use, rule) for rule in config.rules()]
    for name in omitted - {name for name, _ in named}:
        raise ConfigError(
            f"the config has no rule {name}",
            location=f"`without={name}`",
            hint=did_you_mean(name, [n for n, _ in named]),
        )
    return tuple(
        NamedRule(
            name,
            rule.options,
            registry.load(name, rule.options, folder, f"transformations[{index}]"),
            rule.min_matches or 0,
            formats=None if rule.formats is None else tuple(rule.formats),
        )
        for index, (name, rule) in enumerate(named)
        if name not in omitted
    )


def load_preset() -> tuple[NamedRule, ...]:
    """Returns the default rules."""
    return tuple(load_rule(name) for name in registry.PRESET)


def load_rule(name: str) -> NamedRule:
    """Returns a rule by its name, without options, for a call from Python."""
    return NamedRule(name, {}, registry.load(name, {}, Path(), "transformations"), in_python=True)
