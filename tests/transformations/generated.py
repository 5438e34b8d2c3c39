"""Random small modules: branches, shared and nested modules, in-place operations, views, odd dtypes and layouts."""

from __future__ import annotations

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
# What can be done to a value; what the rules are about comes more often.
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
    """One line of a program: what is done to which values. Its result is the next value."""

    kind: str
    operands: tuple[int, ...]
    argument: Any = None


class Constant(nn.Module):
    """Holds a parameter that is added to something."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(shape))


class Generated(nn.Module):
    """Runs the lines of a program over a list of values and returns some of them."""

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
        x, argument = operands[0], step.argument
        match step.kind:
            case "call":
                return self.get_submodule(argument)(x)
            case "adapt":
                return operands[1] + self.get_submodule(argument)(x) * 0.5
            case "call by keyword":
                return self.get_submodule(argument)(input=x)
            case "read":
                return x * self.get_submodule(argument).weight.sum()  # type: ignore[union-attr, operator]
            case "add":
                return x + operands[1]
            case "mul":
                return x * operands[1]
            case "div":
                return x / argument
            case "times":
                return argument * x
            case "torch.div":
                return torch.div(x, argument)
            case "div by size":
                return x * (x.shape[0] / argument)
            case "tanh":
                return torch.tanh(x)
            case "relu_":
                return F.relu(x, inplace=True)
            case "add_":
                return x.add_(argument)
            case "sub_ part":
                x[0].sub_(argument)
                return x
            case "flat":
                return x.view(-1, argument)
            case "flatten":
                return x.flatten(1)
            case "swap":
                return x.transpose(1, 2)
            case "pick":
                return x[:, argument]
            case "attend":
                return F.scaled_dot_product_attention(x, operands[1], operands[2])
            case "scores":
                scores = torch.matmul(operands[0], operands[1].transpose(1, 2)) / 2
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
                if argument == "add":
                    scores = scores + torch.zeros(scores.shape[1:], dtype=x.dtype).masked_fill(hidden, -torch.inf)
                elif argument == "fill":
                    scores = scores.masked_fill(hidden, -torch.inf)
                return torch.matmul(scores.softmax(-1), operands[2])
            case "softmax":
                return x.softmax(-1)
            case "plus":
                return x + self.get_submodule(argument).value
            case "part":
                return x[..., :argument]
            case "mean":
                return x.mean((2, 3))
            case "clone":
                return x.clone()
            case "view":
                return x.view(x.shape)
            case "whole":
                return x[:, 0:]
            case "cast":
                return x.to(x.dtype)
            case "dropout":
                return F.dropout(x, 0.5, training=False)
        raise AssertionError(step.kind)


@dataclass
class _Drawn:
    """A program while it is drawn: its layers, lines, and the shape of every value."""

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
        """One or several linears of one value: new, or one that was called before."""
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
        """A linear with a low-rank adapter, as far as nothing varies."""
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
        """Convolutions and norms of one value, and that itself, summed one by one."""
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

    def step(self) -> None:
        operand = self.draw(st.integers(0, len(self.shapes) - 1) | st.just(len(self.shapes) - 1))
        shape = self.shapes[operand]
        kind = self.draw(st.sampled_from(_ANYWHERE + _BY_RANK[len(shape)]))
        match kind:
            case "linear":
                self.linear(operand, shape)
                if self.draw(st.booleans()):  # two at once have nothing between them
                    self.linear(operand, shape)
            case "adapt":
                self.adapted(operand, shape)
            case "norm":
                self.norm(operand, shape)
            case "conv":
                width, bias = self.draw(st.integers(1, 3)), self.draw(st.booleans())
                cls = self.draw(st.sampled_from((nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d)))
                self.call(operand, cls(shape[1], width, 3, padding=1, bias=bias), (shape[0], width, *shape[2:]))
            case "branches":
                self.variants(operand, shape)
            case "layer norm":
                self.call(operand, nn.LayerNorm(shape[-1]), shape)
            case "attend" | "scores":
                alike = [i for i, other in enumerate(self.shapes) if other == shape]
                keys, values = self.draw(st.sampled_from(alike)), self.draw(st.sampled_from(alike))
                masking = self.draw(st.sampled_from(("no", "add", "fill"))) if kind == "scores" else None
                self.add(kind, (operand, keys, values), masking, shape)
            case "plus":
                one_a_feature = (shape[1], 1, 1) if len(shape) == 4 else shape[-1:]
                size = one_a_feature if self.draw(st.integers(0, 4)) else shape[1:]
                path = f"p{len(self.layers)}"
                self.layers[path] = Constant(size)
                self.add(kind, (operand,), path, shape)
            case "add" | "mul":
                alike = [i for i, other in enumerate(self.shapes) if other == shape]
                self.add(kind, (operand, self.draw(st.sampled_from(alike))), None, shape)
            case "div" | "torch.div":
                self.add(kind, (operand,), self.draw(st.sampled_from(_DIVISORS)), shape)
            case "div by size":
                self.add(kind, (operand,), 49, shape)
            case "times":
                self.add(kind, (operand,), self.draw(st.sampled_from((0.5, 3, -0.7))), shape)
            case "add_" | "sub_ part":
                self.add(kind, (operand,), self.draw(st.sampled_from((0.5, -1.0))), shape)
            case "part":
                kept = self.draw(st.integers(1, shape[-1]))
                self.add(kind, (operand,), kept, (*shape[:-1], kept))
            case "flat":
                self.add(kind, (operand,), shape[-1], (shape[0] * shape[1], shape[2]))
            case "flatten":
                self.add(kind, (operand,), None, (shape[0], int(torch.Size(shape[1:]).numel())))
            case "swap":
                self.add(kind, (operand,), None, (shape[0], shape[2], shape[1]))
            case "pick":
                self.add(kind, (operand,), self.draw(st.sampled_from((0, 0, -1))), (shape[0], shape[2]))
            case "mean":
                self.add(kind, (operand,), None, shape[:2])
            case "repeat":
                if self.steps:
                    chosen = self.draw(st.integers(0, len(self.steps) - 1))
                    self.steps.append(self.steps[chosen])
                    self.shapes.append(self.shapes[chosen + 1])
            case _:
                self.add(kind, (operand,), None, shape)


@dataclass(frozen=True)
class Case:
    """A module, an input for it, and how it is to be traced."""

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
    """Modules of two to eight lines that run, whatever they compute."""
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
