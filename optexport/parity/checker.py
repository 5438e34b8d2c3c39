"""Comparison of targets with the reference, within the measured tolerance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from optexport._utils.platform import is_of_memory
from optexport.errors import ExportError, first_line
from optexport.parity import distances
from optexport.parity.gates import Decision, Gate, judge
from optexport.parity.noise_floor import Tolerance, of_lower_precision
from optexport.parity.reference import Outputs, Reference, kept
from optexport.runtime.runners import Run

# Names of targets.
ORIGINAL = "original"
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
        multiple: ``max_abs`` divided by the noise floor.
        step: Distance from the target that this one derives from, so the change of this step.
        argmax_agreement: Share of positions with the same largest element along the last axis.
        tolerance: Smallest absolute tolerance, relative to the original, that passes.
        worst_case: Case of ``max_abs``.
        cases: Comparison on each case, extreme ones included.
    """

    output: str
    max_abs: float
    max_rel: float
    cosine: float
    floor: float
    limit: float
    multiple: float
    step: float
    argmax_agreement: float
    tolerance: float
    worst_case: str
    cases: tuple[CaseParity, ...]

    @property
    def failure(self) -> str | None:
        """Returns the first failing case and its reason, or None if all cases pass."""
        return next((f"at {case.case}: {case.failure}" for case in self.cases if case.failure is not None), None)

    @property
    def passed(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class TargetParity:
    """Comparison of one target, over all outputs.

    Attributes:
        made_from: Target that this one derives from. A transformed graph derives from the original, an optimized file
            from the file before optimization, any other target from the transformed graph. A target in lower precision
            derives from the one before lowering.
        decisions: Result of each gate.
        precision: Precision that the target was lowered to. Its gates then decide instead of the noise floor.
    """

    target: str
    outputs: tuple[OutputParity, ...]
    made_from: str
    decisions: tuple[Decision, ...] = ()
    precision: str | None = None

    @property
    def title(self) -> str:
        """Returns the target's name, with its precision if that differs from the original's."""
        return self.target if self.precision is None else f"{self.target} ({self.precision})"

    @property
    def passed(self) -> bool:
        return self.near and all(decision.passed for decision in self.decisions)

    @property
    def near(self) -> bool:
        """Checks if all distances pass, regardless of the gates."""
        return all(output.passed for output in self.outputs)


class ParityChecker:
    """Compares every target with the original and with the target it derives from.

    Attributes:
        targets: Comparison of each target, in the order of the checks; the original comes first.
    """

    def __init__(self, reference: Reference, tolerances: Mapping[str, Tolerance], gates: Sequence[Gate] = ()) -> None:
        self.reference = reference
        self.bounds = tolerances
        self.gates = tuple(gates)
        self.targets: list[TargetParity] = []
        self._results: dict[str, dict[str, Outputs | str]] = {}
        self._add(ORIGINAL, list(reference.outputs), reference)

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
            ExportError: Memory ran out, so the results are unknown.
        """
        reference = self.reference.at_traced_shape() if traced_shape_only else self.reference
        results: list[Outputs | str] = []
        with torch.no_grad():
            for case in reference.cases:
                try:
                    result = run(case.batch)
                except Exception as error:  # each runtime raises its own error types
                    if is_of_memory(error):
                        raise _memory_error(target, case.name) from error
                    results.append(f"it raised {type(error).__name__}: {first_line(error)[:200]}")
                else:
                    results.append(kept(case, result))
        return self.take(target, results, traced_shape_only=traced_shape_only, precision=precision)

    def take(
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

    def extend(self, reference: Reference, tolerances: Mapping[str, Tolerance]) -> None:
        """Adds cases with their own limits; later checks include them.

        Args:
            found: The new cases and their reference outputs.
            bounds: Tolerance on these cases, per output. Outputs without one are not limited there.
        """
        self.reference = self.reference.followed_by(reference)
        extended = {}
        for name, bound in self.bounds.items():
            limit = tolerances[name].limit if name in tolerances else math.inf
            limits = dict.fromkeys((case.name for case in reference.cases), 0.0 if bound.fixed else limit)
            extended[name] = replace(bound, extremes={**bound.extremes, **limits})
        self.bounds = extended

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
        tolerances = self.bounds if precision is None else of_lower_precision(self.bounds, reference)
        empty = {name for name in tolerances if not any(outputs_of_case[name].numel() for outputs_of_case in self.reference.outputs)}
        uncounted = self._uncounted(reference) if precision is not None else frozenset()
        outputs = (
            _compare(name, results, results_before, reference, bound, always_empty=name in empty, uncounted=uncounted)
            for name, bound in tolerances.items()
        )
        decisions = tuple(judge(gate, results, reference) for gate in self.gates)
        self.targets = [checked for checked in self.targets if checked.target != target]
        self.targets.append(TargetParity(target, tuple(outputs), made_from, decisions, precision))
        return self.targets[-1]

    def _uncounted(self, reference: Reference) -> frozenset[str]:
        """Returns the ordinary cases that gates skip because they use user data only."""
        counted = {case for gate in self.gates for case in gate.cases}
        real = any(gate.real for gate in self.gates)
        return frozenset(c.name for c in reference.cases if real and not c.extreme and c.name not in counted)


# Limits for files of lower precision on cases that no gate counts. The distance is relative to the length of the output
# as a vector. The limit only detects a different model: a cosine similarity of 0.87 is equally far.
_GROSS = 0.5
# Also relative to the largest value of any ordinary case. An output that is close to zero, such as the distance of a
# row to itself, is noise in any precision.
_GROSS_OF_LARGEST = 0.05


def _largest(name: str, reference: Reference) -> float:
    ordinary = [o[name] for case, o in zip(reference.cases, reference.outputs, strict=True) if not case.extreme]
    return max(distances.largest(distances.finite(output).abs()) for output in ordinary)


def _memory_error(target: str, case: str) -> ExportError:
    return ExportError(
        f"there was not enough memory to run it at {case}, where the original ran",
        location=target,
        hint='Free memory, or prove less at a time: parity.effort = "quick", or smaller ranges in inputs.dynamic.',
    )


def _compare(
    name: str,
    results: Sequence[Outputs | str],
    results_before: Sequence[Outputs | str],
    reference: Reference,
    bound: Tolerance,
    *,
    always_empty: bool,
    uncounted: Collection[str] = (),
) -> OutputParity:
    max_abs = max_rel = tolerance = step = 0.0
    cosine, agreements, worst = 1.0, list[float](), reference.cases[0].name
    compared: list[CaseParity] = []
    for index, (case, result) in enumerate(zip(reference.cases, results, strict=True)):
        original, exact = reference.outputs[index][name], reference.exact[index][name]
        problem = result if isinstance(result, str) else distances.why_incomparable(result.get(name), original)
        if problem is not None:
            compared.append(CaseParity(case.name, math.inf, bound.limit, problem))
            max_abs = max_rel = tolerance = step = math.inf
            cosine, worst = 0.0, case.name
            agreements.append(0.0)
            continue
        assert not isinstance(result, str)
        candidate = result[name]
        expected = original if bound.fixed else distances.known(exact, original)
        distance, magnitude = distances.distance(candidate, expected), distances.finite(expected).abs()
        farthest = distances.largest(distance)
        allowed = bound.allowed(case.name, magnitude)
        if not bound.fixed and math.isfinite(bound.limit) and original.is_floating_point():
            own = 16 * distances.LEAST_FLOOR_ULPS * torch.finfo(original.dtype).eps * magnitude
            allowed = torch.where(distances.marks(original, exact), own, allowed)
        limit = distances.largest(allowed)
        wrong = bool((distance > allowed).any())
        failure = None
        if wrong and original.is_floating_point():
            worst_at = torch.where(distance > allowed, distance, -1.0).argmax()
            apart, most = (float(each.expand_as(distance).flatten()[worst_at]) for each in (distance, allowed))
            failure = f"{apart:.3g} from the reference, {most:.3g} allowed"
        elif wrong:
            failure = _other_numbers(candidate, original, exact)
        elif case.name in uncounted and original.is_floating_point() and not bound.fixed:
            apart, whole = float(distance.norm()), float(magnitude.norm())
            if apart > _GROSS * whole and farthest > _GROSS_OF_LARGEST * _largest(name, reference):
                failure = f"{apart:.3g} from the reference as a whole, which is {whole:.3g} long; gates are on the data"
        compared.append(CaseParity(case.name, farthest, limit, failure))
        nearness = distances.largest(distances.distance(candidate, original))
        if case.name in bound.extremes:
            tolerance = max(tolerance, nearness if wrong else 0.0)
            continue
        if farthest >= max_abs:
            max_abs, worst = farthest, case.name
        least = max(1e-6 * distances.largest(magnitude), 1e-300)
        max_rel = max(max_rel, distances.largest(distance / magnitude.clamp(min=least)))
        tolerance = max(tolerance, nearness)
        if (
            not isinstance(before := results_before[index], str)
            and name in before
            and before[name].shape == candidate.shape
        ):
            step = max(step, distances.largest(distances.distance(candidate, before[name])))
        cosine = min(cosine, distances.cosine(candidate, expected))
        agreements.append(distances.argmax_agreement(candidate, original))
    originals = [outputs[name] for outputs in reference.outputs]
    if not always_empty and not any(bool(torch.isfinite(original).any()) for original in originals):
        numbers_given = any(original.numel() for original in originals)
        problem = f"the original gives nothing{' but NaN or infinity' * numbers_given}, so nothing is proven"
        compared[0] = replace(compared[0], failure=compared[0].failure or problem)
    multiple = 0.0 if max_abs == 0 else math.inf if bound.floor == 0 else max_abs / bound.floor
    agreement = sum(agreements) / len(agreements) if agreements else 1.0  # extreme cases alone have no agreements
    numbers = (max_abs, max_rel, cosine, bound.floor, bound.limit, multiple, step, agreement, tolerance)
    return OutputParity(name, *numbers, worst, tuple(compared))


def _other_numbers(candidate: torch.Tensor, original: torch.Tensor, exact: torch.Tensor) -> str:
    """Describes how many integers or booleans differ, and if rounding alone explains it."""
    text = f"{int((candidate != original).sum())} of {original.numel()} values are others"
    if not (decided := int((exact != original).sum())):
        return text
    return (
        f"{text}; the original itself gives others in float64, {decided} of them: rounding decides. Export in a higher "
        "precision, or leave the output out (keep-outputs)"
    )
