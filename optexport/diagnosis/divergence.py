"""First divergence between the values of a target and of the original, along a graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from optexport.diagnosis.intermediates import Observed, Value
from optexport.errors import first_line
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
class Parting:
    """First node whose value differs from the expected value.

    Attributes:
        node: Name in the correct graph, or in the target if the target raised.
        what: Module or operator of the node.
        distance: Largest distance of an element; infinite if the values cannot be compared.
        scale: Largest expected magnitude.
        limit: Largest distance that rounding explains.
        inner: Name in the target, and the operator that computes it there.
        why: Description of the difference.
        agreeing: Inputs of the node that agree.
    """

    node: str
    what: str
    distance: float
    scale: float
    limit: float
    inner: tuple[str, str] | None
    why: str
    agreeing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Node-by-node comparison of two runs on one batch.

    Attributes:
        matched: Name in the target for each value of the original that agrees with one.
        parting: First divergence; None if the outputs agree.
    """

    matched: dict[str, str]
    parting: Parting | None


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
        what = original.values[name].what if by_name and name in original.values else ""
        parting = Parting(name, what, math.inf, math.nan, 0.0, None, f"raises {error}")
        return Comparison(matched, parting)
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
    reached = _back(original, differing, matched)
    lost = _back(candidate, differing.values(), set(matched.values()))
    unmatched = [value for name, value in candidate.values.items() if name in lost]
    kinds = {value.kind for value in unmatched}
    for name, value in original.values.items():
        if name not in reached:
            continue
        named = by_name and name in candidate.values
        if name not in differing and not named and (by_name or value.kind not in kinds):
            continue
        if name in differing:
            other = candidate.values[differing[name]]
        elif named:
            other = candidate.values[name]
        else:
            alike = {v.name: _distance(value, v) for v in unmatched if v.kind == value.kind}
            near = [v for v in unmatched if alike.get(v.name, math.inf) <= _NEAR * min(alike.values())]
            other = near[-1]  # the last match, because a layer's product precedes the sum with its bias
        read = candidate.needs.get(other.name, ()) if by_name else matched.values()
        agreeing = tuple(need for need in original.needs.get(name, ()) if matched.get(need) in read)
        parting = _parting(value, other, exact, rounding, agreeing)
        if by_name and matched.get(name) == name:  # yet the output differs, so it is another node
            parting = replace(parting, why=f"the output is {other.name} in its place", agreeing=())
        return Comparison(matched, parting)
    raise AssertionError("an output that differs is always reached")


def _parting(value: Value, other: Value, exact: Observed | None, rounding: float, agreeing: tuple[str, ...]) -> Parting:
    distance, limit = _distance(value, other), distances.largest(_allowed(value, exact, rounding))
    scale = distances.largest(distances.finite(value.tensor).abs())
    if value.shape != other.shape:
        why = f"its shape is {list(other.shape)}, and should be {list(value.shape)}"
    elif distance == math.inf:
        why = "NaN or infinity stands where there should be none"
    elif not value.tensor.is_floating_point():
        why = "it holds other whole numbers, or other truth values"
    else:
        why = f"by {distance:.2g} where the largest value is {scale:.2g} and rounding explains {limit:.2g}"
    return Parting(value.name, value.what, distance, scale, limit, (other.name, other.what), why, agreeing)


def _leaves(original: Observed, candidate: Observed, by_name: bool) -> dict[str, str]:
    """Pairs the outputs of the original and of the target."""
    if by_name and len(original.outputs) != len(candidate.outputs):  # the rules remove some outputs on purpose
        return {name: name for name in original.outputs if name in candidate.outputs}
    return dict(zip(original.outputs, candidate.outputs, strict=True))


def _back(observed: Observed, starts: Iterable[str], known: Iterable[str]) -> set[str]:
    """Returns the ancestors of some nodes, up to nodes that are known to agree."""
    reached, waiting, known = set(starts), list(starts), set(known)
    while waiting:
        for need in observed.needs.get(waiting.pop(), ()):
            if need not in known and need not in reached:
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
        found = next((option for option in options if _agree(value, option, exact, rounding)), None)
        if found is not None:
            matched[name] = found.name
    return matched


def _agree(value: Value, other: Value, exact: Observed | None, rounding: float) -> bool:
    if value.kind != other.kind:
        return False
    limit = _allowed(value, exact, rounding)
    for stop in (_PEEK, None):  # most values that differ show it in the first elements
        if bool((_distances(value.tensor[:stop], other.tensor[:stop]) > limit[:stop]).any()):
            return False
    return True


def _rounding(original: Observed, exact: Observed | None) -> tuple[float, float]:
    """Returns the smallest and the largest relative difference that rounding can explain."""
    dtypes = {value.tensor.dtype for value in original.values.values() if value.tensor.is_floating_point()}
    if exact is None and dtypes <= {torch.float64}:
        return _EXACT, _STORED
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # float64 graphs may use others inside
    return _ULPS * eps, _COARSEST_ULPS * eps


def _relative(value: Value, other: Value) -> float:
    scale = distances.largest(distances.finite(value.tensor).abs())
    return _distance(value, other) / scale if scale else math.inf


def _allowed(value: Value, exact: Observed | None, rounding: float) -> torch.Tensor:
    """Returns the largest difference per element that rounding can explain."""
    tensor = value.tensor
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, dtype=torch.float64)
    double = exact.values.get(value.name) if exact is not None else None
    known = tensor if double is None or double.shape != value.shape else double.tensor
    kept = ~distances.is_mask_value(tensor, known)
    magnitude = distances.finite(tensor).abs()
    noise = distances.largest(_distances(tensor, known)[kept & torch.isfinite(known)])
    least = max(_TIMES * noise, rounding * distances.largest(magnitude[kept]))
    return (rounding * magnitude).clamp(min=least)


def _distance(value: Value, other: Value) -> float:
    if value.shape != other.shape:
        return math.inf
    return distances.largest(_distances(value.tensor, other.tensor))


def _distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the distance per element, zero for equal infinities or NaN, else infinite there."""
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def told(parting: Parting | None, case: str, problem: str | None) -> str:
    """Describes the first divergence in a sentence.

    Args:
        parting: The divergence; None if not found.
        case: Name of the case.
        problem: Reason why an output cannot be compared, such as its shape, dtype or infinity.
    """
    if parting is None:
        return f"At {case} no place stands out where values part: {problem or 'the distance grows along the graph'}."
    what = f" ({parting.what})" if parting.what and parting.what != parting.node else ""
    if parting.inner is None:
        return f"At {case} {parting.node or 'the file'}{what} {parting.why}."
    agreeing = f"; {', '.join(parting.agreeing)} before it still agree" if parting.agreeing else ""
    agreeing += "s" if len(parting.agreeing) == 1 else ""
    return f"At {case} values part first at {parting.node}{what}: {parting.why}{agreeing}."


def lost(error: Exception) -> str:
    """Describes the error that stopped the search."""
    return f"Where values part could not be found: {type(error).__name__}: {first_line(error)}"
