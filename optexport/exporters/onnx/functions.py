"""What ONNX lacks, or what is written wrongly as it stands, said with other operators of PyTorch.

A graph calls these functions in place of ATen operators while it is exported to ONNX; they compute the same, at any
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

aten = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    attend: Callable[..., torch.Tensor] = aten.scaled_dot_product_attention.default,
    **kw: Any,
) -> torch.Tensor:
    """Attention whose rows without a single key are zeros, as torch's are; ONNX Runtime would make NaN of them.

    Not the patch of transformers, which also zeroes rows whose mask is the smallest number throughout: to torch these
    attend to all keys alike.
    """
    if attn_mask is None:
        return attend(query, key, value, None, *args, **kw)
    # Half of the smallest number: a score added to it stays finite, and the operator that opset 23 has leaves out rows
    # that hold nothing but the smallest.
    low = torch.finfo(query.dtype).min / 2
    if attn_mask.dtype == torch.bool:
        attended = attn_mask.to(query.dtype).amax(dim=-1, keepdim=True)
        # No row of these is NaN, so that a product will do, which ONNX Runtime computes faster than Where.
        return attend(query, key, value, (~attn_mask).to(query.dtype) * low, *args, **kw) * attended
    finite = attn_mask > float("-inf")
    result = attend(query, key, value, torch.where(finite, attn_mask.clamp(min=low), attn_mask), *args, **kw)
    unattended = finite.to(query.dtype).sum(dim=-1, keepdim=True) < 1
    return torch.where(unattended, torch.zeros((), dtype=result.dtype, device=result.device), result)


def attention_by_products(*args: Any, **kw: Any) -> torch.Tensor:
    """`attention`, of two matrix products and a softmax."""
    return attention(*args, attend=_products, **kw)


def _products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What the operator computes, said so that ONNX Runtime fuses the transpose of the keys into the product.

    The formula is that of ``torch.nn.functional.scaled_dot_product_attention``'s documentation. ``torch.onnx`` gives
    the keys three dimensions before it transposes them, which costs a copy of the keys and a dozen nodes of shapes.
    """
    if is_causal or enable_gqa or dropout_p or isinstance(scale, torch.SymFloat):
        return aten.scaled_dot_product_attention.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def running(
    extreme: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A running maximum or minimum; of equal elements the index is the last's, as torch's is, and not the patch's.

    The patch of transformers makes the largest number of infinity.
    """
    size = x.shape[dim]
    if x.is_floating_point():
        pick, outside = (torch.amax, -math.inf) if extreme is torch.cummax else (torch.amin, math.inf)
        until = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        windows = torch.where(until, x.movedim(dim, -1).unsqueeze(-2), torch.full((), outside, dtype=x.dtype))
        values = pick(windows, -1).movedim(-1, dim)
    else:
        values = extreme(x, dim)[0]
    steps = torch.arange(size, device=x.device).reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return values, torch.cummax(torch.where(x == values, steps, 0), dim)[0]


def angle(x: torch.Tensor) -> torch.Tensor:
    """The angle of complex numbers; ``torch.onnx`` gives -π for those that are real and below 0."""
    return torch.atan2(x.imag, x.real) if x.is_complex() else aten.angle.default(x)


def rolled(x: torch.Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """``torch.roll``, by any number of steps at any size.

    The patch of transformers cuts an axis where the size that is traced says, and cuts none where that is a multiple
    of the steps.
    """
    steps = (shifts,) if isinstance(shifts, int | torch.SymInt) else shifts
    axes = (dims,) if isinstance(dims, int) else dims
    if not axes:
        return rolled(x.reshape(-1), steps, 0).reshape(x.shape)
    if all(isinstance(number, int) for number in (*steps, *(x.shape[axis] for axis in axes))):
        same = torch.roll(x, [*steps], [*axes])
        return same.clone() if same is x else same  # an input that is an output would bear two names
    for step, axis in zip(steps, axes, strict=True):
        x = x.index_select(axis, remainder(torch.arange(x.shape[axis]) - step, x.shape[axis]))
    return x


def shifted(x: torch.Tensor, dim: int | Sequence[int] | None = None, *, back: bool = False) -> torch.Tensor:
    """What ``torch.fft.fftshift`` gives, or if it goes back ``ifftshift``; ONNX has steps of known sizes alone."""
    axes = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in axes:
        middle = x.shape[axis] // 2 if back else (x.shape[axis] + 1) // 2
        x = torch.cat([x.narrow(axis, middle, x.shape[axis] - middle), x.narrow(axis, 0, middle)], axis)
    return x


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of a sigmoid, which below -100 ``torch.onnx`` makes minus infinity, as the sigmoid is 0 there."""
    return -functional.softplus(-x)


def logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The logarithm of a sum of exponentials, which ``torch.onnx`` lets overflow."""
    apart = torch.maximum(x, y) + functional.softplus(-(x - y).abs())
    return torch.where(x == y, x + math.log(2), apart)  # the difference of two infinities is none


def logaddexp2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same, to the base of 2."""
    return logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


def divided(x: torch.Tensor, y: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """A division; of fractions that is rounded down, what torch gives: of -7 by 0.7 -11, where the quotient is -10.

    That of whole numbers ``torch.onnx`` makes in float32, in which 1,699,999,199 by 3,600 is one hour more.
    """
    is_fraction = _is_fraction(x, y)
    if rounding_mode is None or (is_fraction and rounding_mode != "floor"):
        return torch.div(x, y, rounding_mode=rounding_mode)
    x, y = _alike(x, y)
    if not is_fraction:
        dtype, x, y = x.dtype, x.long(), y.long()  # ONNX Runtime divides no smaller ones
        whole: torch.Tensor = aten.floor_divide.default(x, y)
        if rounding_mode == "trunc":
            whole = whole + ((torch.remainder(x, y) != 0) & ((x < 0) != (y < 0))).long()
        return whole.to(dtype)
    rest = torch.fmod(x, y)
    whole = (x - rest) / y - ((rest != 0) & ((rest < 0) != (y < 0))).to(x.dtype)
    return torch.where(y == 0, x / y, torch.round(whole))


def remainder(x: Any, y: Any) -> torch.Tensor:
    """What a division that is rounded down leaves; of fractions exactly.

    ``torch.onnx`` subtracts a rounded product: of 60,000 by 6.2831855 it is off by 0.003.
    """
    is_fraction = _is_fraction(x, y)
    x, y = _alike(x, y)
    if not is_fraction:
        return torch.remainder(x, y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def truncated_remainder(x: Any, y: Any) -> torch.Tensor:
    """What a division that is rounded towards zero leaves; ONNX Runtime computes that of whole numbers in float64."""
    if _is_fraction(x, y):
        return aten.fmod.Tensor(*_alike(x, y))  # type: ignore[no-any-return]
    x, y = _alike(x, y)
    whole = divided(x, y, rounding_mode="trunc")
    return torch.sub(x, whole * y)


def rounded(operator: Any, x: torch.Tensor) -> torch.Tensor:
    """A rounding to whole numbers, which leaves those alone; ONNX has none of them."""
    return operator(x) if x.is_floating_point() else x.clone()


def _is_fraction(*operands: Any) -> bool:
    return any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in operands)


def _alike(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands, of which one may be a number, as tensors of the type of what is computed of them."""
    dtype = torch.result_type(x, y)
    first, second = (v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype) for v in (x, y))
    return first.to(dtype), second.to(dtype)


def scattered(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """``torch.scatter_reduce``, with the means that ONNX lacks, and extremes that are infinite.

    Of a mean ``torch.onnx`` writes the last element.
    """
    if reduce != "mean" and (include_self or not x.is_floating_point()):
        return aten.scatter_reduce.two(x, dim, index, source, reduce, include_self=include_self)  # type: ignore[no-any-return]
    count = torch.zeros_like(x, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(source, dtype=torch.int64))
    if not include_self:
        neutral = {"prod": 1, "amax": -math.inf, "amin": math.inf}.get(reduce, 0)
        x = torch.where(count > 0, torch.full((), neutral, dtype=x.dtype), x)
    if reduce != "mean":
        return x.scatter_reduce(dim, index, source, reduce)
    total, count = x.scatter_add(dim, index, source), count + 1 if include_self else count.clamp(min=1)
    return divided(total, count.to(x.dtype), rounding_mode=None if x.is_floating_point() else "floor")


def histogram(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
    """What ``torch.histc`` counts: what lies outside of the range in no bin, its upper end in the last.

    The patch of transformers counts the former at the ends.
    """
    x = x.reshape(-1)
    least, most = (x.min(), x.max()) if low == high else (x.new_tensor(low), x.new_tensor(high))
    alike = (least == most).to(x.dtype)
    least, most = least - alike, most + alike
    places = ((x - least) * bins / (most - least)).clamp(0, bins - 1).long()
    return x.new_zeros(bins).scatter_add(0, places, ((x >= least) & (x <= most)).to(x.dtype))


def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The elements of a source, in order, where a mask says so.

    The patch of transformers reads the source for places outside of the mask too, and the source may be empty.
    """
    return x.masked_scatter(mask, torch.cat([source.reshape(-1), source.new_zeros(1)]))


def squeeze(x: torch.Tensor, dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """Takes axes away of which it is known that their size is 1; ONNX refuses any other, which torch leaves alone."""
    every = range(x.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
    single = [axis for axis in every if x.dim() and isinstance(x.shape[axis], int) and x.shape[axis] == 1]
    return x.squeeze(single) if single else x.clone()


def nearest(
    upsample: Any, x: torch.Tensor, sizes: Sequence[Any] | None, factors: Sequence[float] | None = None
) -> torch.Tensor:
    """Nearest neighbours, of the places that torch reads: the whole part of ``i * before / after`` in float32.

    ONNX Runtime divides by ``after / before``: of 14 made 4 the third place is 6 to it, and 7 to torch. Where a size is
    a multiple of the one before they agree. By a factor of 1.3 it makes 3 of 3 by copying them, and torch does not.
    """
    before = x.shape[2:]
    if sizes is None:
        if factors is None or all(float(factor).is_integer() for factor in factors):
            return upsample(x, sizes, factors)  # type: ignore[no-any-return]
        after = [torch.sym_int(size * factor) for size, factor in zip(before, factors, strict=True)]
        steps = [torch.full((), 1 / factor, dtype=torch.float32) for factor in factors]
    else:
        after = [*sizes]
        if all(statically_known_true(end % start == 0) for start, end in zip(before, after, strict=True)):
            return upsample(x, sizes, factors)  # type: ignore[no-any-return]
        ends = [
            [torch.full((), size, dtype=torch.float32) for size in pair] for pair in zip(before, after, strict=True)
        ]
        steps = [start / end for start, end in ends]
    for axis, (size, step) in enumerate(zip(after, steps, strict=True), start=2):
        places = (torch.arange(size, dtype=torch.float32) * step).long().clamp(max=x.shape[axis] - 1)
        x = x.index_select(axis, places)
    return x


def average_of_windows(x: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """An adaptive average over the last axes, one size for each.

    What torch makes of the operator holds for the sizes that it was traced with, and says nothing of others.
    """
    axes = range(-len(sizes), 0)
    if _are_one(sizes):
        return x.mean(list(axes), keepdim=True)
    if _are_even(x, sizes):
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sizes) - 1]
        return pool(x, [x.shape[axis] // size for axis, size in zip(axes, sizes, strict=True)])
    for axis, size in zip(axes, sizes, strict=True):
        start, end, steps = _windows(x.shape[axis], size)
        places = start + steps
        windows = _cut(x, axis, places.clamp(max=x.shape[axis] - 1))
        windows = torch.where(_before(axis, places < end), windows, torch.zeros((), dtype=x.dtype))
        x = windows.sum(axis) / _before(axis, end - start).squeeze(axis)
    return x


def largest_of_windows(x: torch.Tensor, sizes: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """An adaptive maximum over the last axes, one size for each; and the place of each in these axes laid flat."""
    if len(sizes) > 1 and (_are_one(sizes) or _are_even(x, sizes)):
        operator = aten.adaptive_max_pool2d if len(sizes) == 2 else aten.adaptive_max_pool3d
        return operator.default(x, sizes)  # type: ignore[no-any-return]
    index = x.new_zeros((), dtype=torch.int64)
    stride = 1
    for axis in range(-1, -len(sizes) - 1, -1):
        start, end, steps = _windows(x.shape[axis], sizes[axis])
        places = torch.minimum(start + steps, end - 1)
        index = _before(axis, places) * stride + (index if axis == -1 else _cut(index, axis, places))
        stride = stride * x.shape[axis]
        windows = _cut(x, axis, places)
        x, first = windows.max(axis)
        index = index.expand_as(windows).gather(axis, first.unsqueeze(axis)).squeeze(axis)
    return x, index


def _are_one(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _are_even(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Whether it is known that all windows are as wide as each other, and do not overlap."""
    pairs = list(zip(x.shape[-len(sizes) :], sizes, strict=True))
    return all(isinstance(n, int) and isinstance(size, int) and n % size == 0 for n, size in pairs)


def _windows(n: Any, size: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the windows of an axis start and end, each of shape [size, 1], and the steps of the widest."""
    each = torch.arange(size)[:, None]
    return each * n // size, ((each + 1) * n + size - 1) // size, torch.arange((n + size - 1) // size + 1)


def _cut(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Parts an axis into two: that of the windows, and after it that of the places in each."""
    found: torch.Tensor = x.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
    return found


def _before(axis: int, windows: torch.Tensor) -> torch.Tensor:
    """What is known of windows, given the axes that come after theirs."""
    return windows.reshape(*windows.shape, *[1] * (-1 - axis))
