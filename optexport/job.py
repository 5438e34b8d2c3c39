"""What a run is asked to do, once its config is read and its model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from optexport.bundle import layout
from optexport.bundle.manifest import ArtifactRecord
from optexport.bundle.measurements import Origin
from optexport.config.benchmarks import BenchConfig, GateConfig
from optexport.config.schema import Config, Format, TransformationConfig
from optexport.errors import ConfigError, TraceError, did_you_mean
from optexport.loading.loader import Loaded
from optexport.parity.gates import Metric
from optexport.signature.signature import Batch, Dim, Dynamic
from optexport.transformations import registry
from optexport.transformations.apply import NamedRule, Transformed


@dataclass(frozen=True)
class Variant:
    """The formats that share a graph, and the rules that are applied to it.

    Attributes:
        precision: What the graph is cast to after these; None where it stays as it is.
    """

    formats: tuple[Format, ...]
    rules: tuple[NamedRule, ...]
    precision: str | None = None


@dataclass(frozen=True)
class VariantResult:
    """What came of a branch.

    Attributes:
        artifacts: Its files, in the draft of the bundle.
        kept: The formats whose files were taken from an earlier run.
    """

    branch: Variant
    transformed: Transformed
    artifacts: tuple[ArtifactRecord, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Everything that a run needs to know, once its config is read and its model is loaded.

    Attributes:
        example: The batch to trace with.
        real: The user's batches to check on.
        dump: A folder to write the graph to, before and after every transformation.
        rows: How many rows the user's data have, where they were cut into batches.
        metrics: The user's own metrics that gates are on, by name.
        beside: What a failed proof leaves its folder beside, where that is not the output.
        declared: Whether the sizes in ``dynamic`` are what somebody asked for.
        origin: What the bundle is made of.
    """

    config: Config
    loaded: Loaded
    example: Batch
    real: tuple[Batch, ...]
    dynamic: Dynamic | None
    rules: tuple[NamedRule, ...]
    output: Path
    config_text: str | None = None
    dump: Path | None = None
    rows: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    beside: Path | None = None
    declared: bool = True
    origin: Origin = field(default_factory=Origin)

    def holding(self, held: Mapping[str, torch.Tensor]) -> Job:
        """The same with some inputs held to values, which the model then no longer takes.

        Raises:
            TraceError: The user's data hold other values.
        """
        if not held:
            return self
        for name, value in held.items():
            if any(not torch.equal(batch[name], value) for batch in self.real):
                raise TraceError(
                    "the model can be traced for one value of it alone, and the data hold several",
                    location=f"inputs: {name}",
                    hint="Export once for each.",
                )
        example, *real = (
            {name: tensor for name, tensor in batch.items() if name not in held} for batch in (self.example, *self.real)
        )
        loaded = self.loaded.holding(list(self.example), held)
        return replace(self, loaded=loaded, example=example, real=tuple(real))

    @property
    def failure(self) -> Path:
        """The folder that is left if the proof fails."""
        return layout.beside(self.beside or self.output, "failure")

    @property
    def variants(self) -> list[Variant]:
        """The graphs that are made of the trace: formats for which the same rules are applied share one.

        Files of PyTorch are lowered in their graph, an ONNX file once it is written.
        """
        found: dict[tuple[tuple[int, ...], str | None], list[Format]] = {}
        for name in dict.fromkeys(self.config.export.formats):
            applied = (i for i, rule in enumerate(self.rules) if rule.formats is None or name in rule.formats)
            precision = None if name == "onnx" else self.precision_of(name)
            found.setdefault((tuple(applied), precision), []).append(name)
        return [
            Variant(tuple(formats), tuple(self.rules[i] for i in applied), precision)
            for (applied, precision), formats in found.items()
        ]

    def precision_of(self, file_format: Format) -> str | None:
        """What a file is lowered to; None where it is of the model's own precision."""
        return None if self.config.precision is None else self.config.precision.of(file_format)

    @property
    def sizes_declared(self) -> bool:
        """Whether somebody said which sizes the model takes, rather than leaving it to be found out."""
        dims = [dim for axes in (self.dynamic or {}).values() for dim in axes.values()]
        return self.declared and any(isinstance(dim, Dim) for dim in dims)


def rules_of(config: Config, folder: Path, without: Sequence[str]) -> tuple[NamedRule, ...]:
    """The rules that a config names, or the preset, but for those to leave out.

    Raises:
        ConfigError: A rule is to be left out that the config does not have, or one cannot be made.
    """
    left_out = {registry.canonical_name(name) or name for name in without}
    named = [(registry.canonical_name(rule.use) or rule.use, rule) for rule in config.rules()]
    for name in left_out - {name for name, _ in named}:
        raise ConfigError(
            "this run has no such rule",
            location=f"--without {name}",
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
        if name not in left_out
    )


def resolved(config: Config, rules: Sequence[NamedRule], output: Path | None = None) -> Config:
    """The config with the rules that are applied; in another place, if one is given, and with nothing but these."""
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


def unmeasured(config: Config) -> Config:
    """The config without measuring and tuning, and without gates on what is measured."""
    return config.model_copy(update={"bench": BenchConfig(), "tune": None, "gate": GateConfig()})


def preset() -> tuple[NamedRule, ...]:
    """The rules that are applied where none are named."""
    return tuple(
        NamedRule(name, {}, registry.load(name, {}, Path(), "preset"), in_python=True) for name in registry.PRESET
    )
