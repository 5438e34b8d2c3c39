"""First divergence between the values of a target and of the original, along a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from optexport.diagnosis.intermediates import Observed, Value
from optexport.errors import describe_error
from optexport.parity import distances

# Values agree up to this many times the rounding of the value itself. A later node may round its input more often than
# the node it is compared with.
_TIMES = 8
_ULPS = 16
_EXACT = 1e-9  # relative, for float64, where rounding is far smaller
# A difference smaller than this share of the output's difference is not the divergence, if rounding can explain it.
# Such rounding comes from new weights, which are stored in float32, or from operators that compute in another way.
_SHARE = 1e-3
_STORED = 1e-6
_COARSEST_ULPS = 64
_PEEK = 64
_NEAR = 1.1


@dataclass(frozen=True)
class Divergence:
    """First node whose value differs from the expected value.

    Attributes:
        node: Name in the correct graph, or in the target if the target raised.
        operation: Module or operator of the node.
        distance: Largest distance of an element; infinite if the values cannot be compared.
        scale: Largest expected magnitude.
        limit: Largest distance that rounding explains.
        in_target: Name in the target, and the operator that computes it there; None if the target raised.
        description: The difference, in words.
        agreeing: Inputs of the node that agree.
    """

    node: str
    operation: str
    distance: float
    scale: float
    limit: float
    in_target: tuple[str, str] | None
    description: str
    agreeing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Node-by-node comparison of two runs on one batch.

    Attributes:
        matched: Name in the target for each value of the original that agrees with one.
        divergence: First divergence; None if the outputs agree.
    """

    matched: dict[str, str]
    divergence: Divergence | None


def compare(original: Observed, candidate: Observed, exact: Observed | None, *, by_name: bool) -> Comparison:
    """Finds the first divergence on the path to an output that differs.

    The search walks back from the output along values that differ. It skips values of the original that the target does
    not compute, for example because a runtime fuses two steps.

    Args:
        original: Values of the correct graph.
        candidate: Values of the target.
        exact: The original in float64, which measures rounding; None if both runs are in float64 already.
        by_name: True if equal names mean equal values. Otherwise any value that agrees is a match.
    """
    rounding, coarsest = _rounding(original, exact)
    matched = _matched(original, candidate, exact, rounding, by_name)
    if candidate.raised is not None:
        name, error = candidate.raised
        operation = original.values[name].operation if by_name and name in original.values else ""
        return Comparison(matched, Divergence(name, operation, math.inf, math.nan, 0.0, None, f"raises {error}"))
    leaves = _leaves(original, candidate, by_name)
    differing = {
        mine: theirs
        for mine, theirs in leaves.items()
        if not _agree(original.values[mine], candidate.values[theirs], exact, rounding)
    }
    if not differing:
        return Comparison(matched, None)
    share = max(_relative(original.values[mine], candidate.values[theirs]) for mine, theirs in differing.items())
    rounding = max(rounding, min(_SHARE * share, coarsest))
    matched = _matched(original, candidate, exact, rounding, by_name)
    reached = _ancestors(original, differing, matched)
    reached_in_target = _ancestors(candidate, differing.values(), set(matched.values()))
    unmatched = [value for name, value in candidate.values.items() if name in reached_in_target]
    kinds = {value.kind for value in unmatched}
    for name, value in original.values.items():
        if name not in reached:
            continue
        named = by_name and name in candidate.values
        if name not in differing and not named and (by_name or value.kind not in kinds):
            continue
        if name in differing:
            actual = candidate.values[differing[name]]
        elif named:
            actual = candidate.values[name]
        else:
            by_distance = {v.name: _distance(value, v) for v in unmatched if v.kind == value.kind}
            limit = _NEAR * min(by_distance.values())
            # The last match, because a layer's product precedes the sum with its bias.
            actual = [v for v in unmatched if by_distance.get(v.name, math.inf) <= limit][-1]
        read = candidate.needs.get(actual.name, ()) if by_name else matched.values()
        agreeing = tuple(need for need in original.needs.get(name, ()) if matched.get(need) in read)
        divergence = _divergence(value, actual, exact, rounding, agreeing)
        if by_name and matched.get(name) == name:  # the value agrees, so the output is another node
            divergence = replace(divergence, description=f"the output is {actual.name} instead", agreeing=())
        return Comparison(matched, divergence)
    raise AssertionError("an output that differs is always reached")


def _divergence(
    value: Value, actual: Value, exact: Observed | None, rounding: float, agreeing: tuple[str, ...]
) -> Divergence:
    distance, limit = _distance(value, actual), distances.largest(_allowed(value, exact, rounding))
    scale = distances.max_magnitude(value.tensor)
    if value.shape != actual.shape:
        description = f"expected shape {list(value.shape)}, found {list(actual.shape)}"
    elif distance == math.inf:
        description = "NaN or infinity instead of finite values"
    elif not value.tensor.is_floating_point():
        description = "integers or booleans differ"
    elif exact is None:
        description = f"{distance:.1e} in float64, which rounding does not explain"
    else:
        description = f"{distance:.1e} where rounding explains {limit:.1e}"
    in_target = (actual.name, actual.operation)
    return Divergence(value.name, value.operation, distance, scale, limit, in_target, description, agreeing)


def _leaves(original: Observed, candidate: Observed, by_name: bool) -> dict[str, str]:
    """Pairs the outputs of the original and of the target."""
    if by_name and len(original.outputs) != len(candidate.outputs):  # the rules remove some outputs on purpose
        return {name: name for name in original.outputs if name in candidate.outputs}
    return dict(zip(original.outputs, candidate.outputs, strict=True))


def _ancestors(observed: Observed, starts: Iterable[str], agreeing: Iterable[str]) -> set[str]:
    """Returns some nodes and their ancestors, up to nodes that agree."""
    reached, waiting, agreeing = set(starts), list(starts), set(agreeing)
    while waiting:
        for need in observed.needs.get(waiting.pop(), ()):
            if need not in agreeing and need not in reached:
                reached.add(need)
                waiting.append(need)
    return reached


def _matched(
    original: Observed, candidate: Observed, exact: Observed | None, rounding: float, by_name: bool
) -> dict[str, str]:
    by_kind: dict[tuple[tuple[int, ...], bool], list[Value]] = {}
    for value in candidate.values.values():
        by_kind.setdefault(value.kind, []).append(value)
    matched: dict[str, str] = {}
    for name, value in original.values.items():
        named = candidate.values.get(name) if by_name else None
        options = by_kind.get(value.kind, []) if named is None else [named]
        match = next((option for option in options if _agree(value, option, exact, rounding)), None)
        if match is not None:
            matched[name] = match.name
    return matched


def _agree(value: Value, actual: Value, exact: Observed | None, rounding: float) -> bool:
    if value.kind != actual.kind:
        return False
    limit = _allowed(value, exact, rounding)
    for stop in (_PEEK, None):  # most values that differ show it in the first elements
        if bool((_distances(value.tensor[:stop], actual.tensor[:stop]) > limit[:stop]).any()):
            return False
    return True


def _rounding(original: Observed, exact: Observed | None) -> tuple[float, float]:
    """Returns the smallest and the largest relative difference that rounding can explain."""
    dtypes = {value.tensor.dtype for value in original.values.values() if value.tensor.is_floating_point()}
    if exact is None and dtypes <= {torch.float64}:
        return _EXACT, _STORED
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # float64 graphs may use others inside
    return _ULPS * eps, _COARSEST_ULPS * eps


def _relative(value: Value, actual: Value) -> float:
    scale = distances.max_magnitude(value.tensor)
    return _distance(value, actual) / scale if scale else math.inf


def _allowed(value: Value, exact: Observed | None, rounding: float) -> torch.Tensor:
    """Returns the largest difference per element that rounding can explain."""
    tensor = value.tensor
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, dtype=torch.float64)
    double = exact.values.get(value.name) if exact is not None else None
    double_tensor = tensor if double is None or double.shape != value.shape else double.tensor
    ordinary = ~distances.is_mask_value(tensor, double_tensor)
    magnitude = distances.finite(tensor).abs()
    noise = distances.largest(_distances(tensor, double_tensor)[ordinary & torch.isfinite(double_tensor)])
    minimum = max(_TIMES * noise, rounding * distances.largest(magnitude[ordinary]))
    return (rounding * magnitude).clamp(min=minimum)


def _distance(value: Value, actual: Value) -> float:
    if value.shape != actual.shape:
        return math.inf
    return distances.largest(_distances(value.tensor, actual.tensor))


def _distances(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Returns the distance per element, zero for equal infinities or NaN, else infinite there."""
    a, b = expected.double(), actual.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def describe_divergence(divergence: Divergence | None, case: str | None, problem: str | None) -> str:
    """Describes the first divergence in a line.

    Args:
        divergence: The divergence; None if the search did not find one.
        case: Name of the case; None if the line of the failure names it already.
        problem: Reason why an output cannot be compared, such as its shape, dtype or infinity.
    """
    at_case = "" if case is None else f" (case: {case})"
    if divergence is None:
        reason = f"no distance can be measured: {problem}" if problem else "the difference grows along the graph"
        return f"First difference: unknown, because {reason}{at_case}."
    shows_operation = divergence.operation not in ("", divergence.node)
    operation = f" ({divergence.operation})" if shows_operation else ""
    separator = " " if divergence.in_target is None else ", "  # "the node raises ..."
    return f"First difference: {divergence.node or 'the file'}{operation}{separator}{divergence.description}{at_case}."


def describe_agreeing_inputs(divergence: Divergence | None) -> str | None:
    """Describes the inputs of the first node that differs, in a line, or returns None."""
    if divergence is None or not divergence.agreeing:
        return None
    names = ", ".join(divergence.agreeing)
    return f"Its inputs agree: {names}." if len(divergence.agreeing) > 1 else f"Its input agrees: {names}."


def describe_search_error(error: Exception) -> str:
    """Describes the error that stopped the search."""
    return f"First difference: unknown, because the search failed with {describe_error(error)}"
