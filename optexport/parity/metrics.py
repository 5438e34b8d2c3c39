"""What can be counted of a model's decisions, and how far to trust the count; the module ``decisions`` has the gates.

A decision is compared with that of the original in its own precision. It is forgiven where rounding alone could have
changed it: two values that are at most twice the slack apart may change places, since each may have moved by it, and a
value within the slack of a threshold may cross it. The slack is the multiple of the noise floor that parity allows,
also where ``atol`` or ``rtol`` allow more. How far values are apart is read in float64, as the limit is; so what passes
the measured limit changes no decision but forgiven ones. These count as agreeing, and are counted apart, as ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch

from optexport.parity import distances

# Up to this share of the longest row, what a file of lower precision gives where there is nothing is its own rounding.
_SMALL_PART = 0.1
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Tally:
    """What was counted in one case: a value for each position, row or mask, float64 [count], and how many are ties."""

    values: torch.Tensor
    ties: int = 0


def real_positions(batch: Mapping[str, torch.Tensor], positions: torch.Size) -> torch.Tensor:
    """Which positions of an output are no padding, a bool tensor of their shape; all where no mask tells."""
    name = "decoder_attention_mask" if any(key.startswith("decoder_") for key in batch) else "attention_mask"
    mask = batch.get(name)
    if mask is None or mask.is_floating_point() or mask.dim() != 2 or positions[:2] != mask.shape:
        return torch.ones(positions, dtype=torch.bool)
    return (mask != 0).reshape(*mask.shape, *[1] * (len(positions) - 2)).expand(positions)


def agreement(
    candidate: torch.Tensor,
    original: torch.Tensor,
    known: torch.Tensor,
    slack: float,
    k: int = 1,
    real: torch.Tensor | None = None,
) -> Tally:
    """Whether the k largest elements of each row along the last axis are the same: 1 or 0 for each real position.

    Args:
        candidate, original: Of one shape, any floating point dtype.
        known: The reference that says how far elements are apart, of the same shape, float64.
        real: Which positions count, bool, of the shape without the last axis; all by default.
    """
    same, tie = _same_top(candidate, original, known, slack, k)
    real = torch.ones_like(same) if real is None else real
    return Tally((same | tie)[real].double(), int(tie[real].sum()))


def greedy_tokens(
    candidate: torch.Tensor, original: torch.Tensor, known: torch.Tensor, slack: float, real: torch.Tensor
) -> Tally:
    """Whether a row chooses the same token at each of its real positions: 1 or 0 for each row that has any.

    Args:
        candidate, original, known: [batch, sequence, vocabulary]; see `agreement`.
        real: Which positions count, bool [batch, sequence].
    """
    same, tie = _same_top(candidate, original, known, slack, 1)
    rows, counted = (same | tie | ~real).all(-1), real.any(-1)
    return Tally(rows[counted].double(), int((rows & (tie & real).any(-1)).sum()))


def _same_top(
    candidate: torch.Tensor, original: torch.Tensor, known: torch.Tensor, slack: float, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows have the same k largest elements, and which others could have them by rounding alone."""
    before, after = distances.top(original, k), distances.top(candidate, k)
    none = torch.zeros(original.shape, dtype=torch.bool)
    lost = ~none.scatter(-1, after, True).gather(-1, before)
    found = ~none.scatter(-1, before, True).gather(-1, after)
    highest = known.double().gather(-1, before).masked_fill(~lost, -math.inf).amax(-1)
    lowest = known.double().gather(-1, after).masked_fill(~found, math.inf).amin(-1)
    same = ~lost.any(-1)
    return same, ~same & ((highest == lowest) | (highest - lowest <= 2 * slack))


def cosines(
    candidate: torch.Tensor, original: torch.Tensor, slack: float = 0.0, real: torch.Tensor | None = None
) -> Tally:
    """The cosine similarity of each real row along the last axis; 1 of equal rows, 0 where one of two is zero.

    What is NaN or infinite in the original is left out, and so are rows that are no longer than rounding: whose norm is
    at most the slack times the root of their length. Their direction says nothing; but a candidate whose row is longer
    than that could be by rounding, and no small part of the longest row, has made something of nothing, which counts 0.
    """
    rows = [distances.finite(values) * torch.isfinite(original) for values in (candidate, original)]
    a, b = [v / v.abs().amax(-1, keepdim=True).clamp(min=1e-300) for v in rows]
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    cosine = torch.where(norms > 0, (a * b).sum(-1) / norms.clamp(min=1e-300), 0.0).clamp(-1, 1)
    cosine = torch.where((rows[0] == rows[1]).all(-1), 1.0, cosine)
    rounding = slack * math.sqrt(original.shape[-1])
    ours, theirs = (torch.linalg.vector_norm(row, dim=-1) for row in rows)
    kept = (theirs > rounding) | (rounding == 0)
    longest = distances.largest(theirs if real is None else theirs[real])
    made = ~kept & (ours > max(2 * rounding, _SMALL_PART * longest))
    cosine, kept = torch.where(made, 0.0, cosine), kept | made
    return Tally(cosine[kept if real is None else kept & real])


def intersections_over_unions(
    candidate: torch.Tensor, original: torch.Tensor, known: torch.Tensor, slack: float, *, classes: bool = True
) -> Tally:
    """|A and B| / |A or B| for each mask A of the candidate and B of the original that are not both empty.

    A position that changed and whose change rounding alone could have made counts as the original has it; the ties are
    such positions.

    Args:
        candidate, original, known: [batch, height, width] or [batch, channels, ...]; see `agreement`.
        classes: Whether several channels are classes, of which each position is of one.
    """
    if classes and original.dim() > 3 and original.shape[1] > 1:
        ours, theirs, values = (v.movedim(1, -1) for v in (candidate, original, known))
        _, tie = _same_top(ours, theirs, values, slack, 1)
        before = distances.top(theirs, 1).squeeze(-1)
        after = torch.where(tie, before, distances.top(ours, 1).squeeze(-1))
        pairs = [((after == c).flatten(1), (before == c).flatten(1)) for c in range(original.shape[1])]
    else:
        before, after = original > 0, candidate > 0
        tie = (before != after) & (known.double().abs() <= slack)
        after = torch.where(tie, before, after)
        planes = 1 if original.dim() > 3 and original.shape[1] == 1 else original.dim() - 2
        pairs = [(after.flatten(planes).flatten(0, -2), before.flatten(planes).flatten(0, -2))]
    both = torch.cat([(a & b).sum(-1) for a, b in pairs])
    either = torch.cat([(a | b).sum(-1) for a, b in pairs])
    return Tally((both.double() / either)[either > 0], int(tie.sum()))


def wilson(hits: int, count: int) -> tuple[float, float] | None:
    """The 95 % score interval of a share, (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n); None of nothing.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not count:
        return None
    share, square = hits / count, _Z * _Z
    centre = share + square / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    low, high = ((centre + sign * half) / (1 + square / count) for sign in (-1, 1))
    return (0.0 if hits == 0 else low), (1.0 if hits == count else high)


def normal(values: torch.Tensor) -> tuple[float, float] | None:
    """The 95 % interval of a mean, m ± z s / √n, with the sample's own deviation s; None of fewer than two values."""
    if values.numel() < 2:
        return None
    mean, half = float(values.mean()), _Z * float(values.std()) / math.sqrt(values.numel())
    return mean - half, mean + half
