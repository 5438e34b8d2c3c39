"""Search for the layers that must stay in float32 when all others are lowered.

The search lowers all layers first and ends if the gates pass. Otherwise it lowers each layer alone. The harm of a layer
is the share of a gate's margin that it uses. If all gates are on shares of rows, it is the cosine of the outputs: one
layer changes few rows, and which ones is chance. Bisection finds how few of the most harmful layers must stay in
float32. Finally each of these is lowered once more, because harm does not predict how the errors of layers add up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import fx

from optexport.bundle.manifest import GateValueRecord, LayerRecord, PrecisionRecord
from optexport.config.metrics import SHARES, round_for_gate
from optexport.errors import ConfigError, ParityError, did_you_mean
from optexport.job import Job
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.gates import GateResult
from optexport.parity.record import parity_record
from optexport.runtime.runners import Run
from optexport.transformations.cast_precision import layer_name
from optexport.transformations.merge_linears import parts_in_name

# More layers than this are grouped by the model layer that contains them.
_MAX_UNITS = 64
# Number of least harmful float32 layers that are lowered once more.
_MAX_RETRIES = 8

# Hint for names of layers that may be merged in one file and not in another.
_MERGED_HINT = (
    " [tune] may merge layers in one file and not in another: set formats of the merging rule, or remove [tune]."
)

# Opens a target with some units in float32 and all others lowered, in each way that its runtime can open it.
Make = Callable[[Collection[str]], Iterable[Run]]


@dataclass
class Choice:
    """Layers that stay in float32, with the measurements behind the choice.

    Attributes:
        precision: Precision of the other layers.
        configured: Units that the config keeps in float32.
        measured: Further units that the gates need in float32.
        by_unit: Comparison with one unit lowered, per unit; empty if not needed.
        all_lowered: Comparison with all units lowered, except those in `configured`.
        chosen: Comparison with the final choice.
        float32_operators: Number of operators with weights that the precision never lowers, by ONNX operator.
    """

    precision: str
    units: Sequence[str]
    configured: Collection[str]
    all_lowered: TargetParity
    chosen: TargetParity
    measured: list[str] = field(default_factory=list)
    by_unit: Mapping[str, TargetParity] = field(default_factory=dict)
    float32_operators: Mapping[str, int] = field(default_factory=dict)

    @property
    def float32_units(self) -> list[str]:
        """Returns all units that stay in float32."""
        return [unit for unit in self.units if unit in self.configured or unit in self.measured]

    def record(self) -> PrecisionRecord:
        """Returns the record of the choice for the manifest."""
        layers = [
            LayerRecord(
                layer=unit,
                kept="asked for" if unit in self.configured else "measured" if unit in self.measured else None,
                alone=_gate_values(self.by_unit[unit]) if unit in self.by_unit else [],
            )
            for unit in self.units
        ]
        return PrecisionRecord.model_validate(
            {
                "precision": self.precision,
                "layers": layers,
                "lowered": _gate_values(self.all_lowered),
                "chosen": _gate_values(self.chosen),
                "float32_operators": self.float32_operators,
            }
        )


def group_layers(layers: Collection[str]) -> list[str]:
    """Groups layers into units that are lowered together.

    Each layer is a unit, unless there are very many. Then all layers within one numbered layer of the model are a unit.
    """
    if len(layers) <= _MAX_UNITS:
        return list(layers)
    parts = (re.match(r".*?\.\d+(?=\.)", layer) for layer in layers)
    return list(dict.fromkeys(part.group() if part else layer for part, layer in zip(parts, layers, strict=True)))


def is_within(layer: str, names: Collection[str]) -> bool:
    """Returns True if a layer has one of the names or is inside such a module."""
    return any(f"{layer}.".startswith(f"{name}.") for name in names)


def choose_layers(
    target: str, precision: str, layers: Collection[str], keep: Collection[str], make: Make, checker: ParityChecker
) -> Choice:
    """Finds the layers that must stay in float32 to pass the gates, on the cases they count.

    Args:
        target: Name of the file or graph, for messages.
        layers: Names of layers that can be lowered, in model order.
        keep: Names of layers, or of modules that contain layers, that always stay in float32.
        make: Opens the target for a set of float32 units, in each way.
        checker: Checker with the reference and the gates.

    Raises:
        ConfigError: No layer can be lowered, or `keep` contains an unknown name.
        ParityError: The gates fail if any layer is lowered.
    """
    _check_names(target, layers, keep)
    units = group_layers(layers)
    configured = [
        unit
        for unit in units
        if is_within(unit, keep) or any(is_within(layer, keep) for layer in layers_in(unit, layers))
    ]
    free = [unit for unit in units if unit not in configured]
    if not free:
        remove = "Keep fewer layers in float32, or remove" if configured else "Remove"
        raise ConfigError(
            f"{target} has no layer to lower",
            location="precision",
            hint=f"{remove} {precision} from [precision].",
        )
    gated_checker = _on_gated_cases(checker)
    original_results = gated_checker.targets[0].gate_results

    def measure(lowered: Collection[str], ways: int | None = None) -> TargetParity:
        parities = []
        for run in islice(make([unit for unit in units if unit not in lowered]), ways):
            parities.append(gated_checker.check(target, run, precision=precision))
            if not parities[-1].passed:
                return parities[-1]
        return max(parities, key=lambda parity: _rank(parity, original_results))

    lowered_parity = measure(free)
    choice = Choice(precision, units, configured, lowered_parity, lowered_parity)
    if lowered_parity.passed:
        return choice
    choice.by_unit = {unit: measure([unit], ways=1) for unit in free} if len(free) > 1 else {free[0]: lowered_parity}
    order = sorted(free, key=lambda unit: _rank(choice.by_unit[unit], original_results), reverse=True)
    choice.chosen, choice.measured = measure(order[-1:]), order[:-1]
    if not choice.chosen.passed:
        raise _no_choice_error(target, choice, order[-1], checker)

    def passes(float32_units: Sequence[str]) -> bool:
        parity = measure([unit for unit in free if unit not in float32_units])
        if parity.passed:
            choice.chosen, choice.measured = parity, list(float32_units)
        return parity.passed

    failing, passing = 0, len(order) - 1  # number of float32 units that fails, and number that passes
    while passing - failing > 1:
        middle = (failing + passing) // 2
        failing, passing = (failing, middle) if passes(order[:middle]) else (middle, passing)
    for unit in choice.measured[::-1][:_MAX_RETRIES]:
        passes([other_unit for other_unit in choice.measured if other_unit != unit])
    return choice


def _check_names(target: str, layers: Collection[str], keep: Collection[str]) -> None:
    for name in keep:
        if not any(is_within(layer, [name]) for layer in layers):
            merged = any(one.rstrip("-").endswith("-merged") for one in (name, *layers))
            raise ConfigError(
                f'{target} has no layer "{name}" that can be lowered',
                location="precision.keep_float32",
                hint=did_you_mean(name, layers) + (_MERGED_HINT if merged else ""),
            )


class LayerChoices:
    """The choices of a run, because tuning and the export may lower the same graph or file, and a search is slow."""

    def __init__(self) -> None:
        self._choices: dict[tuple[str, ...], Choice] = {}

    def choose(
        self,
        content: str | None,
        target: str,
        precision: str,
        layers: Collection[str],
        keep: Collection[str],
        make: Make,
        checker: ParityChecker,
    ) -> Choice:
        """Calls `choose_layers`, unless it was called for the same content, precision and cases.

        Args:
            content: Digest of the graph or file; None if it is unknown.
        """
        key = (content or "", precision, *(case.name for case in gated_cases(checker)))
        if content is None or key not in self._choices:
            self._choices[key] = choose_layers(target, precision, layers, keep, make, checker)
        return self._choices[key]


def layers_in(unit: str, layers: Collection[str]) -> list[str]:
    """Returns the layers of a unit."""
    return [layer for layer in layers if is_within(layer, [unit])]


def find_layers(names: Collection[str], layers: Collection[str]) -> list[str]:
    """Returns the layers of a file that have the names of layers or units of another file, where others are merged."""
    resolved = [layer for name in names for layer in _resolve_name(name, layers)]
    return [layer for layer in layers if is_within(layer, resolved)]


def measure_harm(target: TargetParity, original_results: Sequence[GateResult]) -> float:
    """Returns the largest share of a gate's or fixed tolerance's margin that a target uses.

    Args:
        target: Comparison of the target.
        original_results: Gate results of the original.

    Returns:
        The share; above 1 the target fails.
    """
    shares = [0.0]
    for gate_result, original in zip(target.gate_results, original_results, strict=True):
        lost, room = original.value - gate_result.value, original.value - gate_result.gate.min
        shares.append(math.inf if math.isnan(lost) else lost / room if room > 0 else math.inf if lost > 0 else 0.0)
    for case in (case for output in target.outputs for case in output.cases):
        if case.distance == math.inf:  # the outputs cannot be compared
            shares.append(math.inf)
        elif math.isfinite(case.limit) and case.distance > 0:
            shares.append(case.distance / case.limit if case.limit else math.inf)
    return max(shares)


def _rank(target: TargetParity, original_results: Sequence[GateResult]) -> tuple[float, float]:
    """Returns a key that is larger for a more harmful layer: harm, then cosine.

    If all gates are on shares of rows, the harm only tells whether the layer fails alone.
    """
    harm = measure_harm(target, original_results)
    has_shares_only = all(result.gate.measure in SHARES for result in target.gate_results)
    return float(harm > 1) if has_shares_only else harm, -min((output.cosine for output in target.outputs), default=1.0)


def gated_cases(checker: ParityChecker) -> list[Case]:
    """Returns the cases that the gates count: user data, or otherwise generated inputs."""
    names = {name for gate in checker.gates for name in gate.cases}
    return [case for case in checker.reference.cases if case.name in names]


def _on_gated_cases(checker: ParityChecker) -> ParityChecker:
    names = [case.name for case in gated_cases(checker)]
    indices = [index for index, case in enumerate(checker.reference.cases) if case.name in names]
    return ParityChecker(checker.reference.select(indices), checker.tolerances, checker.gates)


def list_failures(target: TargetParity) -> list[str]:
    """Returns the reasons why a target fails."""
    outputs = [f"{output.output}, {output.failure}" for output in target.outputs if output.failure is not None]
    return outputs + [gate_result.failure for gate_result in target.gate_results if gate_result.failure is not None]


def _no_choice_error(target: str, choice: Choice, unit: str, checker: ParityChecker) -> ParityError:
    lines = [f"all layers lowered: {'; '.join(list_failures(choice.all_lowered))}"]
    if len(choice.by_unit) > 1:
        lines.append(f"nearest, only {unit} lowered: {'; '.join(list_failures(choice.chosen))}")
    return ParityError(
        f"no choice of layers in {choice.precision} passes the gates",
        location=target,
        details="\n".join(lines),
        hint=f"Lower the gates in parity.metrics, or remove {choice.precision} from [precision].",
        parity=parity_record(checker),
    )


def _gate_values(target: TargetParity) -> list[GateValueRecord]:
    return [
        GateValueRecord(
            measure=gate_result.gate.measure,
            output=gate_result.gate.output,
            value=float(round_for_gate(gate_result.value, gate_result.gate.min))
            if math.isfinite(gate_result.value)
            else None,
            min=gate_result.gate.min,
        )
        for gate_result in target.gate_results
    ]


def check_passed(target: TargetParity, checker: ParityChecker) -> None:
    """Rejects a target of lower precision that fails on all cases together.

    Other targets pass here, because they have their own error.

    Raises:
        ParityError: The target failed.
    """
    if target.precision is not None and not target.passed:
        raise ParityError(
            f"{target.precision} fails a gate that it passed when the layers were chosen",
            location=target.target,
            details="\n".join(list_failures(target)),
            hint="Add layers to precision.keep_float32, or remove the format from [precision].",
            parity=parity_record(checker),
        )


def resolve_keep_float32(job: Job, graph_module: fx.GraphModule, layers: Collection[str]) -> Collection[str]:
    """Returns the configured float32 layers that exist in a file.

    If several files are lowered, a name may belong to layers of another file only. An embedding, for example, always
    stays in float32 in an ONNX file.
    """
    precision = job.config.precision
    assert precision is not None
    keep = [layer for name in precision.keep_float32 for layer in _resolve_name(name, layers)]
    if sum(precision.of(name) is not None for name in job.config.export.formats) < 2:
        return keep
    all_layers = {name for name, _ in (*job.loaded.model.named_modules(), *graph_module.named_modules())}
    all_layers |= {layer_name(node) for node in graph_module.graph.nodes if node.op == "call_function"}
    other_files = [
        name
        for name in keep
        if any(is_within(layer, [name]) for layer in all_layers)
        and not any(is_within(layer, [name]) for layer in layers)
    ]
    return [name for name in keep if name not in other_files]


def _resolve_name(name: str, layers: Collection[str]) -> list[str]:
    """Resolves a layer name to itself, the layer it is merged into, or its parts.

    Merging of layers may differ between files, and `[tune]` decides it by measurement.
    """
    if any(is_within(layer, [name]) for layer in layers):
        return [name]
    merged = [layer for layer in layers if name in parts_in_name(layer)]
    return merged or [part for part in parts_in_name(name) if part in layers] or [name]
