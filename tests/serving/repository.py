"""Reads a model repository like Triton Inference Server, by its published definition and its sources.

The rules are those in ``model_config_utils.cc`` of triton-inference-server/core and in the backends
onnxruntime_backend and pytorch_backend, in June 2026.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format

Arrays = dict[str, np.ndarray]

# Types of ONNX Runtime and TorchScript, by their names in a configuration.
_ONNX = {
    "TYPE_BOOL": "tensor(bool)",
    "TYPE_INT64": "tensor(int64)",
    "TYPE_FP16": "tensor(float16)",
    "TYPE_FP32": "tensor(float)",
}
_NUMPY = {"TYPE_BOOL": "bool", "TYPE_INT64": "int64", "TYPE_FP16": "float16", "TYPE_FP32": "float32"}


def _definition() -> Any:
    """Returns the compiled ``model_config.proto`` of tritonclient, without its other modules, which need gRPC."""
    pytest.importorskip("tritonclient", reason="pip install --no-deps -r tests/tools.txt")
    path = importlib.metadata.distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_pb2 = _definition()


def read(folder: Path) -> Any:
    """Returns a model's configuration, after the checks that the server makes before it calls a backend."""
    config = text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), _pb2.ModelConfig())
    assert config.name == folder.name
    assert (folder / "1" / config.default_model_filename).is_file()
    assert config.max_batch_size >= 0
    for io in (*config.input, *config.output):
        assert io.name
        assert io.data_type != _pb2.TYPE_INVALID
        assert io.dims
        assert all(size >= 1 or size == -1 for size in io.dims)
        if io.HasField("reshape"):
            assert config.max_batch_size > 0, "scalars are not supported"
            assert not io.reshape.shape
            assert list(io.dims) == [1]
    return config


def type_of(io: Any) -> str:
    name: str = _pb2.DataType.Name(io.data_type)
    return name


def _shape(config: Any, io: Any) -> list[int]:
    """Returns the shape that the backend passes to the model, with -1 for any size."""
    rest = [*io.reshape.shape] if io.HasField("reshape") else [*io.dims]
    return [-1, *rest] if config.max_batch_size else rest


def open_model(config: Any, path: Path) -> Callable[[Arrays], list[np.ndarray]]:
    """Opens a file like its backend, after the same checks; returns a function that answers requests."""
    match config.backend, config.platform:
        case "onnxruntime", "onnxruntime_onnx":
            return _open_onnx(config, path)
        case "pytorch", "pytorch_libtorch":
            return _open_torchscript(config, path)
    raise AssertionError(f"Triton knows no {config.platform} of {config.backend}")


def _open_onnx(config: Any, path: Path) -> Callable[[Arrays], list[np.ndarray]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert len(session.get_inputs()) == len(config.input)
    values = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
    for io in (*config.input, *config.output):
        value = values[io.name]
        assert _ONNX[type_of(io)] == value.type
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        assert _shape(config, io) == shape if shape else all(size == 1 for size in io.dims), io.name

    def run(inputs: Arrays) -> list[np.ndarray]:
        feeds = {name: array.reshape(()) if not values[name].shape else array for name, array in inputs.items()}
        results: list[np.ndarray] = session.run([io.name for io in config.output], feeds)
        return results

    return run


def _open_torchscript(config: Any, path: Path) -> Callable[[Arrays], list[np.ndarray]]:
    module = torch.jit.load(path)
    arguments = [argument.name for argument in module.forward.schema.arguments[1:]]
    assert len(arguments) == len(config.input)
    assert {io.name for io in config.input} <= set(arguments)  # else the backend matches by order or number
    positions = [int(io.name.removeprefix("OUTPUT__")) for io in config.output]

    def run(inputs: Arrays) -> list[np.ndarray]:
        with torch.inference_mode():
            results = module(*(torch.from_numpy(inputs[name].copy()) for name in arguments))
        assert isinstance(results, tuple)
        assert all(result.dim() for result in results), "a scalar is not supported"
        return [results[place].numpy() for place in positions]

    return run


def ask(
    config: Any, run: Callable[[Arrays], list[np.ndarray]], inputs: Mapping[str, np.ndarray], names: Sequence[str]
) -> Arrays:
    """Returns the server's answer to a request with these inputs, in the shapes of the configuration.

    Args:
        inputs: Arrays in the order of the configuration.
        names: Names of the outputs, in their order.
    """
    request: Arrays = {}
    for io, array in zip(config.input, inputs.values(), strict=True):
        assert array.dtype == _NUMPY[type_of(io)]
        shape = [-1, *io.dims] if config.max_batch_size else [*io.dims]
        sent = array.reshape(array.shape + (1,) * (len(shape) - array.ndim))
        assert len(sent.shape) == len(shape)
        assert all(said in (-1, size) for said, size in zip(shape, sent.shape, strict=True)), io.name
        if config.max_batch_size:
            assert len(sent) <= config.max_batch_size
        request[io.name] = sent.reshape(sent.shape[:1] if io.HasField("reshape") else sent.shape)
    answers: Arrays = {}
    for name, io, array in zip(names, config.output, run(request), strict=True):
        assert array.dtype == _NUMPY[type_of(io)]
        shape = _shape(config, io)
        outer = array.reshape(1) if not array.ndim else array
        assert len(outer.shape) == len(shape)
        assert all(said in (-1, size) for said, size in zip(shape, outer.shape, strict=True)), io.name
        answers[name] = array
    return answers
