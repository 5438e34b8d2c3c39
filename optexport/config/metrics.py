"""The table ``[parity.metrics]``: gates on decisions, see `optexport.parity.gates`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from optexport.config.validation import Table
from optexport.errors import did_you_mean

# The metrics, each with its smallest possible value and its options in addition to min and output.
MEASURES: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "argmax_agreement": (0.0, ()),
    "top_k_agreement": (0.0, ("k",)),
    "cosine": (-1.0, ()),
    "iou": (0.0, ("classes",)),
    "greedy_tokens": (0.0, ()),
}
METRIC = "python:"
DEFAULT_K = 5


def beside_gate(value: float, least: float, digits: int = 6) -> str:
    """Rounds a measured value for a text, but never across the minimum that it must reach."""
    rounded = f"{value:.{digits}g}"
    return rounded if (float(rounded) >= least) == (value >= least) else repr(value)


class DecisionConfig(Table):
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


def _known(gates: dict[str, DecisionConfig]) -> dict[str, DecisionConfig]:
    for name, gate in gates.items():
        if name.startswith(METRIC):
            if len([part for part in name.removeprefix(METRIC).split(":") if part]) != 2:
                raise ValueError(f'"{name}" is not of the form "python:module:function"')
            allowed: tuple[str, ...] = ()
        elif name in MEASURES:
            least, options = MEASURES[name]
            allowed = ("output", *options)
            if not least <= gate.min <= 1:
                raise ValueError(f"{name}: it lies between {least:g} and 1, so min cannot be {gate.min:g}")
        else:
            hint = did_you_mean(name, [*MEASURES, "python:module:function"])
            raise ValueError(f'there is no measure "{name}". {hint}')
        for option in ("output", "k", "classes"):
            if getattr(gate, option) is not None and option not in allowed:
                raise ValueError(f"{name} has no option {option}. {did_you_mean(option, ['min', *allowed])}")
    return gates


Decisions = Annotated[
    dict[str, Annotated[DecisionConfig, BeforeValidator(_as_table, json_schema_input_type=float | DecisionConfig)]],
    Field(min_length=1),
    AfterValidator(_known),
]
