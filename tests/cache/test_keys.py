"""Digests of graphs and tensors for cache keys."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import fx, nn

from optexport.api import symbolic_trace
from optexport.cache import keys


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear, self.other = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.linear(self.norm(x)) + self.shift)[..., 0:2]


def traced(network: nn.Module | None = None) -> fx.GraphModule:
    return symbolic_trace(network or Network(), example_inputs={"x": torch.zeros(2, 4)})


@pytest.mark.slow
def test_equal_graphs_have_equal_digests() -> None:
    assert keys.of_graph(traced()) == keys.of_graph(traced())
    assert keys.of_graph(traced()) is not None


def _weight(network: Network) -> None:
    with torch.no_grad():
        network.linear.weight[0, 0] += 1e-6


def _buffer(network: Network) -> None:
    network.shift = network.shift + 1e-6


def _epsilon(network: Network) -> None:
    network.norm.eps = 1e-6


def _tied(network: Network) -> None:
    network.other = network.linear


def _without_bias(network: Network) -> None:
    network.linear.bias = None


@pytest.mark.slow
@pytest.mark.parametrize("change", [_weight, _buffer, _epsilon, _tied, _without_bias])
def test_graph_with_other_results_has_another_digest(change: Callable[[Network], None]) -> None:
    network = Network()
    change(network)
    assert keys.of_graph(traced(network)) != keys.of_graph(traced())


@pytest.mark.slow
def test_shared_weights_differ_from_equal_weights() -> None:
    network = Network()
    network.other = copy.deepcopy(network.linear)
    equal = keys.of_graph(traced(network))
    network.other.weight = network.linear.weight
    assert keys.of_graph(traced(network)) != equal


@pytest.mark.slow
def test_other_slice_has_another_digest() -> None:
    graph_module = traced()
    before = keys.of_graph(graph_module)
    node = next(node for node in reversed(graph_module.graph.nodes) if node.op == "call_function")
    node.args = (*node.args[:-1], 3)
    assert keys.of_graph(graph_module) != before


def _function(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_graph_with_local_code_has_no_digest() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    for function in (_function, lambda x: x):
        graph = fx.Graph()
        graph.output(graph.call_function(function, (graph.placeholder("x"),)))
        assert keys.of_graph(fx.GraphModule(nn.Module(), graph)) is None
    root, graph = nn.Module(), fx.Graph()
    root.own = Own()
    graph.output(graph.call_module("own", (graph.placeholder("x"),)))
    assert keys.of_graph(fx.GraphModule(root, graph)) is None


@pytest.mark.slow
def test_module_with_a_hook_has_no_digest() -> None:
    graph_module = traced()
    graph_module.get_submodule("linear").register_forward_hook(lambda module, inputs, output: output + 1)
    assert keys.of_graph(graph_module) is None


def test_digest_of_tensors_covers_names_dtypes_shapes_and_values() -> None:
    tensor = torch.arange(6.0)
    tensors = [
        {"x": tensor},
        {"y": tensor},
        {"x": tensor.view(torch.int32)},
        {"x": tensor.reshape(2, 3)},
        {"x": tensor + 1},
        {"x": tensor, "y": tensor},
    ]
    assert len({keys.of_tensors([group]) for group in tensors}) == len(tensors)
    expected = hashlib.sha256(b"x torch.float32 (6,)" + tensor.numpy().tobytes()).hexdigest()
    assert keys.of_tensors([{"x": tensor}]) == expected


def test_digest_of_a_file_covers_its_companions(tmp_path: Path) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
    path.write_bytes(b"graph")
    alone = keys.of_file(path, "onnx")
    weights.write_bytes(b"weights")
    both = keys.of_file(path, "onnx")
    weights.write_bytes(b"Weights")
    assert len({alone, both, keys.of_file(path, "onnx")}) == 3
    (tmp_path / "other.onnx").write_bytes(b"other")
    weights.write_bytes(b"weights")
    assert keys.of_file(path, "onnx") == both


def test_lazy_views_have_the_digest_of_their_values() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    assert keys.of_tensors([{"z": z.conj()}]) == keys.of_tensors([{"z": z.conj().resolve_conj()}])
    assert keys.of_tensors([{"z": z.conj().imag}]) == keys.of_tensors([{"z": z.conj().imag.clone()}])
    assert keys.of_tensors([{"z": z.conj()}]) != keys.of_tensors([{"z": z}])


def _slope(network: Network) -> None:
    network.slope = {"x": [0.1]}


def _frozen(network: Network) -> None:
    network.other.weight.requires_grad_(False)


def _transposed(network: Network) -> None:
    network.other.weight.data = network.other.weight.data.T.contiguous().T


@pytest.mark.parametrize("change", [_weight, _buffer, _epsilon, _tied, _without_bias, _slope, _frozen, _transposed])
def test_digest_of_a_model_covers_its_tensors_and_attributes(change: Callable[[Network], None]) -> None:
    before, equal, changed = Network(), Network(), Network()
    change(changed)
    digests = [keys.of_object(as_module(network)) for network in (before, equal, changed)]
    assert digests[0] == digests[1]
    assert digests[2] not in (None, digests[0])


def as_module(network: Network) -> nn.Module:
    """Returns a module with the same content, whose class is from a package."""
    module = nn.Module()
    vars(module).update(vars(network))
    return module


@pytest.mark.parametrize("view", [lambda w: w[:], lambda w: w.view(-1, 1), lambda w: w[1:]])
def test_digest_of_equal_tensors_depends_on_shared_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = torch.ones(4)
    assert keys.of_object([weight, view(weight)]) != keys.of_object([weight, view(weight).clone()])


def function_of_a_file() -> int:
    return 0


def test_digest_of_a_set_is_the_same_in_every_process() -> None:
    code = "from optexport.cache import keys; print(keys.of_object({'names': {str(n) for n in range(50)}}))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests != {"None\n"}


def _linear_with_its_own_forward() -> nn.Module:
    """Returns a layer whose pickle names its forward, and does not contain it."""
    layer = nn.Linear(2, 2)
    layer.forward = MethodType(lambda self, x: x, layer)  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: 0, id="lambda"),
        pytest.param((n for n in ()), id="iterator"),
        pytest.param(Network(), id="class of a file"),
        pytest.param(nn.TransformerEncoderLayer(4, 1, activation=function_of_a_file), id="function of a file"),
        pytest.param(functools.partial(function_of_a_file), id="partial"),
        pytest.param(fx.symbolic_trace(nn.Linear(2, 2)), id="graph"),
        pytest.param(_linear_with_its_own_forward(), id="method of an object"),
        pytest.param({torch.ones(2)}, id="set of tensors"),
    ],
)
def test_object_without_identity_has_no_digest(value: object) -> None:
    assert keys.of_object([value]) is None
