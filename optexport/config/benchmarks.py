"""The tables ``[bench]``, ``[tune]`` and ``[gate]``."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from optexport.config.validation import InvalidValueError, Table, dimension_name, show_value
from optexport.errors import did_you_mean
from optexport.exporters.registry import list_formats

# Seconds. A larger budget is probably written in the wrong unit.
_MAX_BUDGET = 7 * 24 * 3600
_UNITS = {"s": 1, "m": 60, "h": 3600}


def _check_names(sizes: dict[str, int]) -> dict[str, int]:
    for name in sizes:
        dimension_name(name)
    return sizes


_Shape = Annotated[dict[str, Annotated[int, Field(ge=1, lt=2**31)]], AfterValidator(_check_names)]


class BenchConfig(Table):
    """``[bench]``: measures the latency of the exported files.

    Attributes:
        enabled: Whether the files are measured.
        shapes: The sizes to measure at, as ``[{ batch = 1, sequence = 16 }]``; by default the traced sizes.
        threads: Number of threads of each process, and of the comparison with PyTorch that every run makes.
        rounds: How often each file has its turn.
    """

    enabled: bool = False
    shapes: list[_Shape] = []
    threads: int = Field(default=1, ge=1, le=1024)
    rounds: int = Field(default=20, ge=1, le=10_000)


def parse_duration(text: str) -> int:
    """Returns the seconds of a duration such as ``5m``.

    Raises:
        InvalidValueError: The text is not a duration. The hint shows the syntax.
    """
    if not re.fullmatch(r"[0-9]{1,6}[smh]", text) or int(text[:-1]) == 0:
        raise InvalidValueError(
            f'"{text}" is not a duration', 'Write a number and a unit, such as "90s", "5m" or "1h".'
        )
    return int(text[:-1]) * _UNITS[text[-1]]


def _check_budget(text: str) -> str:
    if parse_duration(text) > _MAX_BUDGET:
        raise InvalidValueError(f'"{text}" is more than a week', 'Write "168h" or less.')
    return text


class TuneConfig(Table):
    """``[tune]``: searches for the fastest rules and format passes.

    Attributes:
        budget: The time of the whole run: ``"90s"``, ``"5m"``, ``"1h"``.
    """

    budget: Annotated[str, AfterValidator(_check_budget)] = "5m"

    @property
    def seconds(self) -> int:
        return parse_duration(self.budget)


_Limit = Annotated[float | None, Field(gt=0)]


class FormatLimits(Table):
    """Limits of exported files, for all formats or by format; a number alone is ``every``.

    Attributes:
        every: The limit of all formats without a limit of their own.
        onnx: The limit of the ONNX file.
        torchscript: The limit of the TorchScript file.
        pt2: The limit of the ``.pt2`` file.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Field(gt=0)]]
    every: _Limit = None
    onnx: _Limit = None
    torchscript: _Limit = None
    pt2: _Limit = None

    @model_validator(mode="after")
    def _check_formats(self) -> FormatLimits:
        for name in self.__pydantic_extra__:
            if name not in list_formats():
                raise InvalidValueError(f'unknown format "{name}"', did_you_mean(name, ("every", *list_formats())))
        return self

    @property
    def by_format(self) -> dict[str, float]:
        """The limits that are set, by format or ``every``."""
        limits: dict[str, float | None] = self.model_dump()
        return {name: limit for name, limit in limits.items() if limit is not None}

    def of(self, file_format: str) -> float | None:
        """Returns the limit of a format; None if it has none."""
        return self.by_format.get(file_format, self.every)


def _as_table(value: Any) -> Any:
    if isinstance(value, dict | FormatLimits):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidValueError(
            f"expected a number above 0, or a table of such numbers by format, found {show_value(value)}",
            "Write a number, such as 20, or a table, such as { onnx = 20 }.",
        )
    return {"every": value}


FormatLimit = Annotated[
    FormatLimits, BeforeValidator(_as_table, json_schema_input_type=Annotated[float, Field(gt=0)] | FormatLimits)
]


class GateConfig(Table):
    """``[gate]``: limits of the exported files; a run that misses one fails with exit code 6.

    Attributes:
        max_size_mb: The largest size of a file, in millions of bytes.
        max_latency_ms: The largest median latency, in milliseconds, at each shape of ``bench``.
        min_speedup: The smallest speedup over the same format exported without rules; the lower end of the 95 %
            interval counts.
    """

    max_size_mb: FormatLimit | None = None
    max_latency_ms: FormatLimit | None = None
    min_speedup: FormatLimit | None = None

    @property
    def needs_times(self) -> bool:
        """True if a gate needs measured times."""
        return self.max_latency_ms is not None or self.min_speedup is not None
