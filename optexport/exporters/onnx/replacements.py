"""Replacements for operators that ONNX lacks or that ``torch.onnx`` converts wrongly.

During ONNX export, a graph calls these functions in place of ATen operators. They compute the same results at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional

aten = torch.ops.aten


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    **kw: Any,
) -> torch.Tensor:
    """Calls the operator with four axes, because ``torch.onnx`` supports no other number."""
    if query.dim() == 4:
        return aten.scaled_dot_product_attention.default(  # type: ignore[no-any-return]
            query, key, value, attn_mask, *args, **kw
        )

    def with_four_axes(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, *[1] * (3 - x.dim()), *x.shape[-3:])

    if attn_mask is not None and query.dim() > 4:
        attn_mask = with_four_axes(attn_mask.expand(*query.shape[:-1], key.shape[-2]))
    result = _attend(*map(with_four_axes, (query, key, value)), attn_mask, *args, **kw)
    return result.reshape(*query.shape[:-1], value.shape[-1])


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *args: Any,
    attend: Callable[..., torch.Tensor] = _attend,
    **kw: Any,
) -> torch.Tensor:
    """Computes attention with zeros for rows that mask every key, as torch does.

    ONNX Runtime returns NaN for such rows. transformers' own patch also zeroes rows whose mask is the smallest number
    throughout, but in torch these rows attend to all keys equally.

    Args:
        query: Of shape [..., queries, features].
        key: Of shape [..., keys, features].
        value: Of shape [..., keys, features].
        attn_mask: Boolean or additive, broadcastable to [..., queries, keys].
        attend: Operator that computes attention with an additive mask.
    """
    if attn_mask is None:
        return attend(query, key, value, None, *args, **kw)
    # Half of the smallest number, so that adding a score stays finite. The operator of opset 23 skips rows that
    # contain only the smallest number.
    low = torch.finfo(query.dtype).min / 2
    if attn_mask.dtype == torch.bool:
        attended = attn_mask.to(query.dtype).amax(dim=-1, keepdim=True)
        # No row is NaN here, so a product suffices. ONNX Runtime computes it faster than Where.
        return attend(query, key, value, (~attn_mask).to(query.dtype) * low, *args, **kw) * attended
    finite = attn_mask > float("-inf")
    result = attend(query, key, value, torch.where(finite, attn_mask.clamp(min=low), attn_mask), *args, **kw)
    unattended = finite.to(query.dtype).sum(dim=-1, keepdim=True) < 1
    return torch.where(unattended, torch.zeros((), dtype=result.dtype, device=result.device), result)


def attention_by_products(*args: Any, **kw: Any) -> torch.Tensor:
    """Computes `attention` with two matrix products and a softmax."""
    return attention(*args, attend=_attend_by_products, **kw)


def _attend_by_products(  # noqa: PLR0913 - the parameters of scaled_dot_product_attention
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
    """Computes attention in a form that lets ONNX Runtime fuse the transpose into the product.

    The formula is in the documentation of ``torch.nn.functional.scaled_dot_product_attention``. ``torch.onnx`` reshapes
    the keys to three dimensions before it transposes them. This costs a copy of the keys and a dozen shape nodes.
    """
    if is_causal or enable_gqa or dropout_p or isinstance(scale, torch.SymFloat):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * factor
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, dim=-1), value)


def cumulative_extreme(
    extreme: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a running maximum or minimum, and the index of the last of equal elements.

    The patch of transformers returns another index, and replaces infinity by the largest finite number.

    Args:
        extreme: ``torch.cummax`` or ``torch.cummin``.
    """
    size = x.shape[dim]
    if x.is_floating_point():
        pick, outside = (torch.amax, -math.inf) if extreme is torch.cummax else (torch.amin, math.inf)
        is_before = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        windows = torch.where(is_before, x.movedim(dim, -1).unsqueeze(-2), torch.full((), outside, dtype=x.dtype))
        values = pick(windows, -1).movedim(-1, dim)
    else:
        values = extreme(x, dim)[0]
    steps = torch.arange(size, device=x.device).reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return values, torch.cummax(torch.where(x == values, steps, 0), dim)[0]


def clamp(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:  # noqa: A002 - names of the operator
    """Clamps by bounds of one type; ``torch.onnx`` finds no overload for a whole number and a fraction."""
    return torch.clamp(x, *_of_one_type(min, max))


def clamp_(x: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:  # noqa: A002 - names of the operator
    """Clamps in place, as `clamp`."""
    return torch.clamp_(x, *_of_one_type(min, max))


def _of_one_type(*bounds: Any) -> tuple[Any, ...]:
    return tuple(None if bound is None else float(bound) for bound in bounds) if _has_float(*bounds) else bounds


def angle(x: torch.Tensor) -> torch.Tensor:
    """Computes the angle of complex numbers; ``torch.onnx`` gives -π for negative real ones."""
    return torch.atan2(x.imag, x.real) if x.is_complex() else aten.angle.default(x)


def roll(x: torch.Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """Computes ``torch.roll`` for any shifts and sizes.

    The patch of transformers fixes the split point at the traced size. It skips the roll if that size is a multiple of
    the shift.
    """
    steps = (shifts,) if isinstance(shifts, int | torch.SymInt) else shifts
    axes = (dims,) if isinstance(dims, int) else dims
    if not axes:
        return roll(x.reshape(-1), steps, 0).reshape(x.shape)
    if all(isinstance(number, int) for number in (*steps, *(x.shape[axis] for axis in axes))):
        same = torch.roll(x, [*steps], [*axes])
        return same.clone() if same is x else same  # an output that is an input would have two names
    for step, axis in zip(steps, axes, strict=True):
        x = x.index_select(axis, remainder(torch.arange(x.shape[axis]) - step, x.shape[axis]))
    return x


def fftshift(x: torch.Tensor, dim: int | Sequence[int] | None = None, *, back: bool = False) -> torch.Tensor:
    """Computes ``torch.fft.fftshift``, or ``ifftshift``.

    ONNX supports shifts of known sizes only.

    Args:
        back: True for ``ifftshift``.
    """
    axes = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    for axis in axes:
        middle = x.shape[axis] // 2 if back else (x.shape[axis] + 1) // 2
        x = torch.cat([x.narrow(axis, middle, x.shape[axis] - middle), x.narrow(axis, 0, middle)], axis)
    return x


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Computes the logarithm of a sigmoid.

    ``torch.onnx`` gives minus infinity below -100, because its sigmoid is 0 there.
    """
    return -functional.softplus(-x)


def logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes the logarithm of a sum of exponentials, which overflows in ``torch.onnx``."""
    result = torch.maximum(x, y) + functional.softplus(-(x - y).abs())
    return torch.where(x == y, x + math.log(2), result)  # the difference of two infinities is NaN


def logaddexp2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Computes `logaddexp` to base 2."""
    return logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


def divide(x: torch.Tensor, y: Any, *, rounding_mode: str | None = None) -> torch.Tensor:
    """Divides, with torch's rounding.

    For floats rounded down, torch gives -11 for -7 / 0.7, although the quotient in floats is -10. ``torch.onnx``
    divides integers in float32, so that 1,699,999,199 // 3,600 is too large by one.
    """
    is_fraction = _has_float(x, y)
    if rounding_mode is None or (is_fraction and rounding_mode != "floor"):
        return torch.div(x, y, rounding_mode=rounding_mode)
    x, y = _promote(x, y)
    if not is_fraction:
        dtype, x, y = x.dtype, x.long(), y.long()  # ONNX Runtime does not divide smaller integers
        quotient: torch.Tensor = aten.floor_divide.default(x, y)
        if rounding_mode == "trunc":
            quotient = quotient + ((torch.remainder(x, y) != 0) & ((x < 0) != (y < 0))).long()
        return quotient.to(dtype)
    rest = torch.fmod(x, y)
    quotient = (x - rest) / y - ((rest != 0) & ((rest < 0) != (y < 0))).to(x.dtype)
    return torch.where(y == 0, x / y, torch.round(quotient))


def remainder(x: Any, y: Any) -> torch.Tensor:
    """Computes the remainder of a division that rounds down, exactly for floats.

    ``torch.onnx`` subtracts a rounded product, so that 60,000 % 6.2831855 has an error of 0.003.
    """
    is_fraction = _has_float(x, y)
    x, y = _promote(x, y)
    if not is_fraction:
        return torch.remainder(x, y)
    rest = torch.fmod(x, y)
    return torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


def truncated_remainder(x: Any, y: Any) -> torch.Tensor:
    """Computes the remainder of a division that rounds toward zero.

    ONNX Runtime computes it in float64 for integers.
    """
    if _has_float(x, y):
        return aten.fmod.Tensor(*_promote(x, y))  # type: ignore[no-any-return]
    x, y = _promote(x, y)
    quotient = divide(x, y, rounding_mode="trunc")
    return torch.sub(x, quotient * y)


def round_floats(operator: Any, x: torch.Tensor) -> torch.Tensor:
    """Applies a rounding operator to floats and copies integers.

    ONNX has no rounding operators for integers.
    """
    return operator(x) if x.is_floating_point() else x.clone()


def _has_float(*operands: Any) -> bool:
    return any(v.is_floating_point() if isinstance(v, torch.Tensor) else isinstance(v, float) for v in operands)


def _promote(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts two operands, tensors or numbers, to tensors of the result's dtype."""
    dtype = torch.result_type(x, y)
    first, second = (v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=dtype) for v in (x, y))
    return first.to(dtype), second.to(dtype)


def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> torch.Tensor:
    """Computes ``torch.scatter_reduce``, with means and with infinite extremes.

    ONNX has no mean here; ``torch.onnx`` writes the last element instead.
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
    return divide(total, count.to(x.dtype), rounding_mode=None if x.is_floating_point() else "floor")


def histogram(x: torch.Tensor, bins: int = 100, low: float = 0, high: float = 0) -> torch.Tensor:
    """Computes ``torch.histc``.

    Values outside the range are not counted, and the upper end counts in the last bin. The patch of transformers counts
    values outside the range in the first and the last bin.
    """
    x = x.reshape(-1)
    minimum, maximum = (x.min(), x.max()) if low == high else (x.new_tensor(low), x.new_tensor(high))
    is_constant = (minimum == maximum).to(x.dtype)
    minimum, maximum = minimum - is_constant, maximum + is_constant
    places = ((x - minimum) * bins / (maximum - minimum)).clamp(0, bins - 1).long()
    return x.new_zeros(bins).scatter_add(0, places, ((x >= minimum) & (x <= maximum)).to(x.dtype))


def masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Writes the source's elements, in order, to the places that a mask selects.

    The patch of transformers also reads the source for unselected places, and fails if the source is empty.
    """
    return x.masked_scatter(mask, torch.cat([source.reshape(-1), source.new_zeros(1)]))


def squeeze(x: torch.Tensor, dims: int | Sequence[int] | None = None) -> torch.Tensor:
    """Removes axes whose size is known to be 1.

    ONNX fails on an axis of another size, which torch ignores.
    """
    axes = range(x.dim()) if dims is None else (dims,) if isinstance(dims, int) else dims
    single = [axis for axis in axes if x.dim() and isinstance(x.shape[axis], int) and x.shape[axis] == 1]
    return x.squeeze(single) if single else x.clone()


def upsample_nearest(
    upsample: Any, x: torch.Tensor, sizes: Sequence[Any] | None, factors: Sequence[float] | None = None
) -> torch.Tensor:
    """Upsamples to nearest neighbors with torch's indices.

    An index is ``int(i * before / after)`` in float32. ONNX Runtime divides by ``after / before``. From size 14 to 4,
    it reads index 6 for the third element, and torch reads 7. Both agree if the new size is a multiple of the old one.
    From size 3 with a factor of 1.3, ONNX Runtime copies the input, unlike torch.
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


def adaptive_avg_pool(x: torch.Tensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Computes an adaptive average over the last axes.

    torch's own decomposition is valid only for the traced sizes.

    Args:
        sizes: Output size of each of the last axes.
    """
    axes = range(-len(sizes), 0)
    if _is_one(sizes):
        return x.mean(list(axes), keepdim=True)
    if _is_even(x, sizes):
        pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(sizes) - 1]
        return pool(x, [x.shape[axis] // size for axis, size in zip(axes, sizes, strict=True)])
    for axis, size in zip(axes, sizes, strict=True):
        start, end, steps = _windows(x.shape[axis], size)
        places = start + steps
        windows = _gather_windows(x, axis, places.clamp(max=x.shape[axis] - 1))
        windows = torch.where(_append_axes(axis, places < end), windows, torch.zeros((), dtype=x.dtype))
        x = windows.sum(axis) / _append_axes(axis, end - start).squeeze(axis)
    return x


def adaptive_max_pool(x: torch.Tensor, sizes: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes an adaptive maximum over the last axes.

    Args:
        sizes: Output size of each of the last axes.

    Returns:
        The maxima, and the index of each in the flattened last axes.
    """
    if len(sizes) > 1 and (_is_one(sizes) or _is_even(x, sizes)):
        operator = aten.adaptive_max_pool2d if len(sizes) == 2 else aten.adaptive_max_pool3d
        return operator.default(x, sizes)  # type: ignore[no-any-return]
    index = x.new_zeros((), dtype=torch.int64)
    stride = 1
    for axis in range(-1, -len(sizes) - 1, -1):
        start, end, steps = _windows(x.shape[axis], sizes[axis])
        places = torch.minimum(start + steps, end - 1)
        index = _append_axes(axis, places) * stride + (index if axis == -1 else _gather_windows(index, axis, places))
        stride = stride * x.shape[axis]
        windows = _gather_windows(x, axis, places)
        x, first = windows.max(axis)
        index = index.expand_as(windows).gather(axis, first.unsqueeze(axis)).squeeze(axis)
    return x, index


def _is_one(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) and size == 1 for size in sizes)


def _is_even(x: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Returns True if all windows are known to have the same width and not to overlap."""
    pairs = list(zip(x.shape[-len(sizes) :], sizes, strict=True))
    return all(isinstance(n, int) and isinstance(size, int) and n % size == 0 for n, size in pairs)


def _windows(n: Any, size: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns starts and ends of an axis's windows, shaped [size, 1], and steps of the widest."""
    index = torch.arange(size)[:, None]
    return index * n // size, ((index + 1) * n + size - 1) // size, torch.arange((n + size - 1) // size + 1)


def _gather_windows(x: torch.Tensor, axis: int, places: torch.Tensor) -> torch.Tensor:
    """Replaces an axis by two: one for the windows, and one for the elements of each."""
    windows: torch.Tensor = x.index_select(axis, places.reshape(-1)).unflatten(axis, places.shape)
    return windows


def _append_axes(axis: int, windows: torch.Tensor) -> torch.Tensor:
    """Appends axes of size 1, so that windows broadcast with the axes after theirs."""
    return windows.reshape(*windows.shape, *[1] * (-1 - axis))
