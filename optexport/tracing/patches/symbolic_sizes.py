"""Traces functions of torch that take a size as a Python integer, or choose an algorithm by it, for every size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import sympy
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Mod, PythonMod

from optexport._utils.pooling import adaptive_avg_pool, adaptive_max_pool, avg_pool, max_pool


class SymbolicSizes(TorchFunctionMode):
    """Replaces these functions within the block, where one of their sizes is symbolic.

    The replacements have the names of torch's parameters, because they get every call.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PADDING:
            args, kwargs = pytree.tree_map_only(torch.SymInt, _allow_multiples, (args, dict(kwargs)))
        function = _FUNCTIONS.get(func)
        result = None if function is None else function(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _cdist(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str = "use_mm_for_euclid_dist_if_necessary"
) -> torch.Tensor | None:
    """Computes exact distances; torch uses a product for more than 25 points, so that a trace is valid up to 25."""
    if not compute_mode.endswith("if_necessary") or not _is_symbolic(x1.shape[-2], x2.shape[-2]):
        return None
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **kw: Any) -> torch.Tensor | None:
    dtype = dtype or torch.get_default_dtype()
    if not _is_symbolic(steps) or not dtype.is_floating_point or set(kw) - {"device"}:
        return None
    index = torch.arange(steps, dtype=dtype, **kw)
    last = torch.full((), steps - 1, dtype=dtype, **kw).clamp(min=1)
    step = (end - start) / last
    return torch.where(index * 2 <= last, start + step * index, end - step * (last - index))


def _hann_window(
    window_length: Any, periodic: bool = True, *, dtype: torch.dtype | None = None, **kw: Any
) -> torch.Tensor | None:
    if not _is_symbolic(window_length) or set(kw) - {"device"}:
        return None
    dtype = dtype or torch.get_default_dtype()
    period = torch.full((), window_length if periodic else window_length - 1, dtype=dtype, **kw).clamp(min=1)
    window = torch.sin(torch.arange(window_length, dtype=dtype, **kw) * math.pi / period).square()
    return torch.where(torch.full((), window_length, **kw) == 1, torch.ones((), dtype=dtype, **kw), window)


def _istft(  # noqa: PLR0913 - the parameters of istft
    input: torch.Tensor,  # noqa: A002 - torch's name
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: Any = None,
    return_complex: bool = False,
) -> torch.Tensor | None:
    """Adds overlapping frames as torch does; the length may be longer than the frames."""
    if not _is_symbolic(length) or return_complex:
        return None
    frames = (input if input.dim() == 3 else input.unsqueeze(0)).transpose(1, 2)
    norm = "ortho" if normalized else "backward"
    transform = torch.fft.irfft if onesided is not False else torch.fft.ifft
    frames = torch.real(transform(frames, n=n_fft, dim=-1, norm=norm))
    win_length, hop_length = win_length or n_fft, hop_length or n_fft // 4
    window = torch.ones(win_length, dtype=frames.dtype, device=input.device) if window is None else window
    before = (n_fft - win_length) // 2
    window = functional.pad(window, (before, n_fft - win_length - before))
    count, size = frames.shape[1], n_fft + hop_length * (frames.shape[1] - 1)
    weights = (window * window).expand(1, count, n_fft)
    start = n_fft // 2 if center else 0

    def add_frames(frames: torch.Tensor, outside: float) -> torch.Tensor:
        total = torch.ops.aten.unfold_backward(frames, [frames.shape[0], size], 1, n_fft, hop_length)
        return functional.pad(total, (0, length), value=outside).narrow(1, start, length)

    signal = add_frames(frames * window, 0) / add_frames(weights, 1)
    return signal if input.dim() == 3 else signal.squeeze(0)


def _take_along_dim(input: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor | None:  # noqa: A002
    """Gathers after broadcasting; the fake version of torch 2.13 turns every size into an integer."""
    if not _is_symbolic(*input.shape, *indices.shape):
        return None
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim = dim % input.dim()
    other_sizes = ((*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :]) for tensor in (input, indices))
    sizes = torch.broadcast_shapes(*other_sizes)

    def expand(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(*sizes[:dim], tensor.shape[dim], *sizes[dim + 1 :])

    return expand(input).gather(dim, expand(indices))


def _affine_grid(theta: torch.Tensor, size: Any, align_corners: bool | None = None) -> torch.Tensor | None:
    """Multiplies the points of a regular grid by a matrix per row, in the order of torch."""
    _, _, *axes = size
    if not _is_symbolic(*axes):
        return None
    options: Any = {"dtype": theta.dtype, "device": theta.device}
    coordinates = []
    for count in axes:
        last = torch.full((), count - 1, **options)
        points = -1 + 2 * torch.arange(count, **options) / last.clamp(min=1)
        coordinates.append(torch.where(last == 0, 0, points) if align_corners else points * (last / (last + 1)))
    points = torch.stack([*reversed(torch.meshgrid(*coordinates, indexing="ij")), torch.ones(axes, **options)], -1)
    grid = points.flatten(0, -2).expand(theta.shape[0], -1, -1) @ theta.mT
    return grid.view(theta.shape[0], *axes, len(axes))


def _adaptive_max_pool(axes: int, input: torch.Tensor, output_size: Any, return_indices: bool = False) -> Any:  # noqa: A002
    sizes = _symbolic_sizes(input, axes, output_size)
    if sizes is None:
        return None
    maxima, indices = adaptive_max_pool(input, sizes)
    return (maxima, indices) if return_indices else maxima


def _adaptive_avg_pool(axes: int, input: torch.Tensor, output_size: Any) -> torch.Tensor | None:  # noqa: A002
    sizes = _symbolic_sizes(input, axes, output_size)
    return None if sizes is None else adaptive_avg_pool(input, sizes)


def _symbolic_sizes(x: torch.Tensor, axes: int, output_size: Any) -> list[Any] | None:
    """Returns the output sizes of adaptive pooling, or None if all of them are numbers."""
    pairs = zip(x.shape[-axes:], _per_axis(output_size, axes), strict=True)
    sizes = [before if size is None else size for before, size in pairs]
    return sizes if _is_symbolic(*sizes) else None


def _max_pool(  # noqa: PLR0913 - the parameters of max_pool
    axes: int,
    input: torch.Tensor,  # noqa: A002 - torch's name
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> torch.Tensor | None:
    kernels = _per_axis(kernel_size, axes)
    if not _is_symbolic(*kernels) or return_indices or {*_per_axis(padding, axes)} != {0}:
        return None
    if {*_per_axis(dilation, axes)} != {1}:
        return None
    return max_pool(input, kernels, _per_axis(stride or kernels, axes), ceil_mode=ceil_mode)


def _avg_pool(  # noqa: PLR0913 - the parameters of avg_pool
    axes: int,
    input: torch.Tensor,  # noqa: A002 - torch's name
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,  # noqa: ARG001 - without padding, it has no effect
    divisor_override: int | None = None,
) -> torch.Tensor | None:
    kernels = _per_axis(kernel_size, axes)
    if not _is_symbolic(*kernels) or divisor_override or {*_per_axis(padding, axes)} != {0}:
        return None
    return avg_pool(input, kernels, _per_axis(stride or kernels, axes), ceil_mode=ceil_mode)


def _per_axis(value: Any, axes: int) -> list[Any]:
    """Returns one value for each axis; torch also takes one for all."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * axes if len(values) == 1 else values


def _allow_multiples(size: torch.SymInt) -> Any:
    """Returns ``k - n % k``, or a part of it, so that it is 0 if n is a multiple of k.

    In ``if n % k: x = pad(x, (0, k - n % k))``, the model computes it only for other n. With 0, the graph is right for
    multiples as well.
    """
    environment, expression = size.node.shape_env, size.node.expr
    for remainder in expression.atoms(Mod, PythonMod):
        step = remainder.args[1]
        if step.is_Integer and expression.subs(remainder, step) == 0 and _is_guarded(size, remainder):
            expression = expression.subs(remainder, step - Mod(step - remainder, step))
    return size if expression == size.node.expr else environment.create_symintnode(expression, hint=size.node.hint)


def _is_guarded(size: torch.SymInt, remainder: sympy.Expr) -> bool:
    """Returns True if the trace took a branch for sizes with a remainder."""
    conditions = (sympy.Ne(remainder, 0), sympy.Gt(remainder, 0))
    return any(size.node.shape_env._maybe_evaluate_static(condition) == sympy.true for condition in conditions)


def _is_symbolic(*sizes: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in sizes)


# Functions that models use to make a size a multiple of a number.
_PADDING = frozenset(
    {functional.pad, torch.zeros, torch.ones, torch.full}
    | {torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full}
)
_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.cdist: _cdist,
    torch.linspace: _linspace,
    torch.hann_window: _hann_window,
    torch.istft: _istft,
    torch.Tensor.istft: _istft,
    torch.take_along_dim: _take_along_dim,
    torch.Tensor.take_along_dim: _take_along_dim,
    functional.affine_grid: _affine_grid,
    functional.avg_pool1d: partial(_avg_pool, 1),
    functional.avg_pool2d: partial(_avg_pool, 2),
    functional.avg_pool3d: partial(_avg_pool, 3),
    functional.max_pool1d: partial(_max_pool, 1),
    functional.max_pool2d: partial(_max_pool, 2),
    functional.max_pool3d: partial(_max_pool, 3),
    functional.adaptive_avg_pool1d: partial(_adaptive_avg_pool, 1),
    functional.adaptive_avg_pool2d: partial(_adaptive_avg_pool, 2),
    functional.adaptive_avg_pool3d: partial(_adaptive_avg_pool, 3),
    functional.adaptive_max_pool1d: partial(_adaptive_max_pool, 1),
    functional.adaptive_max_pool2d: partial(_adaptive_max_pool, 2),
    functional.adaptive_max_pool3d: partial(_adaptive_max_pool, 3),
    functional.adaptive_max_pool1d_with_indices: partial(_adaptive_max_pool, 1, return_indices=True),
    functional.adaptive_max_pool2d_with_indices: partial(_adaptive_max_pool, 2, return_indices=True),
    functional.adaptive_max_pool3d_with_indices: partial(_adaptive_max_pool, 3, return_indices=True),
}
