"""Comparison of targets with the reference, within the measured tolerance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from optexport._utils.platform import is_of_memory
from optexport.bundle.parity_records import ORIGINAL
from optexport.errors import DeviceError, ExportError, describe_error
from optexport.parity import distances
from optexport.parity.gates import Gate, GateResult, judge
from optexport.parity.metrics import unpadded_positions
from optexport.parity.noise_floor import Tolerance, relax_for_lower_precision
from optexport.parity.reference import Outputs, Reference, store_results
from optexport.runtime.runners import Run

# Names of targets.
GRAPH = "graph"
ONNX = "onnx"
ONNX_OPTIMIZED = "onnx-optimized"
# The ONNX file before its precision is lowered.
ONNX_FLOAT32 = "onnx-float32"
ONNX_FLOAT32_OPTIMIZED = "onnx-float32-optimized"
# Targets that another file was optimized or lowered from, instead of the last graph.
_MADE_FROM = {ONNX_OPTIMIZED: ONNX, ONNX_FLOAT32_OPTIMIZED: ONNX_FLOAT32, ONNX: ONNX_FLOAT32}


@dataclass(frozen=True)
class CaseParity:
    """Comparison of one output on one case.

    Attributes:
        distance: Largest distance of an element from the reference.
        limit: Largest allowed distance of any element.
        failure: Reason for the failure; None if the case passes.
    """

    case: str
    distance: float
    limit: float
    failure: str | None = None


@dataclass(frozen=True)
class OutputParity:
    """Comparison of one output of a target.

    Distances are maxima over elements and ordinary cases.

    Attributes:
        max_abs: Distance from the reference: float64, or the original if the tolerance is fixed.
        max_rel: Distance relative to the reference's element, or to a millionth of its largest value if that is more.
        cosine: Smallest cosine similarity with the reference over the cases; 1 is the same direction.
        floor: Noise floor: the original's own distance from float64.
        limit: Largest distance that passes.
        floor_ratio: ``max_abs`` divided by the noise floor.
        step: Distance from the target that this one derives from: the change of this step.
        argmax_agreement: Share of positions with the same largest element along the last axis.
        passing_atol: Smallest absolute tolerance that passes, for distances from the original.
        worst_case: Case of ``max_abs``.
        cases: Comparison on each case, extreme ones included.
    """

    output: str
    max_abs: float
    max_rel: float
    cosine: float
    floor: float
    limit: float
    floor_ratio: float
    step: float
    argmax_agreement: float
    passing_atol: float
    worst_case: str
    cases: tuple[CaseParity, ...]

    @property
    def failure(self) -> str | None:
        """Returns the first failing case and its reason, or None if all cases pass."""
        return next((f"at {case.case}: {case.failure}" for case in self.cases if case.failure is not None), None)

    @property
    def passed(self) -> bool:
        return self.failure is None


@dataclass(frozen=True, repr=False)
class TargetParity:
    """Comparison of one target, over all outputs.

    Attributes:
        made_from: Target that this one derives from. A transformed graph derives from the original, an optimized file
            from the file before optimization, any other target from the transformed graph. A target in lower precision
            derives from the one before lowering.
        gate_results: Result of each gate.
        precision: Precision that the target was lowered to. Its gates then decide instead of the noise floor.
    """

    target: str
    outputs: tuple[OutputParity, ...]
    made_from: str
    gate_results: tuple[GateResult, ...] = ()
    precision: str | None = None

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        within = sum(output.passed for output in self.outputs)
        return f"TargetParity({self.title}, {verdict}, {within} of {len(self.outputs)} outputs within tolerance)"

    @property
    def title(self) -> str:
        """Returns the target's name, with its precision if that differs from the original's."""
        return self.target if self.precision is None else f"{self.target} ({self.precision})"

    @property
    def passed(self) -> bool:
        return self.outputs_passed and all(gate_result.passed for gate_result in self.gate_results)

    @property
    def outputs_passed(self) -> bool:
        """Returns True if all distances pass, regardless of the gates."""
        return all(output.passed for output in self.outputs)


class ParityChecker:
    """Compares every target with the original and with the target it derives from.

    Attributes:
        tolerances: Tolerance of each output.
        targets: Comparison of each target, in the order of the checks; the original comes first.
    """

    def __init__(self, reference: Reference, tolerances: Mapping[str, Tolerance], gates: Sequence[Gate] = ()) -> None:
        self.reference = reference
        self.tolerances = tolerances
        self.gates = tuple(gates)
        self.targets: list[TargetParity] = []
        self._results: dict[str, dict[str, Outputs | str]] = {}
        self._add(ORIGINAL, list(reference.outputs), reference)

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"ParityChecker({verdict}, {', '.join(target.title for target in self.targets)})"

    @property
    def passed(self) -> bool:
        return all(target.passed for target in self.targets)

    def result(self, target: str, case: str) -> Outputs | str:
        """Returns the outputs of a target on a case, or the message of its error.

        Args:
            target: Name of the target.
            case: Name of the case.
        """
        return self._results[target][case]

    def results(self, target: str) -> list[Outputs]:
        """Returns the outputs of a target on each case that raised no error.

        Args:
            target: Name of the target.
        """
        return [result for result in self._results[target].values() if not isinstance(result, str)]

    def check(
        self, target: str, run: Run, *, traced_shape_only: bool = False, precision: str | None = None
    ) -> TargetParity:
        """Runs a target on the cases and compares it with the reference.

        A target that raises fails with that error; this is how a baked-in size shows. A second check of the same target
        replaces the first one.

        Args:
            target: Name of the target.
            run: Runs the target on a batch.
            traced_shape_only: Use only the cases with the shapes of the traced case.
            precision: Precision that the target was lowered to. Then only atol and rtol limit distances, if set.

        Raises:
            DeviceError: The target cannot run on this machine.
            ExportError: Memory ran out, so the results are unknown.
        """
        reference = self.reference.at_traced_shape() if traced_shape_only else self.reference
        results: list[Outputs | str] = []
        with torch.no_grad():
            for case in reference.cases:
                try:
                    result = run(case.batch)
                except DeviceError:
                    raise
                except Exception as error:  # each runtime raises its own error types
                    if is_of_memory(error):
                        raise _memory_error(target, case.name) from error
                    results.append(f"the target raised {describe_error(error)[:200]}")
                else:
                    results.append(store_results(case, result))
        return self.check_results(target, results, traced_shape_only=traced_shape_only, precision=precision)

    def check_results(
        self,
        target: str,
        results: Sequence[Outputs | str],
        *,
        traced_shape_only: bool = False,
        precision: str | None = None,
    ) -> TargetParity:
        """Compares results that exist already with the reference.

        Args:
            target: Name of the target.
            results: Outputs, or the message of an error, per case.
            traced_shape_only: Use only the cases with the shapes of the traced case.
            precision: Precision that the target was lowered to.
        """
        reference = self.reference.at_traced_shape() if traced_shape_only else self.reference
        return self._add(target, list(results), reference, precision)

    def add_cases(self, reference: Reference, tolerances: Mapping[str, Tolerance]) -> None:
        """Adds cases with their own limits; later checks include them.

        Args:
            reference: The new cases and their reference outputs.
            tolerances: Tolerance on these cases, per output. Outputs without one are not limited there.
        """
        self.reference = self.reference.concatenate(reference)
        extended = {}
        for name, tolerance in self.tolerances.items():
            limit = tolerances[name].limit if name in tolerances else math.inf
            limits = dict.fromkeys((case.name for case in reference.cases), 0.0 if tolerance.fixed else limit)
            extended[name] = replace(tolerance, own_limits={**tolerance.own_limits, **limits})
        self.tolerances = extended

    def _add(
        self, target: str, results: list[Outputs | str], reference: Reference, precision: str | None = None
    ) -> TargetParity:
        graphs = [name for name in self._results if name.startswith(GRAPH)]
        if _MADE_FROM.get(target) in self._results:
            made_from = _MADE_FROM[target]
        elif target.startswith(GRAPH) and precision is not None:  # a cast graph derives from the graph before it
            made_from = graphs[-1]
        elif target.startswith(GRAPH) or not graphs:  # a bundle contains no graph
            made_from = ORIGINAL
        else:
            made_from = graphs[-1]  # files are checked right after the graph that they are exported from
        self._results[target] = {case.name: result for case, result in zip(reference.cases, results, strict=True)}
        results_before = [self._results[made_from].get(case.name, "") for case in reference.cases]
        tolerances = self.tolerances if precision is None else relax_for_lower_precision(self.tolerances, reference)
        empty = {name for name in tolerances if not any(o[name].numel() for o in self.reference.outputs)}
        outputs = (
            _compare(
                name,
                results,
                results_before,
                reference,
                tolerance,
                always_empty=name in empty,
                uncounted=self._uncounted(reference, name) if precision is not None else (),
            )
            for name, tolerance in tolerances.items()
        )
        gate_results = tuple(judge(gate, results, reference) for gate in self.gates)
        self.targets = [checked for checked in self.targets if checked.target != target]
        self.targets.append(TargetParity(target, tuple(outputs), made_from, gate_results, precision))
        return self.targets[-1]

    def _uncounted(self, reference: Reference, output: str) -> frozenset[str]:
        """Returns the ordinary cases of an output that no gate counts: other cases than user data, or all."""
        gates = [gate for gate in self.gates if gate.output in (None, output)]
        if gates and not any(gate.is_user_data for gate in gates):
            return frozenset()
        counted = {case for gate in gates for case in gate.cases}
        return frozenset(case.name for case in reference.cases if not case.extreme and case.name not in counted)


# Limits for files of lower precision on cases that no gate counts. The distance is relative to the length of the output
# as a vector. The limit only detects a different model: a cosine similarity of 0.87 is equally far.
_GROSS = 0.5
# Also relative to the largest value of any ordinary case. An output that is close to zero, such as the distance of a
# row to itself, is noise in any precision.
_GROSS_OF_LARGEST = 0.05


def _largest(name: str, reference: Reference) -> float:
    ordinary = [o[name] for case, o in zip(reference.cases, reference.outputs, strict=True) if not case.extreme]
    return max(distances.max_magnitude(output) for output in ordinary)


def _memory_error(target: str, case: str) -> ExportError:
    return ExportError(
        f"there is not enough memory to run the target on case {case}, although the original ran there",
        location=target,
        hint='Free memory, set parity.effort = "quick", or declare smaller ranges in inputs.dynamic.',
    )


def _compare(
    name: str,
    results: Sequence[Outputs | str],
    results_before: Sequence[Outputs | str],
    reference: Reference,
    tolerance: Tolerance,
    *,
    always_empty: bool,
    uncounted: Collection[str] = (),
) -> OutputParity:
    max_abs = max_rel = passing_atol = step = 0.0
    cosine, agreements, worst_case = 1.0, list[float](), reference.cases[0].name
    compared: list[CaseParity] = []
    for index, (case, result) in enumerate(zip(reference.cases, results, strict=True)):
        original, exact = reference.outputs[index][name], reference.exact[index][name]
        problem = result if isinstance(result, str) else distances.find_comparison_problem(result.get(name), original)
        if problem is not None:
            compared.append(CaseParity(case.name, math.inf, tolerance.limit, problem))
            max_abs = max_rel = passing_atol = step = math.inf
            cosine, worst_case = 0.0, case.name
            agreements.append(0.0)
            continue
        assert not isinstance(result, str)
        candidate = result[name]
        expected = original if tolerance.fixed else distances.expected_values(exact, original)
        distance, magnitude = distances.distance(candidate, expected), distances.finite(expected).abs()
        farthest = distances.largest(distance)
        allowed = _allowed_distance(case.name, tolerance, magnitude, original, exact)
        failure = _find_failure(candidate, original, exact, distance, allowed)
        is_beyond = failure is not None
        if not is_beyond and case.name in uncounted and original.is_floating_point() and not tolerance.fixed:
            unpadded = unpadded_positions(case.batch, distance.shape[:-1])  # as the metrics do
            failure = _find_gross_failure(name, reference, distance[unpadded], magnitude[unpadded])
        compared.append(CaseParity(case.name, farthest, distances.largest(allowed), failure))
        from_original = distances.largest(distances.distance(candidate, original))
        if case.name in tolerance.own_limits:
            passing_atol = max(passing_atol, from_original if is_beyond else 0.0)
            continue
        if farthest >= max_abs:
            max_abs, worst_case = farthest, case.name
        divisor = magnitude.clamp(min=max(1e-6 * distances.largest(magnitude), 1e-300))
        max_rel = max(max_rel, distances.largest(distance / divisor))
        passing_atol = max(passing_atol, from_original)
        step = max(step, _distance_from_before(name, candidate, results_before[index]))
        cosine = min(cosine, distances.cosine(candidate, expected))
        agreements.append(distances.argmax_agreement(candidate, original))
    originals = [outputs[name] for outputs in reference.outputs]
    if not always_empty and not any(bool(torch.isfinite(original).any()) for original in originals):
        has_elements = any(original.numel() for original in originals)
        values = "only NaN or infinity" if has_elements else "no elements"
        problem = f"the original returns {values}, so nothing can be checked"
        compared[0] = replace(compared[0], failure=compared[0].failure or problem)
    return OutputParity(
        name,
        max_abs=max_abs,
        max_rel=max_rel,
        cosine=cosine,
        floor=tolerance.floor,
        limit=tolerance.limit,
        floor_ratio=0.0 if max_abs == 0 else math.inf if tolerance.floor == 0 else max_abs / tolerance.floor,
        step=step,
        argmax_agreement=sum(agreements) / len(agreements) if agreements else 1.0,  # extreme cases alone have none
        passing_atol=passing_atol,
        worst_case=worst_case,
        cases=tuple(compared),
    )


def _allowed_distance(
    case: str, tolerance: Tolerance, magnitude: torch.Tensor, original: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """Returns the allowed distance per element; mask values have their own limit."""
    allowed = tolerance.allowed(case, magnitude)
    if tolerance.fixed or not math.isfinite(tolerance.limit) or not original.is_floating_point():
        return allowed
    mask_limit = 16 * distances.MIN_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
    return torch.where(distances.is_mask_value(original, exact), mask_limit, allowed)


def _find_failure(
    candidate: torch.Tensor,
    original: torch.Tensor,
    exact: torch.Tensor,
    distance: torch.Tensor,
    allowed: torch.Tensor,
) -> str | None:
    """Describes the element that is farthest beyond its limit; None if all are within."""
    if not bool((distance > allowed).any()):
        return None
    if not original.is_floating_point():
        return _describe_other_values(candidate, original, exact)
    worst_at = torch.where(distance > allowed, distance, -1.0).argmax()
    worst, limit = (float(values.expand_as(distance).flatten()[worst_at]) for values in (distance, allowed))
    return f"off by {worst:.3g}, tolerance {limit:.3g}"


def _find_gross_failure(name: str, reference: Reference, distance: torch.Tensor, magnitude: torch.Tensor) -> str | None:
    """Describes a result of lower precision that is as far from the reference as that of another model."""
    norm, length = float(distance.norm()), float(magnitude.norm())
    if norm <= _GROSS * length or distances.largest(distance) <= _GROSS_OF_LARGEST * _largest(name, reference):
        return None
    return (
        f"the difference has a norm of {norm:.3g} and the reference one of {length:.3g}, so this may be the result of "
        "another model; the gates do not count this case"
    )


def _distance_from_before(name: str, candidate: torch.Tensor, before: Outputs | str) -> float:
    if isinstance(before, str) or name not in before or before[name].shape != candidate.shape:
        return 0.0
    return distances.largest(distances.distance(candidate, before[name]))


def _describe_other_values(candidate: torch.Tensor, original: torch.Tensor, exact: torch.Tensor) -> str:
    """Describes how many integers or booleans differ, and if rounding alone explains it."""
    text = f"{int((candidate != original).sum())} of {original.numel()} values differ"
    if not (changed := int((exact != original).sum())):
        return text
    return (
        f"{text}; the original in float64 differs from itself in {changed} values, so they depend on rounding. Export "
        "in a higher precision, or remove the output (keep-outputs)"
    )
