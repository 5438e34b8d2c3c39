"""Modules with every kind of inputs and outputs, in all formats and at untraced sizes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

from optexport import export
from optexport.errors import ConfigError
from optexport.exporters import targets
from optexport.signature.arguments import flat_inputs, take_flat_tensors
from optexport.signature.signature import as_arguments, flatten_outputs
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program
from tests._helpers.models import randomise


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(y)


class PositionalOnly(Positional):
    def forward(self, x: torch.Tensor, y: torch.Tensor, /) -> torch.Tensor:
        return super().forward(x, y)


class KeywordOnly(Positional):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x, y)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return self.linear(sum(xs))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: self.linear(x) * tensor for name, tensor in tensors.items()}


class States(nn.Module):
    """A recurrent cell: takes a tuple of states and returns it with the result."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 3)

    def forward(self, x: torch.Tensor, states: Any) -> Any:
        h, c = self.cell(x, states)
        return h * 2, (h, c)


class Features(nn.Module):
    """A dict in a dict, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features: Any, weights: Any) -> dict[str, Any]:
        x = self.linear(features["image"]["x"]) * weights[0] + weights[1]
        return {"logits": x + features["bias"], "pooled": {"mean": x.mean(0), "max": x.amax(0)}}


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
        x = self.linear(x)
        if mask is not None:
            x = x * mask
        return x if scale is None else x * scale


class Switched(nn.Module):
    """Constants that choose the branch and the number of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 1, both: bool = False, mode: str = "sum") -> Any:
        for _ in range(times):
            x = self.linear(x).relu()
        reduced = x.sum(-1) if mode == "sum" else x.mean(-1)
        return (x, reduced) if both else reduced


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    loss: torch.Tensor | None = None


class Named(NamedTuple):
    mean: torch.Tensor
    spread: torch.Tensor


class Returning(nn.Module):
    """Returns what its function returns."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 3), form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.linear(x), x)


class Buffers(nn.Module):
    """Buffers that are saved and that are not, a plain tensor attribute, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", floats(4, seed=1))
        self.register_buffer("table", floats(10, 4, seed=2), persistent=False)
        self.plain = floats(4, seed=3)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.table[ids] + self.offset) * self.gain + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])


class ReluFirst(nn.Module):
    """A batch norm after a ReLU, as in CREPE. It cannot be folded into the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 3, padding=1), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x).relu()).amax(-1)


def traced_by_fx() -> nn.Module:
    return fx.symbolic_trace(randomise(Positional()))


def pair(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return floats(n, 4), floats(n, 5, seed=1)


def states(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return floats(n, 3, seed=1), floats(n, 3, seed=2)


def features(n: int) -> dict[str, Any]:
    return {
        "features": {"image": {"x": floats(n, 4)}, "bias": floats(3, seed=1)},
        "weights": [floats(n, 1, seed=2), floats(3, seed=3)],
    }


Make = Callable[[int], Any]
X: Make = lambda n: {"x": floats(n, 4)}  # noqa: E731
# Inputs for a number of rows, names of inputs and outputs, and constants.
TABLE: dict[str, tuple[Callable[[], nn.Module], Make, list[str], list[str], dict[str, Any]]] = {
    "a tuple of tensors": (Positional, pair, ["x", "y"], ["output"], {}),
    "tensors by name, in another order": (
        Positional, lambda n: dict(zip("yx", reversed(pair(n)), strict=True)), ["x", "y"], ["output"], {},
    ),
    "positional only": (PositionalOnly, pair, ["x", "y"], ["output"], {}),
    "keyword only": (KeywordOnly, lambda n: dict(zip("xy", pair(n), strict=True)), ["x", "y"], ["output"], {}),
    "a single tensor": (lambda: nn.Linear(4, 3), lambda n: floats(n, 4), ["input"], ["output"], {}),
    "any number of tensors": (
        Several, lambda n: tuple(floats(n, 4, seed=i) for i in range(3)), ["xs.0", "xs.1", "xs.2"], ["output"], {},
    ),
    "any tensors by keyword": (
        ByKeyword,
        lambda n: {"x": floats(n, 4), "one": floats(n, 1), "two": floats(3)},
        ["x", "one", "two"], ["one_out", "two_out"], {},
    ),
    "a tuple of states": (
        States,
        lambda n: (floats(n, 4), states(n)),
        ["x", "states.0", "states.1"], ["output_0", "output_1.0", "output_1.1"], {},
    ),
    "states by name": (
        States,
        lambda n: {"x": floats(n, 4), "states": states(n)},
        ["x", "states.0", "states.1"], ["output_0", "output_1.0", "output_1.1"], {},
    ),
    "dicts in dicts, and a list": (
        Features, features,
        ["features.image.x", "features.bias", "weights.0", "weights.1"],
        ["logits", "pooled.mean", "pooled.max"], {},
    ),
    "an optional input left out": (Optional, X, ["x"], ["output"], {}),
    "an optional input given": (
        Optional, lambda n: {"x": floats(n, 4), "mask": floats(n, 1)}, ["x", "mask"], ["output"], {},
    ),
    "an optional input that is None": (
        Optional, lambda n: {"x": floats(n, 4), "mask": None, "scale": 0.5}, ["x"], ["output"], {"scale": 0.5},
    ),
    "constants": (
        Switched,
        lambda n: {"x": floats(n, 4), "times": 2, "both": True, "mode": "mean"},
        ["x"], ["output_0", "output_1"], {"times": 2, "both": True, "mode": "mean"},
    ),
    "constants by position": (Switched, lambda n: (floats(n, 4), 3), ["x"], ["output"], {"times": 3}),
    "a dict out": (
        lambda: Returning(lambda y, x: {"y": y, "same": y, "given": x, "none": None, "number": 3}), X,
        ["x"], ["y", "same", "given"], {},
    ),
    "a dataclass out": (lambda: Returning(lambda y, x: Result(y, (x + 1, y * 2))), X, ["x"],
                        ["logits", "hidden.0", "hidden.1"], {}),
    "a named tuple out": (lambda: Returning(lambda y, x: Named(y.mean(-1), y.std(-1))), X, ["x"],
                          ["mean", "spread"], {}),
    "a list of lists out": (lambda: Returning(lambda y, x: [y, [x + 1, y.argmax(-1)]]), X, ["x"],
                            ["output_0", "output_1.0", "output_1.1"], {}),
    "buffers and tensors of its own": (
        Buffers, lambda n: torch.arange(n * 3).reshape(n, 3) % 10, ["ids"], ["output"], {},
    ),
    "a batch norm after a relu": (ReluFirst, lambda n: floats(n, 2, 8), ["x"], ["output"], {}),
    "a graph of torch.fx": (traced_by_fx, pair, ["x", "y"], ["output"], {}),
    "a graph of torch.fx with a constant": (
        lambda: fx.symbolic_trace(randomise(Switched()), concrete_args={"times": 2, "both": False, "mode": "sum"}),
        lambda n: {"x": floats(n, 4), "times_1": 2, "both_1": False, "mode_1": "sum"},
        ["x"], ["output"], {"times_1": 2, "both_1": False, "mode_1": "sum"},
    ),
    "a graph of torch.fx with states": (
        lambda: fx.symbolic_trace(Returning(lambda y, x: y) and Sums()),
        lambda n: {"x": floats(n, 4), "states": states(n)}, ["x", "states.0", "states.1"], ["output"], {},
    ),
}  # fmt: skip


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = randomise(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor, states: Any) -> torch.Tensor:
        return self.linear(x) + states[0] * states[1]


def called(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        if isinstance(inputs, dict):
            return flatten_outputs(model(**inputs))
        return flatten_outputs(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def leaves(inputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]


# All tests run these. The others take minutes.
ALWAYS = (
    *("any tensors by keyword", "a tuple of states", "dicts in dicts, and a list", "constants", "a dataclass out"),
    "a graph of torch.fx with states",
)
KINDS = [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.nightly) for kind in TABLE]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_is_right_at_untraced_sizes(kind: str, tmp_path: Path) -> None:
    make, make_inputs, inputs, outputs, constants = TABLE[kind]
    model = make().eval() if kind.startswith("a graph") else randomise(make())
    before = vars(model).copy()
    result = export(model, make_inputs(3), tmp_path / "bundle", effort="quick")
    assert vars(model).keys() == before.keys()
    assert sorted(spec.name for spec in result.manifest.inputs) == sorted(inputs)
    assert [spec.name for spec in result.manifest.outputs] == outputs
    assert result.manifest.constants == constants
    assert list(result.files) == ["torchscript", "onnx", "pt2"]
    for rows in (1, 7):
        want = called(model, make_inputs(rows))
        batch = dict(zip(inputs, leaves(sorted_like(inputs, make_inputs(rows))), strict=True))
        for name, path in result.files.items():
            for place, run in targets.open_file(path, name, outputs):
                got = run(batch)
                for output, expected in zip(outputs, want.values(), strict=True):
                    torch.testing.assert_close(got[output], expected, msg=f"{place}, {output} at {rows}")


def sorted_like(names: list[str], inputs: Any) -> Any:
    """Sorts keyword arguments by the order of the names."""
    if not isinstance(inputs, dict):
        return inputs
    order = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return {name: inputs[name] for name in order}


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind != "a dataclass out"])
def test_arguments_get_flat_names_and_results_stay_equal(kind: str) -> None:
    make, make_inputs, inputs, _, constants = TABLE[kind]
    model = make().eval() if kind.startswith("a graph") else randomise(make())
    tensors, arguments = flat_inputs(model, make_inputs(3))
    assert sorted(tensors) == sorted(inputs)
    assert dict(arguments.constants if arguments else {}) == constants
    taking = take_flat_tensors(model, arguments) if arguments else model
    assert [name for name, _ in taking.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(inspect.signature(taking.forward).parameters) == [
        name.replace(".", "_")
        for name in (arguments.names if arguments else inspect.signature(model.forward).parameters)
    ]
    got, want = called(taking, as_arguments(tensors)), called(model, make_inputs(3))
    assert list(got) == list(want)
    assert all(torch.equal(got[name], value) for name, value in want.items())
    double = copy.deepcopy(taking).double()
    exact = called(double, {n: t.double() if t.is_floating_point() else t for n, t in as_arguments(tensors).items()})
    assert any(tensor.dtype == torch.float64 for tensor in exact.values())


def test_names_that_are_equal_in_python_stay_distinct() -> None:
    model = ByKeyword()
    tensors, _ = flat_inputs(model, {"x": floats(2, 4), "a": {"b": floats(2, 1)}, "a_b": floats(3)})
    assert list(tensors) == ["x", "a.b", "a_b_2"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"x": floats(2, 4), "mask": {"a": object()}},
            "inputs: mask.a: neither a tensor nor a constant \\(found object\\)",
        ),
        ({"x": 3}, "the inputs contain no tensor"),
        ((floats(2, 4), None, None, 4), "too many positional arguments"),
        ({"y": floats(2, 4)}, "cannot be called with these inputs: missing a required argument: 'x'"),
    ],
)
def test_invalid_arguments_are_one_clear_error(inputs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flat_inputs(Optional(), inputs)


def test_dataclass_created_in_every_call_is_a_dict() -> None:
    """It was registered with torch and traced again, without end."""

    def returned(m: Any, x: torch.Tensor) -> Any:
        return make_dataclass("Anew", ["y"])(x * 2)

    traced = trace(Program(returned).eval(), X(2))
    x = X(5)["x"]
    assert torch.equal(traced.graph_module(x)["y"], x * 2)
