"""Keeps recurrent layers and packed sequences as operators in a trace.

``torch.export`` decomposes ``aten.lstm`` and similar operators into operators for each step, which fixes the number of
steps. Here a trace computes only the shapes of their results, and the operators stay in the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

# Attribute of the fake tensor with the batch size of each step: the number of sequences, its first value.
_SEQUENCES = "sequences"


@contextlib.contextmanager
def keep_recurrent_operators() -> Iterator[None]:
    """Makes traces within the block keep recurrent layers and packed sequences as operators."""
    with contextlib.ExitStack() as stack:
        for operator, compute in _OPERATORS.items():
            stack.enter_context(_computing(operator, compute))
        # torch 2.13 returns the data with a wrong size, and the batch sizes with a wrong dtype.
        implementations = fake_impls.op_implementations_dict
        stack.enter_context(mock.patch.dict(implementations, {aten._pack_padded_sequence.default: _pack}))
        stack.enter_context(mock.patch.object(nn.RNNBase, "get_expected_hidden_size", _expected_hidden_size))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist))
        stack.enter_context(_PackedSequences())
        yield


@contextlib.contextmanager
def _computing(operator: torch._ops.OpOverload, compute: Callable[..., Any]) -> Iterator[None]:
    """Replaces what fake tensors compute for an operator, as ``torch.export._patches`` does."""
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    with (
        mock.patch.dict(operator.py_kernels, dict.fromkeys(keys, compute)),
        mock.patch.dict(decomposition_table, {operator: compute}),
    ):
        operator._dispatch_cache.clear()
        try:
            yield
        finally:
            operator._dispatch_cache.clear()


def _run_padded(x: torch.Tensor, states: Any, weights: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    *_, bidirectional, _ = args
    return _results(x, states, weights, bool(bidirectional))


def _run_packed(data: torch.Tensor, _: torch.Tensor, states: Any, weights: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    return _results(data, states, weights, args[-1])


def _results(
    x: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    torch._check(x.shape[-1] == weights[0].shape[-1])  # a packed LSTM of eager PyTorch reads other memory instead
    states = [states] if isinstance(states, torch.Tensor) else states
    size = states[0].shape[-1] * (2 if bidirectional else 1)
    return (x.new_empty([*x.shape[:-1], size]), *(torch.empty_like(state) for state in states))


def _pack(
    mode: FakeTensorMode, _: Any, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    environment = mode.shape_env
    assert environment is not None
    length, count = environment.create_unbacked_symint(), environment.create_unbacked_symint()
    sequences, steps = x.shape[:2] if batch_first else (x.shape[1], x.shape[0])
    for condition in (length >= 1, length <= steps, count >= 1, count <= sequences * steps):
        torch._check(condition)
    batch_sizes = lengths.new_empty([length], dtype=torch.int64)
    vars(batch_sizes)[_SEQUENCES] = sequences
    return x.new_empty([count, *x.shape[2:]]), batch_sizes


class _PackedSequences(TorchFunctionMode):
    """Makes packed sequences traceable with sizes that depend on values."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (
            func is torch.Tensor.__getitem__
            and isinstance(args[1], int)
            and args[1] == 0
            and _SEQUENCES in vars(args[0])
        ):
            return vars(args[0])[_SEQUENCES]  # layers read element 0 as a size; torch would return a tensor
        if func is torch._pad_packed_sequence and isinstance(args[1], FakeTensor):
            return _pad(*args)
        if func is torch.as_tensor and args and isinstance(args[0], _Lengths):
            return args[0].tensor.to(**(kwargs or {}))
        args = [list(arg) if isinstance(arg, _Lengths) else arg for arg in args]
        return func(*args, **(kwargs or {}))


class _Lengths:
    """A tensor as a list. A trace does not know the values; packing turns the list into a tensor again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def _read(self) -> list[int]:
        """Raises, as the number of values is unknown; the error names the line that asked for it."""
        return _TORCH_TOLIST(self.tensor)  # type: ignore[no-any-return]


def _tolist(tensor: Any) -> Any:
    """Returns a tensor's values as a list. If its length is unknown, the list can only be used for packing."""
    has_unknown_length = tensor.dim() == 1 and isinstance(tensor.shape[0], torch.SymInt)
    return _Lengths(tensor) if has_unknown_length else _TORCH_TOLIST(tensor)


def _pad(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``torch._pad_packed_sequence``, which accepts no symbolic length."""
    sequences, length = vars(batch_sizes)[_SEQUENCES], batch_sizes.shape[0]
    if total_length is not length:
        batch_sizes = nn.functional.pad(batch_sizes, (0, total_length - length))
    is_step = torch.arange(sequences) < batch_sizes[:, None]  # [time, batch]
    padded = data.new_full([total_length, sequences, *data.shape[1:]], padding_value)
    padded = padded.masked_scatter(is_step[(...,) + (None,) * (data.dim() - 1)], data)
    return padded.transpose(0, 1) if batch_first else padded, is_step.sum(0)


def _expected_hidden_size(layer: nn.RNNBase, x: torch.Tensor, batch_sizes: torch.Tensor | None) -> tuple[Any, ...]:
    """Returns the expected shape of a hidden state.

    torch's method would convert the number of packed sequences to an integer, which fixes it.
    """
    if batch_sizes is None:
        return _TORCH_EXPECTED_HIDDEN_SIZE(layer, x, None)
    layers = layer.num_layers * (2 if layer.bidirectional else 1)
    return layers, batch_sizes[0], layer.proj_size or layer.hidden_size


_TORCH_TOLIST: Callable[[Any], Any] = FakeTensor.tolist
_TORCH_EXPECTED_HIDDEN_SIZE = nn.RNNBase.get_expected_hidden_size
_OPERATORS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), _run_padded),
    **dict.fromkeys((aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data), _run_packed),
}
