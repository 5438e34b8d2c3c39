"""Random small modules: branches, shared and nested modules, in-place operations, views, odd dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F

from optexport.api import symbolic_trace
from tests._helpers.graphs import Inherited, graph_of
from tests._helpers.models import randomise

_BATCH, _LENGTH, _SIDE = 3, 2, 3
_DIVISORS = (1, 2, 8.0, 3, 49, 0.1, -7.5, 1e-3, 0, 1e-40, True)
# Operations on a value. Those that rules match occur more often.
_ANYWHERE = ["add", "mul", "div", "torch.div", "div by size", "tanh", "relu_", "add_", "sub_ part", "part", "dropout"]
_ANYWHERE += ["plus", "plus", "times", "times", "clone", "view", "whole", "cast", "repeat", "repeat"]
_ATTENTION = ["attend", "scores", "layer norm", "softmax"]
_BY_RANK = {
    2: [*["linear"] * 6, *["norm"] * 4, "adapt"],
    3: [*["linear"] * 6, "norm", "adapt", "flat", "flatten", "swap", *["pick"] * 3, *_ATTENTION],
    4: [*["conv"] * 4, *["branches"] * 3, *["norm"] * 4, "mean", "mean", "flatten"],
}


@dataclass(frozen=True)
class Step:
    """One operation of a program on earlier values. Its result is the next value."""

    kind: str
    operands: tuple[int, ...]
    argument: Any = None


class Constant(nn.Module):
    """A parameter that is added to a value."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(shape))


class Generated(nn.Module):
    """Runs the operations of a program and returns some of the values."""

    def __init__(self, layers: dict[str, nn.Module], steps: list[Step], returned: list[int]) -> None:
        super().__init__()
        for path, layer in layers.items():
            *parents, name = path.split(".")
            parent: nn.Module = self
            for part in parents:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(name, layer)
        self._steps, self._returned = steps, returned

    def forward(self, x: torch.Tensor) -> Any:
        values = [x]
        for step in self._steps:
            values.append(self._do(step, [values[i] for i in step.operands]))
        return tuple(values[i] for i in self._returned)

    def _do(self, step: Step, operands: list[torch.Tensor]) -> torch.Tensor:
        return _OPERATIONS[step.kind](self, operands, step.argument)


def _subtract_in_place(m: Generated, operands: list[torch.Tensor], argument: Any) -> torch.Tensor:
    operands[0][0].sub_(argument)
    return operands[0]


def _attend_step_by_step(m: Generated, operands: list[torch.Tensor], argument: Any) -> torch.Tensor:
    scores = torch.matmul(operands[0], operands[1].transpose(1, 2)) / 2
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    if argument == "add":
        scores = scores + torch.zeros(scores.shape[1:], dtype=operands[0].dtype).masked_fill(hidden, -torch.inf)
    elif argument == "fill":
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.matmul(scores.softmax(-1), operands[2])


# For each kind of step: a function of the module, the operands, and the argument of the step.
_OPERATIONS: dict[str, Callable[[Generated, list[torch.Tensor], Any], torch.Tensor]] = {
    "call": lambda m, v, a: m.get_submodule(a)(v[0]),
    "adapt": lambda m, v, a: v[1] + m.get_submodule(a)(v[0]) * 0.5,
    "call by keyword": lambda m, v, a: m.get_submodule(a)(input=v[0]),
    "read": lambda m, v, a: v[0] * m.get_submodule(a).weight.sum(),  # type: ignore[union-attr, operator]
    "add": lambda m, v, a: v[0] + v[1],
    "mul": lambda m, v, a: v[0] * v[1],
    "div": lambda m, v, a: v[0] / a,
    "times": lambda m, v, a: a * v[0],
    "torch.div": lambda m, v, a: torch.div(v[0], a),
    "div by size": lambda m, v, a: v[0] * (v[0].shape[0] / a),
    "tanh": lambda m, v, a: torch.tanh(v[0]),
    "relu_": lambda m, v, a: F.relu(v[0], inplace=True),
    "add_": lambda m, v, a: v[0].add_(a),
    "sub_ part": _subtract_in_place,
    "flat": lambda m, v, a: v[0].view(-1, a),
    "flatten": lambda m, v, a: v[0].flatten(1),
    "swap": lambda m, v, a: v[0].transpose(1, 2),
    "pick": lambda m, v, a: v[0][:, a],
    "attend": lambda m, v, a: F.scaled_dot_product_attention(*v),
    "scores": _attend_step_by_step,
    "softmax": lambda m, v, a: v[0].softmax(-1),
    "plus": lambda m, v, a: v[0] + m.get_submodule(a).value,  # type: ignore[operator]
    "part": lambda m, v, a: v[0][..., :a],
    "mean": lambda m, v, a: v[0].mean((2, 3)),
    "clone": lambda m, v, a: v[0].clone(),
    "view": lambda m, v, a: v[0].view(v[0].shape),
    "whole": lambda m, v, a: v[0][:, 0:],
    "cast": lambda m, v, a: v[0].to(v[0].dtype),
    "dropout": lambda m, v, a: F.dropout(v[0], 0.5, training=False),
}


@dataclass
class _Drawn:
    """A program under construction: its layers, operations, and the shape of every value."""

    draw: st.DrawFn
    layers: dict[str, nn.Module] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, kind: str, operands: tuple[int, ...], argument: Any, shape: tuple[int, ...]) -> None:
        self.steps.append(Step(kind, operands, argument))
        self.shapes.append(shape)

    def call(self, operand: int, layer: nn.Module, shape: tuple[int, ...]) -> None:
        path = f"l{len(self.layers)}"
        parents = self.draw(st.sampled_from(("", "block.", "block.inner.", "other.")))
        self.layers[parents + path] = layer
        kind = "call by keyword" if self.draw(st.integers(0, 5)) == 0 else "call"
        self.add(kind, (operand,), parents + path, shape)

    def linear(self, operand: int, shape: tuple[int, ...]) -> None:
        """Adds linears with the same input: new ones, or one that was called before."""
        old = [p for p, m in self.layers.items() if isinstance(m, nn.Linear) and m.in_features == shape[-1]]
        for _ in range(self.draw(st.integers(1, 3))):
            if old and self.draw(st.integers(0, 4)) == 0:
                path = self.draw(st.sampled_from(old))
                self.add("call", (operand,), path, (*shape[:-1], self.layers[path].out_features))  # type: ignore[arg-type]
                continue
            width, bias = self.draw(st.sampled_from((1, 2, 4, 4))), self.draw(st.booleans())
            cls = Inherited if self.draw(st.integers(0, 9)) == 0 else nn.Linear
            layer = cls(shape[-1], width, bias=bias)
            self._vary(layer, [p for p in old if self.layers[p].weight.shape == layer.weight.shape])
            self.call(operand, layer, (*shape[:-1], width))

    def adapted(self, operand: int, shape: tuple[int, ...]) -> None:
        """Adds a linear with a low-rank adapter."""
        rank = self.draw(st.integers(1, 2))
        self.call(operand, nn.Linear(shape[-1], 4, bias=self.draw(st.booleans())), (*shape[:-1], 4))
        base = len(self.shapes) - 1
        self.call(operand, nn.Linear(shape[-1], rank, bias=self.draw(st.booleans())), (*shape[:-1], rank))
        path = f"l{len(self.layers)}"
        self.layers[path] = nn.Linear(rank, 4, bias=self.draw(st.booleans()))
        self.add("adapt", (base + 1, base), path, (*shape[:-1], 4))

    def _vary(self, layer: nn.Linear, alike: list[str]) -> None:
        match self.draw(st.integers(0, 15)):
            case 0:
                layer.requires_grad_(False)
            case 1:
                layer.weight.requires_grad_(False)
            case 2:
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
            case 3:
                layer.register_forward_hook(lambda module, args, result: result * 2)
            case 4:
                layer.forward = lambda input, own=layer: F.linear(input, own.weight) + 1  # type: ignore[method-assign, misc]  # noqa: A006
            case 5 if alike:
                layer.weight = self.layers[alike[0]].weight  # type: ignore[assignment]

    def variants(self, operand: int, shape: tuple[int, ...]) -> None:
        """Adds a sum of convolutions and norms of one value, and of the value itself."""
        total = operand
        for index in range(self.draw(st.integers(1, 3))):
            kind = self.draw(st.sampled_from((1, 3, 3, 5, (1, 3), "norm")))
            if kind == "norm":
                self.norm(operand, shape)
            else:
                padding = tuple(size // 2 for size in kind) if isinstance(kind, tuple) else kind // 2
                groups = self.draw(st.sampled_from((1, 1, shape[1])))
                bias = self.draw(st.booleans())
                self.call(
                    operand, nn.Conv2d(shape[1], shape[1], kind, padding=padding, groups=groups, bias=bias), shape
                )
            term = len(self.shapes) - 1
            if index or self.draw(st.booleans()):
                self.add("add", (total, term), None, shape)
            total = len(self.shapes) - 1

    def norm(self, operand: int, shape: tuple[int, ...]) -> None:
        cls = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
        affine, tracked = self.draw(st.integers(0, 4)) > 0, self.draw(st.integers(0, 9)) > 0
        layer = cls(shape[1], affine=affine, track_running_stats=tracked)
        self.call(operand, layer, shape)

    def convolution(self, operand: int, shape: tuple[int, ...]) -> None:
        width, bias = self.draw(st.integers(1, 3)), self.draw(st.booleans())
        cls = self.draw(st.sampled_from((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d)))
        self.call(operand, cls(shape[1], width, 3, padding=1, bias=bias), (shape[0], width, *shape[2:]))

    def attention(self, kind: str, operand: int, shape: tuple[int, ...]) -> None:
        same_shape = [i for i, candidate in enumerate(self.shapes) if candidate == shape]
        keys, values = self.draw(st.sampled_from(same_shape)), self.draw(st.sampled_from(same_shape))
        masking = self.draw(st.sampled_from(("no", "add", "fill"))) if kind == "scores" else None
        self.add(kind, (operand, keys, values), masking, shape)

    def constant(self, operand: int, shape: tuple[int, ...]) -> None:
        per_feature = (shape[1], 1, 1) if len(shape) == 4 else shape[-1:]
        size = per_feature if self.draw(st.integers(0, 4)) else shape[1:]
        path = f"p{len(self.layers)}"
        self.layers[path] = Constant(size)
        self.add("plus", (operand,), path, shape)

    def repeat(self) -> None:
        if self.steps:
            chosen = self.draw(st.integers(0, len(self.steps) - 1))
            self.steps.append(self.steps[chosen])
            self.shapes.append(self.shapes[chosen + 1])

    def step(self) -> None:
        operand = self.draw(st.integers(0, len(self.shapes) - 1) | st.just(len(self.shapes) - 1))
        shape = self.shapes[operand]
        kind = self.draw(st.sampled_from(_ANYWHERE + _BY_RANK[len(shape)]))
        if kind in _ARGUMENTS:
            self.add(kind, (operand,), self.draw(st.sampled_from(_ARGUMENTS[kind])), shape)
        elif kind in _RESHAPES:
            self.reshape(kind, operand, shape)
        else:
            self.layer(kind, operand, shape)

    def reshape(self, kind: str, operand: int, shape: tuple[int, ...]) -> None:
        argument = None
        if kind == "part":
            argument = self.draw(st.integers(1, shape[-1]))
        elif kind == "flat":
            argument = shape[-1]
        elif kind == "pick":
            argument = self.draw(st.sampled_from((0, 0, -1)))
        self.add(kind, (operand,), argument, _RESHAPES[kind](shape, argument))

    def layer(self, kind: str, operand: int, shape: tuple[int, ...]) -> None:
        match kind:
            case "linear":
                self.linear(operand, shape)
                if self.draw(st.booleans()):  # so that two linears follow each other directly
                    self.linear(operand, shape)
            case "adapt":
                self.adapted(operand, shape)
            case "norm":
                self.norm(operand, shape)
            case "conv":
                self.convolution(operand, shape)
            case "branches":
                self.variants(operand, shape)
            case "layer norm":
                self.call(operand, nn.LayerNorm(shape[-1]), shape)
            case "attend" | "scores":
                self.attention(kind, operand, shape)
            case "plus":
                self.constant(operand, shape)
            case "add" | "mul":
                same_shape = [i for i, candidate in enumerate(self.shapes) if candidate == shape]
                self.add(kind, (operand, self.draw(st.sampled_from(same_shape))), None, shape)
            case "repeat":
                self.repeat()
            case _:
                self.add(kind, (operand,), None, shape)


# The arguments of steps that keep the shape.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "div": _DIVISORS,
    "torch.div": _DIVISORS,
    "div by size": (49,),
    "times": (0.5, 3, -0.7),
    "add_": (0.5, -1.0),
    "sub_ part": (0.5, -1.0),
}
# The shape of the result of other steps, from the shape of the operand and the argument.
_RESHAPES: dict[str, Callable[[tuple[int, ...], Any], tuple[int, ...]]] = {
    "part": lambda shape, argument: (*shape[:-1], argument),
    "flat": lambda shape, argument: (shape[0] * shape[1], shape[2]),
    "flatten": lambda shape, argument: (shape[0], int(torch.Size(shape[1:]).numel())),
    "swap": lambda shape, argument: (shape[0], shape[2], shape[1]),
    "pick": lambda shape, argument: (shape[0], shape[2]),
    "mean": lambda shape, argument: shape[:2],
}


@dataclass(frozen=True)
class Case:
    """A module, its input, and the way to trace it."""

    module: Generated
    x: torch.Tensor
    tracing: str

    def graph(self) -> GraphModule:
        if self.tracing == "export":
            return symbolic_trace(self.module, example_inputs={"x": self.x})
        graph_module = graph_of(self.module)
        if self.tracing == "fx with shapes":
            with torch.no_grad():
                _Shapes(graph_module).run(self.x.clone())
        return graph_module


class _Shapes(Interpreter):
    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        n.meta["val"] = torch.empty_like(result, device="meta") if isinstance(result, torch.Tensor) else result
        return result


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws modules of two to eight operations."""
    drawn = _Drawn(draw)
    drawn.shapes.append(draw(st.sampled_from([(_BATCH, 4), (_BATCH, _LENGTH, 4), (_BATCH, 2, _SIDE, _SIDE)])))
    for _ in range(draw(st.integers(2, 8))):
        drawn.step()
    last = len(drawn.shapes) - 1
    returned = [*draw(st.lists(st.integers(0, last), max_size=2)), last]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Generated(drawn.layers, drawn.steps, returned)
        randomise(module, seed=draw(st.integers(0, 3)))
        x = torch.randn(drawn.shapes[0])
    for layer in drawn.layers.values():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and draw(st.integers(0, 9)) == 0:
            layer.train()
    dtype = draw(st.sampled_from((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    tracing = draw(st.sampled_from(("fx", "fx with shapes", "export")))
    return Case(module.to(dtype), x.to(dtype), tracing)
