"""The table ``[parity.metrics]``: gates on decisions, see `optexport.parity.gates`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from optexport.config.validation import InvalidValueError, Table
from optexport.errors import did_you_mean

# The metrics, each with its smallest possible value and its options in addition to min and output.
METRICS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "argmax_agreement": (0.0, ()),
    "top_k_agreement": (0.0, ("k",)),
    "cosine": (-1.0, ()),
    "iou": (0.0, ("classes",)),
    "greedy_tokens": (0.0, ()),
}
# The metrics that are a share of agreements.
SHARES = ("argmax_agreement", "top_k_agreement", "greedy_tokens")
_COUNTED = {
    "argmax_agreement": "positions",
    "top_k_agreement": "positions",
    "greedy_tokens": "sequences",
    "cosine": "rows",
    "iou": "masks",
}
# The metric that a decoder in lower precision must have; its minimum also applies to the new tokens.
GENERATION_METRIC = "argmax_agreement"
# The prefix of a metric that is a Python function.
CUSTOM_METRIC = "python:"
DEFAULT_K = 5


def counted_unit(measure: str) -> str:
    """Returns what a metric counts, in the plural."""
    return _COUNTED.get(measure, "batches")


def round_for_gate(value: float, minimum: float, digits: int = 6) -> str:
    """Rounds a measured value for a text, but never across the minimum that it must reach."""
    rounded = f"{value:.{digits}g}"
    return rounded if (float(rounded) >= minimum) == (value >= minimum) else repr(value)


class MetricGateConfig(Table):
    """A gate on a metric; a number alone is its ``min``.

    Attributes:
        min: The smallest value that passes.
        output: The output that is measured; by default every floating point output that fits.
        k: How many labels ``top_k_agreement`` compares; by default 5.
        classes: For ``iou``, whether channels of masks are classes that exclude each other; by default true.
    """

    min: float
    output: str | None = None
    k: int | None = Field(default=None, ge=1)
    classes: bool | None = None


def _as_table(value: Any) -> Any:
    return {"min": value} if isinstance(value, int | float) else value


def _check_metrics(gates: dict[str, MetricGateConfig]) -> dict[str, MetricGateConfig]:
    for name, gate in gates.items():
        allowed = ("min", *_allowed_options(name, gate))
        for option in ("output", "k", "classes"):
            if getattr(gate, option) is not None and option not in allowed:
                raise InvalidValueError(f'{name} has no option "{option}"', did_you_mean(option, allowed))
    return gates


def _allowed_options(name: str, gate: MetricGateConfig) -> tuple[str, ...]:
    """Returns the options of a metric besides ``min``; checks its name and its minimum."""
    if name.startswith(CUSTOM_METRIC):
        if len([part for part in name.removeprefix(CUSTOM_METRIC).split(":") if part]) != 2:
            raise InvalidValueError(
                f'"{name}" is not of the form "python:module:function"',
                'Write the module and its function, such as "python:my_metrics:f1".',
            )
        return ()
    if name not in METRICS:
        raise InvalidValueError(f'unknown metric "{name}"', did_you_mean(name, [*METRICS, "python:module:function"]))
    smallest, options = METRICS[name]
    if not smallest <= gate.min <= 1:
        raise InvalidValueError(
            f"expected a min of {name} between {smallest:g} and 1, found {gate.min:g}",
            f"Write {name} = 0.99, or another number in this range.",
        )
    return ("output", *options)


MetricGates = Annotated[
    dict[str, Annotated[MetricGateConfig, BeforeValidator(_as_table, json_schema_input_type=float | MetricGateConfig)]],
    Field(min_length=1),
    AfterValidator(_check_metrics),
]
