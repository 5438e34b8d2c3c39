"""Search for the layers that must stay in float32 when all others are lowered.

The search lowers all layers first and ends if the gates pass. Otherwise it lowers each layer alone. The harm of a layer
is the share of a gate's margin that it uses. Bisection finds how few of the most harmful layers must stay in float32.
Finally each of these is lowered once more, because harm does not predict how the errors of layers add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from optexport.bundle.manifest import GateValueRecord, LayerRecord, PrecisionRecord
from optexport.config.metrics import beside_gate
from optexport.errors import ConfigError, ParityError, did_you_mean
from optexport.parity.cases import Case
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.gates import Decision
from optexport.parity.record import parity_record
from optexport.runtime.runners import Run

# More layers than this are grouped by the model layer that contains them.
_MOST_LAYERS = 64
# Number of least harmful float32 layers that are lowered once more.
_MOST_AGAIN = 8

# Hint for names of layers that may be merged in one file and not in another.
_MERGED = " Whether layers are merged, [tune] decides, where it is there: say formats of the rule, or leave [tune] out."

# Opens a target with some units in float32 and all others lowered.
Make = Callable[[Collection[str]], Run]


@dataclass
class Choice:
    """Layers that stay in float32, with the measurements behind the choice.

    Attributes:
        precision: Precision of the other layers.
        asked: Units that the config keeps in float32.
        measured: Further units that the gates need in float32.
        alone: Comparison with one unit lowered, per unit; empty if not needed.
        everything: Comparison with all units lowered, except those in `asked`.
        chosen: Comparison with the final choice.
    """

    precision: str
    units: Sequence[str]
    asked: Collection[str]
    everything: TargetParity
    chosen: TargetParity
    measured: list[str] = field(default_factory=list)
    alone: Mapping[str, TargetParity] = field(default_factory=dict)

    @property
    def kept(self) -> list[str]:
        """Returns all units that stay in float32."""
        return [unit for unit in self.units if unit in self.asked or unit in self.measured]

    def record(self) -> PrecisionRecord:
        """Returns the record of the choice for the manifest."""
        layers = [
            LayerRecord(
                layer=unit,
                kept="asked for" if unit in self.asked else "measured" if unit in self.measured else None,
                alone=_values(self.alone[unit]) if unit in self.alone else [],
            )
            for unit in self.units
        ]
        return PrecisionRecord.model_validate(
            {
                "precision": self.precision,
                "layers": layers,
                "lowered": _values(self.everything),
                "chosen": _values(self.chosen),
            }
        )


def units_of(layers: Collection[str]) -> list[str]:
    """Groups layers into units that are lowered together.

    Each layer is a unit, unless there are very many. Then all layers within one numbered layer of the model are a unit.
    """
    if len(layers) <= _MOST_LAYERS:
        return list(layers)
    parts = (re.match(r".*?\.\d+(?=\.)", layer) for layer in layers)
    return list(dict.fromkeys(part.group() if part else layer for part, layer in zip(parts, layers, strict=True)))


def within(layer: str, names: Collection[str]) -> bool:
    """Checks if a layer has one of the names or is inside such a module."""
    return any(f"{layer}.".startswith(f"{name}.") for name in names)


def choose(
    target: str, precision: str, layers: Collection[str], keep: Collection[str], make: Make, proof: ParityChecker
) -> Choice:
    """Finds the layers that must stay in float32 to pass the gates, on the cases they count.

    Args:
        target: Name of the file or graph, for messages.
        layers: Names of layers that can be lowered, in model order.
        keep: Names of layers, or of modules that contain layers, that always stay in float32.
        make: Opens the target for a set of float32 units.
        proof: Checker with the reference and the gates.

    Raises:
        ConfigError: No layer can be lowered, or `keep` contains an unknown name.
        ParityError: The gates fail if any layer is lowered.
    """
    for name in keep:
        if not any(within(layer, [name]) for layer in layers):
            merged = any(one.rstrip("-").endswith("-merged") for one in (name, *layers))
            raise ConfigError(
                f'{target} has no layer "{name}" that could be lowered',
                location="precision.keep_float32",
                hint=did_you_mean(name, layers) + (_MERGED if merged else ""),
            )
    units = units_of(layers)
    asked = [
        unit for unit in units if within(unit, keep) or any(within(layer, keep) for layer in layers_in(unit, layers))
    ]
    free = [unit for unit in units if unit not in asked]
    if not free:
        raise ConfigError(
            f"{target} has no layer to lower",
            location="precision",
            hint=f"Keep less, or leave {precision} out." if asked else f"Leave {precision} out.",
        )
    small = _on_gated_cases(proof)
    own = small.targets[0].decisions

    def measure(lowered: Collection[str]) -> TargetParity:
        return small.check(target, make([unit for unit in units if unit not in lowered]), precision=precision)

    found = measure(free)
    choice = Choice(precision, units, asked, found, found)
    if found.passed:
        return choice
    choice.alone = {unit: measure([unit]) for unit in free} if len(free) > 1 else {free[0]: found}
    order = sorted(free, key=lambda unit: harm(choice.alone[unit], own), reverse=True)
    choice.chosen, choice.measured = choice.alone[order[-1]], order[:-1]
    if not choice.chosen.passed:
        raise _nothing_passes(target, choice, order[-1], proof)

    def passes(kept: Sequence[str]) -> bool:
        attempt = measure([unit for unit in free if unit not in kept])
        if attempt.passed:
            choice.chosen, choice.measured = attempt, list(kept)
        return attempt.passed

    few, many = 0, len(order) - 1  # number of float32 units that fails, and number that passes
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if passes(order[:middle]) else (middle, many)
    for unit in choice.measured[::-1][:_MOST_AGAIN]:
        passes([other for other in choice.measured if other != unit])
    return choice


def layers_in(unit: str, layers: Collection[str]) -> list[str]:
    """Returns the layers of a unit."""
    return [layer for layer in layers if within(layer, [unit])]


def harm(target: TargetParity, own: Sequence[Decision]) -> float:
    """Returns the largest share of a gate's or fixed tolerance's margin that a target uses.

    Args:
        target: Comparison of the target.
        own: Decisions of the original.

    Returns:
        The share; above 1 the target fails.
    """
    shares = [0.0]
    for decision, original in zip(target.decisions, own, strict=True):
        lost, room = original.value - decision.value, original.value - decision.gate.min
        shares.append(math.inf if math.isnan(lost) else lost / room if room > 0 else math.inf if lost > 0 else 0.0)
    for case in (case for output in target.outputs for case in output.cases):
        if case.distance == math.inf:  # the outputs cannot be compared
            shares.append(math.inf)
        elif math.isfinite(case.limit) and case.distance > 0:
            shares.append(case.distance / case.limit if case.limit else math.inf)
    return max(shares)


def gated_cases(proof: ParityChecker) -> list[Case]:
    """Returns the cases that the gates count: user data, or otherwise generated inputs."""
    names = {name for gate in proof.gates for name in gate.cases}
    return [case for case in proof.reference.cases if case.name in names]


def _on_gated_cases(proof: ParityChecker) -> ParityChecker:
    names = [case.name for case in gated_cases(proof)]
    indices = [index for index, case in enumerate(proof.reference.cases) if case.name in names]
    return ParityChecker(proof.reference.only(indices), proof.bounds, proof.gates)


def failures(target: TargetParity) -> list[str]:
    """Returns the reasons why a target fails."""
    outputs = [f"{output.output}, {output.failure}" for output in target.outputs if output.failure is not None]
    return outputs + [decision.failure for decision in target.decisions if decision.failure is not None]


def _nothing_passes(target: str, choice: Choice, least: str, proof: ParityChecker) -> ParityError:
    lines = [f"all lowered: {'; '.join(failures(choice.everything))}"]
    if len(choice.alone) > 1:
        lines.append(f"nearest, {least} alone lowered: {'; '.join(failures(choice.chosen))}")
    return ParityError(
        f"{choice.precision} passes the gates with no choice of layers\n  " + "\n  ".join(lines),
        location=target,
        hint=f"Lower the gates in parity.metrics, or leave {choice.precision} out of [precision].",
        parity=parity_record(proof),
    )


def _values(target: TargetParity) -> list[GateValueRecord]:
    return [
        GateValueRecord(
            measure=decision.gate.measure,
            output=decision.gate.output,
            value=float(beside_gate(decision.value, decision.gate.min)) if math.isfinite(decision.value) else None,
            min=decision.gate.min,
        )
        for decision in target.decisions
    ]
