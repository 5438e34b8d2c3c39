"""Translates recurrent layers and packed sequences to ONNX, for any number of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir
import torch

from optexport.exporters.onnx.translations import op

aten = torch.ops.aten


@dataclass(frozen=True)
class _Kind:
    """Describes how ONNX writes one kind of layer.

    Attributes:
        op_type: Name of the operator.
        gates: Positions of the gates in PyTorch's weights, in the order of ONNX.
        attributes: Attributes of the operator.
        activation: Activation of an RNN.
    """

    op_type: str
    gates: tuple[int, ...]
    attributes: Mapping[str, int] = field(default_factory=dict)
    activation: str | None = None


_KINDS = {
    "lstm": _Kind("LSTM", (0, 3, 1, 2)),  # from i f g o to i o f g
    "gru": _Kind("GRU", (1, 0, 2), {"linear_before_reset": 1}),  # from r z n to z r n
    "rnn_tanh": _Kind("RNN", (0,), activation="Tanh"),
    "rnn_relu": _Kind("RNN", (0,), activation="Relu"),
}


@dataclass(frozen=True)
class _Direction:
    """Weights of one layer in one direction, in PyTorch's order; only an LSTM can have a projection."""

    weight_ih: Any
    weight_hh: Any
    biases: Sequence[Any]
    weight_hr: Any = None


@dataclass(frozen=True)
class _Layers:
    """Writes the layers of one call.

    Attributes:
        hidden: Size of the hidden state, before a projection.
        lengths: Number of steps of each sequence, as int32; None if they have all steps.
    """

    kind: _Kind
    hidden: int
    lengths: Any = None

    def write(self, x: Any, states: Sequence[Any], layers: Sequence[Sequence[_Direction]]) -> list[Any]:
        """Returns the outputs of the last layer, ``[time, batch, features]``, and the last states of all layers."""
        last = []
        for index, layer in enumerate(layers):
            size = len(layer)
            first = [_slice(state, index * size, size, len(layers) * size) for state in states]
            if layer[0].weight_hr is not None:
                x, *ends = self._write_projected(x, first, layer)
            else:
                y, *ends = self._call(x, first, layer, "bidirectional" if size == 2 else "forward")
                x = _join_directions(y, size, self.hidden)
            last.append(ends)
        return [x, *(_concat(ends) for ends in zip(*last, strict=True))]

    def _call(self, x: Any, states: Sequence[Any], layer: Sequence[_Direction], direction: str) -> list[Any]:
        rows = _ints(*(gate * self.hidden + row for gate in self.kind.gates for row in range(self.hidden)))
        biases = [op.Concat(*(op.Gather(bias, rows) for bias in part.biases), axis=0) for part in layer if part.biases]
        attributes: dict[str, Any] = dict(self.kind.attributes)
        if self.kind.activation:
            attributes["activations"] = [self.kind.activation] * len(layer)
        results = getattr(op, self.kind.op_type)(
            x,
            _stack([op.Gather(part.weight_ih, rows) for part in layer]),
            _stack([op.Gather(part.weight_hh, rows) for part in layer]),
            _stack(biases) if biases else None,
            self.lengths,
            *states,
            direction=direction,
            hidden_size=self.hidden,
            **attributes,
        )
        return list(results)

    def _write_projected(self, x: Any, states: Sequence[Any], layer: Sequence[_Direction]) -> list[Any]:
        """Writes an LSTM with projections, which ONNX lacks, as one without.

        The recurrence uses the product of both weights, and every output is projected. The first state is projected
        already. So it becomes an additional input of the first step.
        """
        results = []
        for index, direction in enumerate(layer):
            h, c = (_slice(state, index, 1, len(layer)) for state in states)
            first = op.Where(
                self._is_first_step(x, reverse=index == 1), h, op.CastLike(op.Constant(value_float=0.0), h)
            )
            unprojected = _Direction(
                op.Concat(direction.weight_ih, direction.weight_hh, axis=1),
                op.MatMul(direction.weight_hh, direction.weight_hr),
                direction.biases,
            )
            inputs = op.Concat(x, first, axis=2)
            y, last_h, last_c = self._call(inputs, (None, c), [unprojected], ("forward", "reverse")[index])
            projection = op.Transpose(direction.weight_hr, perm=[1, 0])
            results.append((op.MatMul(op.Squeeze(y, _ints(1)), projection), op.MatMul(last_h, projection), last_c))
        return [_concat(parts, axis) for parts, axis in zip(zip(*results, strict=True), (2, 0, 0), strict=True)]

    def _is_first_step(self, x: Any, *, reverse: bool) -> Any:
        """Returns a mask that is True at the first step of a direction, ``[time, batch or 1, 1]``."""
        steps = op.Shape(x, start=0, end=1)
        first = _ints(0)
        if reverse:
            ends = steps if self.lengths is None else op.Cast(self.lengths, to=onnx_ir.DataType.INT64)
            first = op.Sub(ends, _ints(1))
        return op.Unsqueeze(op.Equal(op.Unsqueeze(_range(steps), _ints(1)), first), _ints(2))


def _translate_padded(kind: _Kind, x: Any, states: Any, weights: Sequence[Any], *options: Any) -> tuple[Any, ...]:
    *others, batch_first = options
    if batch_first:  # ONNX Runtime 1.31 does not support layout=1
        x = op.Transpose(x, perm=[1, 0, 2])
    y, *last = _write(kind, x, states, weights, others)
    return (op.Transpose(y, perm=[1, 0, 2]) if batch_first else y, *last)


def _translate_packed(
    kind: _Kind, data: Any, batch_sizes: Any, states: Any, weights: Sequence[Any], *options: Any
) -> tuple[Any, ...]:
    is_step = _steps_of(batch_sizes)
    places = _places(is_step)
    sizes = op.Concat(op.Shape(is_step), op.Shape(data, start=1), axis=0)
    x = op.ScatterND(op.Expand(op.CastLike(_ints(0), data), sizes), places, data)
    lengths = op.Cast(_count(is_step, axis=0), to=onnx_ir.DataType.INT32)
    y, *last = _write(kind, x, states, weights, options, lengths)
    return (op.GatherND(y, places), *last)


def _write(
    kind: _Kind, x: Any, states: Any, weights: Sequence[Any], options: Sequence[Any], lengths: Any = None
) -> list[Any]:
    """Writes all layers of one call; see `_Layers.write`.

    Args:
        weights: Weights and biases of each layer and direction.
        options: The arguments that follow the weights, from ``has_biases`` to ``bidirectional``.
    """
    has_biases, layers, *_, bidirectional = options
    size = 2 if bidirectional else 1
    count = len(weights) // (layers * size)
    directions = []
    for start in range(0, len(weights), count):
        weight_ih, weight_hh, *others = weights[start : start + count]
        biases, weight_hr = (others[:2], others[2:]) if has_biases else ([], others)
        directions.append(_Direction(weight_ih, weight_hh, biases, *weight_hr))
    hidden = int(weights[0].shape[0]) // len(kind.gates)
    return _Layers(kind, hidden, lengths).write(
        x,
        [states] if isinstance(states, onnx_ir.Value) else states,
        [directions[start : start + size] for start in range(0, len(directions), size)],
    )


def _pack(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, *range(2, len(x.shape))])
    steps = op.Unsqueeze(_range(op.ReduceMax(lengths, keepdims=1)), _ints(1))
    is_step = op.Less(steps, op.Unsqueeze(lengths, _ints(0)))  # [time, batch]
    return op.GatherND(x, _places(is_step)), _count(is_step, axis=1)


def _steps_of(batch_sizes: Any) -> Any:
    """Returns which steps each sequence has, ``[time, batch]``; the first sequence is the longest."""
    sequences = _range(op.Slice(batch_sizes, _ints(0), _ints(1), _ints(0)))
    return op.Less(op.Unsqueeze(sequences, _ints(0)), op.Unsqueeze(batch_sizes, _ints(1)))


def _places(is_step: Any) -> Any:
    return op.Transpose(op.NonZero(is_step), perm=[1, 0])


def _count(is_step: Any, axis: int) -> Any:
    return op.ReduceSum(op.Cast(is_step, to=onnx_ir.DataType.INT64), _ints(axis), keepdims=0)


def _range(stop: Any) -> Any:
    zero, one = (op.Constant(value_int=number) for number in (0, 1))
    return op.Range(zero, op.Squeeze(stop), one)


def _join_directions(y: Any, directions: int, hidden: int) -> Any:
    """Returns outputs ``[time, direction, batch, hidden]`` as ``[time, batch, features]``."""
    if directions == 1:
        return op.Squeeze(y, _ints(1))
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), _ints(0, 0, directions * hidden))


def _slice(state: Any, start: int, length: int, size: int) -> Any:
    return state if length == size else op.Slice(state, _ints(start), _ints(start + length), _ints(0))


def _stack(tensors: Sequence[Any]) -> Any:
    return _concat([op.Unsqueeze(tensor, _ints(0)) for tensor in tensors])


def _concat(tensors: Sequence[Any], axis: int = 0) -> Any:
    return tensors[0] if len(tensors) == 1 else op.Concat(*tensors, axis=axis)


def _ints(*numbers: int) -> Any:
    return op.Constant(value_ints=numbers)


def should_fold(node: onnx_ir.Node) -> bool | None:
    """Returns True if a node only rearranges weights of recurrent operators, which can be folded at no cost in size.

    None leaves the decision to the optimizer.
    """
    uses = [use for value in node.outputs for use in value.uses()]
    if node.op_type not in _LAYOUT or not uses:
        return None
    is_weight = all(
        1 <= use.idx <= 3 if use.node.op_type in _OP_TYPES else should_fold(use.node) or False for use in uses
    )
    return is_weight or None


_OP_TYPES = {kind.op_type for kind in _KINDS.values()}
_LAYOUT = {"Concat", "Gather", "Unsqueeze"}

TRANSLATIONS: Mapping[Any, Callable[..., Any]] = {
    **{getattr(aten, name).input: functools.partial(_translate_padded, kind) for name, kind in _KINDS.items()},
    **{getattr(aten, name).data: functools.partial(_translate_packed, kind) for name, kind in _KINDS.items()},
    aten._pack_padded_sequence.default: _pack,
}
