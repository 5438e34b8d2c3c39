"""Metrics of a model's decisions and their confidence intervals; `gates` applies them.

A decision is compared with the original's decision in its own precision. A change is forgiven if rounding alone can
cause it. Two values at most twice the slack apart may swap, because each may move by the slack. A value within the
slack of a threshold may cross it. The slack is the noise multiple times the noise floor, even if ``atol`` or ``rtol``
allow more. Distances between values come from float64, like the limit. A target within the measured limit therefore
changes only forgiven decisions. Forgiven decisions count as agreements and are also counted separately, as ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import torch

from optexport.parity import distances

# A row shorter than this share of the longest row may be rounding, if the original's row is zero.
_SMALL_PART = 0.1
_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Tally:
    """Metric of one case.

    Attributes:
        values: One value per position, row or mask, float64 [count].
        ties: Number of values that count as agreement because rounding explains the change.
    """

    values: torch.Tensor
    ties: int = 0


def unpadded_positions(batch: Mapping[str, torch.Tensor], positions: torch.Size) -> torch.Tensor:
    """Finds the positions of an output that are not padding.

    Args:
        batch: Inputs, with or without an attention mask.
        positions: Shape of the positions.

    Returns:
        A bool tensor of that shape; all True without a matching mask.
    """
    name = "decoder_attention_mask" if any(key.startswith("decoder_") for key in batch) else "attention_mask"
    mask = batch.get(name)
    if mask is None or mask.is_floating_point() or mask.dim() != 2 or positions[:2] != mask.shape:
        return torch.ones(positions, dtype=torch.bool)
    return (mask != 0).reshape(*mask.shape, *[1] * (len(positions) - 2)).expand(positions)


def agreement(
    candidate: torch.Tensor,
    original: torch.Tensor,
    expected: torch.Tensor,
    slack: float,
    k: int = 1,
    counted: torch.Tensor | None = None,
) -> Tally:
    """Compares the k largest elements of each row along the last axis.

    Args:
        candidate, original: Same shape, any floating point dtype.
        expected: Reference for the distances between elements, same shape, float64.
        slack: Largest change of a value by rounding alone.
        counted: Positions that count: bool, shape without the last axis. All count by default.

    Returns:
        1 or 0 per counted position.
    """
    same, tie = _same_top(candidate, original, expected, slack, k)
    counted = torch.ones_like(same) if counted is None else counted
    return Tally((same | tie)[counted].double(), int(tie[counted].sum()))


def greedy_tokens(
    candidate: torch.Tensor, original: torch.Tensor, expected: torch.Tensor, slack: float, counted: torch.Tensor
) -> Tally:
    """Compares the tokens that each row chooses at its counted positions.

    Args:
        candidate, original, expected: [batch, sequence, vocabulary]; see `agreement`.
        slack: Largest change of a value by rounding alone.
        counted: Positions that count: bool [batch, sequence].

    Returns:
        1 or 0 per row with at least one counted position.
    """
    same, tie = _same_top(candidate, original, expected, slack, 1)
    rows, has_counted = (same | tie | ~counted).all(-1), counted.any(-1)
    return Tally(rows[has_counted].double(), int((rows & (tie & counted).any(-1)).sum()))


def _same_top(
    candidate: torch.Tensor, original: torch.Tensor, expected: torch.Tensor, slack: float, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds rows with the same k largest elements, and rows whose difference rounding explains."""
    before, after = distances.top(original, k), distances.top(candidate, k)
    none = torch.zeros(original.shape, dtype=torch.bool)
    is_lost = ~none.scatter(-1, after, True).gather(-1, before)
    is_gained = ~none.scatter(-1, before, True).gather(-1, after)
    highest = expected.double().gather(-1, before).masked_fill(~is_lost, -math.inf).amax(-1)
    lowest = expected.double().gather(-1, after).masked_fill(~is_gained, math.inf).amin(-1)
    same = ~is_lost.any(-1)
    return same, ~same & ((highest == lowest) | (highest - lowest <= 2 * slack))


def cosines(
    candidate: torch.Tensor, original: torch.Tensor, slack: float = 0.0, counted: torch.Tensor | None = None
) -> Tally:
    """Returns the cosine similarity of each counted row along the last axis.

    Equal rows have 1; a zero row and another row have 0. Elements that are NaN or infinite in the original are skipped.
    Rows with a norm of at most slack * sqrt(length) are skipped too, because their direction is noise. Such a row
    counts as 0 if the target's row is longer than rounding explains and not small against the longest row.

    Args:
        candidate, original: Same shape, any floating point dtype.
        slack: Largest change of a value by rounding alone.
        counted: Positions that count: bool, shape without the last axis. All count by default.
    """
    rows = [distances.finite(values) * torch.isfinite(original) for values in (candidate, original)]
    a, b = [v / v.abs().amax(-1, keepdim=True).clamp(min=1e-300) for v in rows]
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    cosine = torch.where(norms > 0, (a * b).sum(-1) / norms.clamp(min=1e-300), 0.0).clamp(-1, 1)
    cosine = torch.where((rows[0] == rows[1]).all(-1), 1.0, cosine)
    rounding = slack * math.sqrt(original.shape[-1])
    ours, theirs = (torch.linalg.vector_norm(row, dim=-1) for row in rows)
    is_counted = (theirs > rounding) | (rounding == 0)
    longest = distances.largest(theirs if counted is None else theirs[counted])
    is_spurious = ~is_counted & (ours > max(2 * rounding, _SMALL_PART * longest))
    cosine, is_counted = torch.where(is_spurious, 0.0, cosine), is_counted | is_spurious
    return Tally(cosine[is_counted if counted is None else is_counted & counted])


def intersections_over_unions(
    candidate: torch.Tensor, original: torch.Tensor, expected: torch.Tensor, slack: float, *, classes: bool = True
) -> Tally:
    """Returns |A and B| / |A or B| for each pair of masks that are not both empty.

    A is a mask of the target, B of the original. A position that rounding alone can change counts as unchanged; these
    positions are the ties.

    Args:
        candidate, original, expected: [batch, height, width] or [batch, channels, ...]; see `agreement`.
        slack: Largest change of a value by rounding alone.
        classes: True if several channels are exclusive classes.
    """
    if classes and original.dim() > 3 and original.shape[1] > 1:
        ours, theirs, values = (v.movedim(1, -1) for v in (candidate, original, expected))
        _, tie = _same_top(ours, theirs, values, slack, 1)
        before = distances.top(theirs, 1).squeeze(-1)
        after = torch.where(tie, before, distances.top(ours, 1).squeeze(-1))
        pairs = [((after == c).flatten(1), (before == c).flatten(1)) for c in range(original.shape[1])]
    else:
        before, after = original > 0, candidate > 0
        tie = (before != after) & (expected.double().abs() <= slack)
        after = torch.where(tie, before, after)
        planes = 1 if original.dim() > 3 and original.shape[1] == 1 else original.dim() - 2
        pairs = [(after.flatten(planes).flatten(0, -2), before.flatten(planes).flatten(0, -2))]
    both = torch.cat([(a & b).sum(-1) for a, b in pairs])
    either = torch.cat([(a | b).sum(-1) for a, b in pairs])
    return Tally((both.double() / either)[either > 0], int(tie.sum()))


def wilson_interval(hits: int, count: int) -> tuple[float, float] | None:
    """Returns the 95 % score interval of a share, or None if the count is zero.

    The interval is (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n). Source: Wilson, "Probable inference, the law of
    succession, and statistical inference", JASA 22 (1927).

    Args:
        hits: Number of agreements.
        count: Number of samples.
    """
    if not count:
        return None
    share, square = hits / count, _Z * _Z
    centre = share + square / (2 * count)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    low, high = ((centre + sign * half) / (1 + square / count) for sign in (-1, 1))
    return (0.0 if hits == 0 else low), (1.0 if hits == count else high)


def normal_interval(values: torch.Tensor) -> tuple[float, float] | None:
    """Returns the 95 % interval of a mean, or None for fewer than two values.

    The interval is m ± z s / √n, with the sample's standard deviation s.

    Args:
        values: float64 [count].
    """
    if values.numel() < 2:
        return None
    mean, half = float(values.mean()), _Z * float(values.std()) / math.sqrt(values.numel())
    return mean - half, mean + half
