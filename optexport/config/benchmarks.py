"""The tables ``[bench]``, ``[tune]`` and ``[gate]``."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from optexport.config.validation import Table, shown

# Seconds. A larger budget is probably written in the wrong unit.
_MOST_BUDGET = 7 * 24 * 3600


def _named(sizes: dict[str, int]) -> dict[str, int]:
    for name in sizes:
        if not name.isidentifier():
            raise ValueError(f'"{name}" names no dimension: write letters, digits and underscores')
    return sizes


_Shape = Annotated[dict[str, Annotated[int, Field(ge=1, lt=2**31)]], AfterValidator(_named)]


class BenchConfig(Table):
    """``[bench]``: measures the latency of the exported files.

    Attributes:
        enabled: Whether the files are measured.
        shapes: The sizes to measure at, as ``[{ batch = 1, sequence = 16 }]``; by default the traced sizes.
        threads: Number of threads of each process.
        rounds: How often each file has its turn.
    """

    enabled: bool = False
    shapes: list[_Shape] = []
    threads: int = Field(default=1, ge=1, le=1024)
    rounds: int = Field(default=20, ge=1, le=10_000)


_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> int:
    """Returns the seconds of a duration such as ``5m``.

    Raises:
        ValueError: The text is not a duration. The message shows the syntax.
    """
    if not re.fullmatch(r"[0-9]{1,6}[smh]", text) or int(text[:-1]) == 0:
        raise ValueError(f'"{text}" is no time: write "90s", "5m" or "1h"')
    return int(text[:-1]) * _UNITS[text[-1]]


def _duration(text: str) -> str:
    if parse_duration(text) > _MOST_BUDGET:
        raise ValueError(f'"{text}" is more than a week: write "168h" at most')
    return text


class TuneConfig(Table):
    """``[tune]``: searches for the fastest rules and format passes.

    Attributes:
        budget: The time for the search: ``"90s"``, ``"5m"``, ``"1h"``.
    """

    budget: Annotated[str, AfterValidator(_duration)] = "5m"

    @property
    def seconds(self) -> int:
        return parse_duration(self.budget)


_Bar = Annotated[float | None, Field(gt=0)]


class BarConfig(Table):
    """A bound for exported files, for all formats or by format; a number alone is ``every``.

    Attributes:
        every: The bound of all formats that have no other.
        onnx: The bound of the ONNX file.
        torchscript: The bound of the TorchScript file.
        pt2: The bound of the ``.pt2`` file.
    """

    every: _Bar = None
    onnx: _Bar = None
    torchscript: _Bar = None
    pt2: _Bar = None

    def of(self, file_format: str) -> float | None:
        """Returns the bound of a format; None if it has none."""
        own: float | None = getattr(self, file_format)
        return self.every if own is None else own


def _as_table(value: Any) -> Any:
    if isinstance(value, dict | BarConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"it must be a number above 0, or a table of such numbers by format, not {shown(value)}")
    return {"every": value}


Bar = Annotated[BarConfig, BeforeValidator(_as_table, json_schema_input_type=Annotated[float, Field(gt=0)] | BarConfig)]


class GateConfig(Table):
    """``[gate]``: bounds for the exported files; a run that misses one fails with exit code 6.

    Attributes:
        max_size_mb: The largest size of a file, in millions of bytes.
        max_latency_ms: The largest p50 latency, in milliseconds, at each shape of ``bench``.
        min_speedup: The smallest speedup over the same format exported without rules.
    """

    max_size_mb: Bar | None = None
    max_latency_ms: Bar | None = None
    min_speedup: Bar | None = None

    @property
    def needs_times(self) -> bool:
        """True if a gate needs measured times."""
        return self.max_latency_ms is not None or self.min_speedup is not None
