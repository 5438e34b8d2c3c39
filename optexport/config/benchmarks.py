"""``[bench]``, ``[tune]`` and ``[gate]``: what a run measures of its files, tries, and demands of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from optexport.config.durations import in_seconds
from optexport.config.validation import shown
from optexport.errors import ConfigError, did_you_mean

# Fewer rounds give no interval that could be believed, see optexport.bench.comparison.
LEAST_ROUNDS = 12
# Seconds; who writes more has mistaken the unit.
_MOST_BUDGET = 7 * 24 * 3600


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _named(sizes: dict[str, int]) -> dict[str, int]:
    for name in sizes:
        if not name.isidentifier():
            raise ValueError(f'"{name}" names no dimension: write letters, digits and underscores')
    return sizes


_Shape = Annotated[dict[str, Annotated[int, Field(ge=1, lt=2**31)]], AfterValidator(_named)]


class BenchConfig(_Table):
    """``[bench]``: whether exported files are measured, at which sizes, with how many threads and rounds.

    Attributes:
        enabled: Whether the files are measured.
        shapes: At which sizes, as ``[{ batch = 1, sequence = 16 }]``; by default the traced ones.
        threads: Threads of a process.
        rounds: How often each file has its turn.
    """

    enabled: bool = False
    shapes: list[_Shape] = []
    threads: int = Field(default=1, ge=1, le=1024)
    rounds: int = Field(default=20, ge=1, le=10_000)


def _duration(text: str) -> str:
    if in_seconds(text) > _MOST_BUDGET:
        raise ValueError(f'"{text}" is more than a week: write "168h" at most')
    return text


class TuneConfig(_Table):
    """``[tune]``: search for the rules and passes that pay, for so long.

    Attributes:
        budget: How long: ``"90s"``, ``"5m"``, ``"1h"``.
    """

    budget: Annotated[str, AfterValidator(_duration)] = "5m"

    @property
    def seconds(self) -> int:
        return in_seconds(self.budget)


_Bar = Annotated[float | None, Field(gt=0)]


class BarConfig(_Table):
    """A demand on all exported files, on those of some formats, or both; a number alone is ``every``.

    Attributes:
        every: Of files of which nothing else is said.
        onnx: Of the ONNX file.
        torchscript: Of the TorchScript file.
        pt2: Of the ``.pt2`` file.
    """

    every: _Bar = None
    onnx: _Bar = None
    torchscript: _Bar = None
    pt2: _Bar = None

    def of(self, file_format: str) -> float | None:
        """What is demanded of a format; None if nothing."""
        own: float | None = getattr(self, file_format)
        return self.every if own is None else own


def _as_table(value: Any) -> Any:
    if isinstance(value, dict | BarConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"it must be a number above 0, or a table of such numbers by format, not {shown(value)}")
    return {"every": value}


Bar = Annotated[BarConfig, BeforeValidator(_as_table, json_schema_input_type=Annotated[float, Field(gt=0)] | BarConfig)]


class GateConfig(_Table):
    """``[gate]``: what the exported files must keep to; a run that finds otherwise fails with exit code 6.

    Attributes:
        max_size_mb: The most bytes of a file, in millions.
        max_latency_ms: The most that its p50 may be, at each shape of ``bench``.
        min_speedup: How many times as fast it has to be as the same format exported without rules.
    """

    max_size_mb: Bar | None = None
    max_latency_ms: Bar | None = None
    min_speedup: Bar | None = None

    @property
    def needs_times(self) -> bool:
        """Whether it can be told of files only by running them."""
        return self.max_latency_ms is not None or self.min_speedup is not None


_FORMATS = ("onnx", "torchscript", "pt2")


def check_measuring(
    bench: BenchConfig,
    gate: GateConfig,
    formats: Sequence[str],
    dynamic: Mapping[str, Sequence[int]] | None,
    location: str,
) -> None:
    """Checks what the two tables say against the rest of the config.

    Args:
        formats: Those that are exported.
        dynamic: The declared dimensions with their least and largest sizes; None where the model decides.

    Raises:
        ConfigError: A gate is on a file that is not made, or a shape has a size that is not declared.
    """
    for key in ("max_size_mb", "max_latency_ms", "min_speedup"):
        bar: BarConfig | None = getattr(gate, key)
        if bar is not None and not any(bar.of(name) for name in _FORMATS):
            raise ConfigError(
                "it demands nothing", location=f"{location}: gate.{key}", hint="Write a number, or leave it out."
            )
        for own in _FORMATS if bar is not None else ():
            if getattr(bar, own) is not None and own not in formats:
                raise ConfigError(
                    "no such file is exported",
                    location=f"{location}: gate.{key}.{own}",
                    hint=f"export.formats is {', '.join(formats)}.",
                )
    if gate.min_speedup is not None and bench.rounds < LEAST_ROUNDS:
        raise ConfigError(f"gate.min_speedup needs at least {LEAST_ROUNDS}", location=f"{location}: bench.rounds")
    if dynamic is None:  # only the trace tells the dimensions
        return
    for index, shape in enumerate(bench.shapes):
        for name, size in shape.items():
            where = f"{location}: bench.shapes[{index}].{name}"
            if name not in dynamic:
                raise ConfigError(
                    "inputs.dynamic has no such dimension", location=where, hint=did_you_mean(name, dynamic)
                )
            low, high = dynamic[name]
            if not low <= size <= high:
                raise ConfigError(f"inputs.dynamic.{name} is {low} to {high}, not {size}", location=where)
