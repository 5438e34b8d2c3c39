"""Tests of recurrent layers in every format: any number of steps, states, projections and packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from optexport.errors import TraceError
from optexport.exporters import pt2, torchscript
from optexport.runtime import runners
from optexport.signature.signature import Dim, Dynamic
from optexport.tracing.recurrent import keep_recurrent_operators
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program
from tests.exporters import files

BATCH, TIME = Dim("batch", 1, 32), Dim("time", 1, 60)
SEQUENCES: Dynamic = {"x": {0: BATCH, 1: TIME}}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def assert_exact(
    model: nn.Module,
    dynamic: Dynamic,
    inputs: Sequence[dict[str, torch.Tensor]],
    place: Path,
    formats: Sequence[str] = ("onnx", "torchscript", "pt2"),
) -> None:
    """Asserts that the files of the first inputs give the model's outputs for all inputs."""
    subject = files.prepare(model.eval(), inputs[0], dynamic)
    names = subject.signature.output_names
    for file_format in formats:
        path = place / f"model.{file_format}"
        if file_format == "onnx":
            files.save_onnx(subject, path)
            run: Callable[[Any], Mapping[str, torch.Tensor]] = runners.open_onnx(path, names, optimized=True)
        elif file_format == "torchscript":
            assert torchscript.save(subject.program, subject.signature, subject.example, path) is None
            run = runners.open_torchscript(path, names)
        else:
            pt2.save(subject.program, path)
            run = runners.open_pt2(path, names)
        for batch in inputs:
            results = run(batch)
            for name, value in files.eager(subject, batch).items():
                torch.testing.assert_close(results[name], value, rtol=1e-5, atol=1e-6, msg=f"{file_format}: {name}")


def sequences(*sizes: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(*size, 5)} for size in sizes]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True}),
        ("LSTM", {"bias": False}),
        ("LSTM", {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
        ("LSTM", {"proj_size": 2, "bias": False}),
        ("GRU", {"num_layers": 3, "dropout": 0.5}),
        ("GRU", {"bidirectional": True, "bias": False}),
        ("RNN", {"num_layers": 2}),
        ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
    ],
)
def test_layer_takes_any_number_of_steps(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    layer = getattr(nn, kind)(5, 6, batch_first=True, **options)
    assert_exact(Program(lambda m, x: m.r(x), r=layer), SEQUENCES, sequences((2, 7), (1, 1), (3, 2), (1, 28)), tmp_path)


@pytest.mark.slow
def test_time_may_be_the_first_axis(tmp_path: Path) -> None:
    dynamic = {"x": {0: TIME, 1: BATCH}}
    model = Program(lambda m, x: m.r(x), r=nn.LSTM(5, 6, bidirectional=True))
    assert_exact(model, dynamic, sequences((7, 2), (1, 1), (28, 3)), tmp_path)


@pytest.mark.slow
def test_sequence_without_a_batch_axis_is_supported(tmp_path: Path) -> None:
    model = Program(lambda m, x: m.r(x), r=nn.GRU(5, 6, bidirectional=True))
    assert_exact(model, {"x": {0: TIME}}, sequences((7,), (1,), (28,)), tmp_path)


class _States(nn.Module):
    """Takes the first states and returns the last ones."""

    def __init__(self, proj_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True, proj_size=proj_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        return self.lstm(x, (h, c))


@pytest.mark.sample(1)
@pytest.mark.parametrize("proj_size", [3, 0])
def test_states_may_be_inputs(proj_size: int, tmp_path: Path) -> None:
    inputs = [
        {"x": torch.randn(b, t, 5), "h": torch.randn(4, b, proj_size or 6), "c": torch.randn(4, b, 6)}
        for b, t in ((2, 7), (1, 1), (3, 28))
    ]
    dynamic: Dynamic = {**SEQUENCES, "h": {1: BATCH}, "c": {1: BATCH}}
    assert_exact(_States(proj_size), dynamic, inputs, tmp_path, formats=["onnx"])


@pytest.mark.slow
def test_weights_of_a_file_are_in_the_order_of_onnx(tmp_path: Path) -> None:
    layer = nn.LSTM(64, 256, batch_first=True)
    subject = files.prepare(Program(lambda m, x: m.r(x)[0], r=layer).eval(), {"x": torch.randn(2, 7, 64)}, SEQUENCES)
    files.save_onnx(subject, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    (node,) = [node for node in graph.node if node.op_type == "LSTM"]
    assert {tensor.name for tensor in graph.initializer} == set(node.input[1:4])
    assert sum(tensor.ByteSize() for tensor in graph.initializer) < 4.1 * sum(p.numel() for p in layer.parameters())


class _Packed(nn.Module):
    """Packs sequences of different lengths."""

    def __init__(self, body: Callable[..., Any], *, enforce_sorted: bool = False) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 6, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(12, 6, batch_first=True, proj_size=4)
        self._body, self._enforce_sorted = body, enforce_sorted

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=self._enforce_sorted)
        return self._body(self, packed, x)


def _pad(m: Any, packed: PackedSequence, x: torch.Tensor) -> Any:
    y, h = m.gru(packed)
    return pad_packed_sequence(y, batch_first=True), h


def _pad_two_layers(m: Any, packed: PackedSequence, x: torch.Tensor) -> Any:
    y, states = m.lstm(m.gru(packed)[0])
    return pad_packed_sequence(y, batch_first=True, padding_value=-7.5, total_length=x.shape[1]), states


def _change_data(m: Any, packed: PackedSequence, x: torch.Tensor) -> Any:
    return pad_packed_sequence(m.gru(packed._replace(data=packed.data.tanh() * 2))[0])


def _first_states(m: Any, packed: PackedSequence, x: torch.Tensor) -> Any:
    return m.gru(packed, torch.ones(2, x.shape[0], 6))[1]


def packed_inputs(*batches: Sequence[int], padding: int = 0) -> list[dict[str, torch.Tensor]]:
    return [
        {"x": torch.randn(len(lengths), max(lengths) + padding * index, 5), "lengths": torch.tensor(lengths)}
        for index, lengths in enumerate(batches)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("body", [_pad_two_layers, _pad, _change_data, _first_states])
def test_sequences_of_different_lengths_are_packed(body: Callable[..., Any], tmp_path: Path) -> None:
    inputs = packed_inputs([4, 7, 2], [1], [3, 28, 1, 5], [3, 2], padding=3)
    assert_exact(_Packed(body), {**SEQUENCES, "lengths": {0: BATCH}}, inputs, tmp_path)


@pytest.mark.slow
def test_sorted_sequences_are_packed(tmp_path: Path) -> None:
    inputs = packed_inputs([7, 4, 2], [1], [28, 3, 3, 1], padding=1)
    assert_exact(_Packed(_pad, enforce_sorted=True), {**SEQUENCES, "lengths": {0: BATCH}}, inputs, tmp_path)


class _PackedLstm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True, **options)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("options", [{}, {"proj_size": 4}], ids=["plain", "projected"])
def test_features_of_a_packed_lstm_are_a_fixed_axis(options: dict[str, Any]) -> None:
    """Eager PyTorch does not check them, and reads other memory instead."""
    program = trace(_PackedLstm(**options).eval(), packed_inputs([4, 7, 2])[0])
    assert program.signature.inputs[0].shape == ("batch", "x_1", 5)


class _ListedLengths(_Packed):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        return self._body(self, pack_padded_sequence(x, lengths.tolist(), batch_first=True, enforce_sorted=False), x)


def test_lengths_may_be_a_list(tmp_path: Path) -> None:
    inputs = packed_inputs([4, 7, 2], [1], [3, 28, 1, 5])
    assert_exact(_ListedLengths(_pad), {**SEQUENCES, "lengths": {0: BATCH}}, inputs, tmp_path, formats=["torchscript"])


def test_torch_is_as_before_after_a_trace() -> None:
    operators = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    before = [dict(operator.py_kernels) for operator in operators], nn.RNNBase.get_expected_hidden_size
    with keep_recurrent_operators():
        assert nn.RNNBase.get_expected_hidden_size is not before[1]
    assert ([dict(operator.py_kernels) for operator in operators], nn.RNNBase.get_expected_hidden_size) == before


class _Cells(nn.Module):
    """Runs a cell for every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 6)
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
        return h


@pytest.mark.slow
def test_loop_over_a_fixed_number_of_steps_is_unrolled(tmp_path: Path) -> None:
    assert_exact(_Cells(), {"x": {0: BATCH}}, sequences((2, 7), (1, 7), (3, 7)), tmp_path)


@pytest.mark.slow
def test_loop_over_a_dynamic_number_of_steps_is_refused() -> None:
    with pytest.raises(TraceError) as raised:
        trace(_Cells().eval(), sequences((2, 7))[0], SEQUENCES)
    message = str(raised.value)
    assert "for step in range(x.shape[1]):" in message
    assert "nn.LSTM for nn.LSTMCell" in message
