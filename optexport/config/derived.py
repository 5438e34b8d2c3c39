"""Configs made from another: with the applied rules, and without measurements. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optexport._utils.platform import processor_flags
from optexport.config.benchmarks import BenchConfig, GateConfig
from optexport.config.schema import Config, TransformationConfig
from optexport.exporters.registry import default_passes

if TYPE_CHECKING:
    from optexport.transformations.apply import NamedRule


def resolve_config(config: Config, rules: Sequence[NamedRule], output: Path | None = None) -> Config:
    """Returns the config with the applied rules.

    Args:
        output: Another output folder. The config then also loses its format passes and its lower precision.
    """
    update: dict[str, object] = {
        "transformations": [
            TransformationConfig.model_validate(
                {
                    "use": rule.name,
                    **({"min_matches": rule.min_matches} if rule.min_matches else {}),
                    **({"formats": list(rule.formats)} if rule.formats is not None else {}),
                    **rule.options,
                }
            )
            for rule in rules
        ]
    }
    if output is not None:
        name = str(Path(config.export.output).with_name(output.name))
        update["export"] = config.export.model_copy(update={"output": name, "passes": {}})
        update["precision"] = None
    return config.model_copy(update=update)


def resolve_passes(config: Config) -> Config:
    """Returns the config with the format passes of every format; the defaults are those of this processor.

    A file for another device has no default passes, and one in lower precision has few.
    """
    export = config.export
    flags = processor_flags()
    passes = {
        name: default_passes(name, flags, export.opset, config.precision.of(name) if config.precision else None)
        for name in export.formats
        if config.model.device == "cpu"
    }
    return config.model_copy(update={"export": export.model_copy(update={"passes": {**passes, **export.passes}})})


def disable_measurements(config: Config) -> Config:
    """Returns the config without benchmarks, tuning, and the gates on measurements."""
    return config.model_copy(update={"bench": BenchConfig(), "tune": None, "gate": GateConfig()})
