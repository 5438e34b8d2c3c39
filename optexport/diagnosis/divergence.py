"""The first place along a graph where what a candidate computes parts from what it should compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from optexport.diagnosis.intermediates import Observed, Value
from optexport.errors import first_line
from optexport.parity import distances

# Values agree up to this many times the rounding of the value itself: a later node may round what it is given more
# often than the one it is compared with.
_TIMES = 8
_ULPS = 16
_EXACT = 1e-9  # of float64, relative; what rounds there rounds far less
# A place that differs by less than this share of what an output differs by is not where it went wrong, as long as
# rounding may explain it: of new weights, which are stored in float32, or of operators that compute another way.
_SHARE = 1e-3
_STORED = 1e-6
_COARSEST_ULPS = 64
_PEEK = 64
_NEAR = 1.1


@dataclass(frozen=True)
class Parting:
    """Where values part.

    Attributes:
        node: In the names of the graph that is right; of the candidate where that raised.
        what: The module or operator there.
        distance: The largest of an element; infinite where the two cannot be compared.
        scale: The largest value there should be.
        limit: The distance that rounding explains.
        inner: The candidate's name of it, and what computes it there.
        why: In words.
        agreeing: What it reads, as far as it agrees.
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
    """Two runs of one batch, node by node.

    Attributes:
        matched: The candidate's value for each of the original's that agrees with one.
        parting: Where they part first; None where the outputs agree.
    """

    matched: dict[str, str]
    parting: Parting | None


def compare(original: Observed, candidate: Observed, exact: Observed | None, *, by_name: bool) -> Comparison:
    """Finds where values part first on the way to an output that differs.

    The way goes back from such an output along what differs. A value of the original that the candidate does not
    compute at all, as a runtime may take two steps in one, is passed over.

    Args:
        exact: The original in float64, for how its values round; None where both runs are in float64 already.
        by_name: Whether the two call equal things by equal names. Else any value that agrees is taken for the same.
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
            other = near[-1]  # a layer's product is there before its bias is added
        read = candidate.needs.get(other.name, ()) if by_name else matched.values()
        agreeing = tuple(need for need in original.needs.get(name, ()) if matched.get(need) in read)
        parting = _parting(value, other, exact, rounding, agreeing)
        if by_name and matched.get(name) == name:  # and yet the output differs: it is another node
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
    """Which of the original's outputs each of the candidate's stands for."""
    if by_name and len(original.outputs) != len(candidate.outputs):  # some were left out on purpose
        return {name: name for name in original.outputs if name in candidate.outputs}
    return dict(zip(original.outputs, candidate.outputs, strict=True))


def _back(observed: Observed, starts: Iterable[str], known: Iterable[str]) -> set[str]:
    """The nodes on the ways back from some, up to those that are known to agree."""
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
    for stop in (_PEEK, None):  # most that do not agree show it at once
        if bool((_distances(value.tensor[:stop], other.tensor[:stop]) > limit[:stop]).any()):
            return False
    return True


def _rounding(original: Observed, exact: Observed | None) -> tuple[float, float]:
    """What rounding explains of a value at least, and at most, relative to it."""
    dtypes = {value.tensor.dtype for value in original.values.values() if value.tensor.is_floating_point()}
    if exact is None and dtypes <= {torch.float64}:
        return _EXACT, _STORED
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # of a graph in float64 too, on its way
    return _ULPS * eps, _COARSEST_ULPS * eps


def _relative(value: Value, other: Value) -> float:
    scale = distances.largest(distances.finite(value.tensor).abs())
    return _distance(value, other) / scale if scale else math.inf


def _allowed(value: Value, exact: Observed | None, rounding: float) -> torch.Tensor:
    """How far each element of a value may be off by rounding alone."""
    tensor = value.tensor
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, dtype=torch.float64)
    double = exact.values.get(value.name) if exact is not None else None
    known = tensor if double is None or double.shape != value.shape else double.tensor
    kept = ~distances.marks(tensor, known)
    magnitude = distances.finite(tensor).abs()
    noise = distances.largest(_distances(tensor, known)[kept & torch.isfinite(known)])
    least = max(_TIMES * noise, rounding * distances.largest(magnitude[kept]))
    return (rounding * magnitude).clamp(min=least)


def _distance(value: Value, other: Value) -> float:
    if value.shape != other.shape:
        return math.inf
    return distances.largest(_distances(value.tensor, other.tensor))


def _distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Element-wise; zero where both are the same infinity, or NaN, and infinite where only one is."""
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))


def told(parting: Parting | None, case: str, problem: str | None) -> str:
    """A sentence on where values part.

    Args:
        problem: Why an output cannot be compared at all, if it cannot: its shape, dtype, or infinity.
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
    """What is said where the place could not be found."""
    return f"Where values part could not be found: {type(error).__name__}: {first_line(error)}"
