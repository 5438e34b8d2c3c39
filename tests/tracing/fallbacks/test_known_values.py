"""Models that read values of buffers, constants and constant inputs during the trace."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import optexport
from optexport.errors import ConfigError, TraceError
from optexport.loading.loader import Loaded
from optexport.signature.arguments import flat_inputs
from optexport.signature.signature import Dim
from optexport.tracing import trace
from optexport.tracing.fallbacks.known_values import KnownValues
from optexport.tracing.graph_checks import check_deterministic


class Switched(nn.Module):
    """Reads a buffer in every step to decide whether to apply the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor([0.0, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.steps)):
            if self.steps[index] > 0:
                x = self.linear(x) + index
        return x


class Grids(nn.Module):
    """Iterates over the images of a batch, whose heights and widths are input values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pixels: torch.Tensor, text: torch.Tensor, grid: torch.Tensor) -> dict[str, torch.Tensor]:
        images, start = [], 0
        for height, width in grid.tolist():
            rows = torch.tensor([row for row in range(height) for _ in range(width)])
            images.append(self.linear(pixels[start : start + height * width]) + rows[:, None])
            start += height * width
        lengths = torch.cumsum(grid.prod(-1), 0)
        resized = nn.functional.interpolate(torch.cat(images).T[None], size=(grid[0, 0] * 2,))
        return {"images": torch.cat(images), "resized": resized, "lengths": lengths, "text": self.linear(text)}


GRID = torch.tensor([[2, 3], [4, 2]])


def _grids() -> dict[str, torch.Tensor]:
    return {"pixels": torch.randn(14, 4), "text": torch.randn(3, 4), "grid": GRID}


@pytest.mark.slow
def test_model_that_reads_a_buffer_needs_no_constant_input():
    model = Switched().eval()
    traced = trace.trace(model, {"x": torch.randn(3, 4)})
    assert traced.constants == {}
    assert set(traced.fixed) == {"x[1] = 4"}
    x = torch.randn(7, 4)
    assert torch.equal(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_input_with_sizes_is_constant_and_text_stays_dynamic():
    model = Grids().eval()
    traced = trace.trace(model, _grids())
    assert list(traced.constants) == ["grid"]
    assert [spec.name for spec in traced.signature.inputs] == ["pixels", "text"]
    assert traced.fixed[0].startswith("grid = [[2, 3], [4, 2]]; the model reads its values at test_known_values.py:")
    pixels, text = torch.randn(14, 4), torch.randn(9, 4)
    want = model(pixels, text, GRID)
    for name, got in traced.graph_module(pixels, text).items():
        assert torch.equal(got, want[name])


@pytest.mark.slow
def test_bundle_stores_constants_and_its_files_take_other_inputs(tmp_path):
    model = Grids().eval()
    result = optexport.export(model, _grids(), tmp_path / "bundle", formats=("torchscript",), effort="quick")
    assert result.manifest.constants == {"grid": GRID.tolist()}
    bundle = optexport.Bundle.load(tmp_path / "bundle")
    pixels, text = torch.randn(14, 4), torch.randn(5, 4)
    want = model(pixels, text, GRID)
    for name, got in bundle(pixels=pixels, text=text).items():
        torch.testing.assert_close(torch.from_numpy(got), want[name.removesuffix("_out")])
    assert bundle(pixels=pixels, text=text, grid=GRID)["images"].shape == (14, 4)
    with pytest.raises(ConfigError, match=r"grid: the file was exported for the value \[\[2, 3\], \[4, 2\]\]"):
        bundle(pixels=pixels, text=text, grid=GRID.flip(0))


@pytest.mark.slow
def test_declared_sizes_error_explains_how_to_fix_the_input():
    with pytest.raises(
        TraceError, match=r"inputs: grid: the model reads the values of these inputs at test_known_values.py"
    ) as error:
        trace.trace(Grids().eval(), _grids(), {"text": {0: Dim("rows", 1, 8)}})
    assert "[inputs.constants] grid = [[2, 3], [4, 2]]" in str(error.value)


@pytest.mark.slow
def test_config_constants_may_be_lists_with_declared_sizes(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        """
        [model]
        source = "python:tests.tracing.fallbacks.test_known_values:make_grids"
        [inputs.tensors.pixels]
        shape = [14, 4]
        [inputs.tensors.text]
        shape = ["rows", 4]
        [inputs.constants]
        grid = [[2, 3], [4, 2]]
        [inputs.dynamic]
        rows = [1, 8]
        [export]
        output = "bundle"
        formats = ["torchscript"]
        [tracking]
        enabled = false
        """
    )
    result = optexport.run(config)
    assert result.manifest.constants == {"grid": [[2, 3], [4, 2]]}
    manifest = json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert manifest["dims"]["rows"] == {"min": 1, "max": 8, "multiple_of": 1}


def make_grids() -> nn.Module:
    return Grids().eval()


class Overwritten(nn.Module):
    """Overwrites constant numbers with computed ones, through a view."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros(3)
        part = numbers[1:]
        part[0] = x.sum()
        for _ in range(int(n)):
            x = x * 2
        return x + numbers


def test_overwritten_values_are_not_constants():
    model, n = Overwritten(), torch.tensor(2)
    traced = trace.trace(model, {"x": torch.randn(4, 3), "n": n})
    x = torch.randn(6, 3)
    assert list(traced.constants) == ["n"]
    torch.testing.assert_close(traced.graph_module(x), model(x, n))


class Asking(nn.Module):
    """Reads the overwritten number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros(3)
        numbers[1] = x.sum()
        return x * 2 if numbers[1] > 0 else x


class Drawn(nn.Module):
    """Reads a random number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand_like(torch.ones(2))[0] > 0.5 else x


class OfText(nn.Module):
    """Reads tokens, which differ in every call."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids * 2 if input_ids[0, 0] > 3 else input_ids


class OfNumbers(nn.Module):
    """Reads a value computed from one input that cannot be constant and one that can."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * 2 if (x.sum() * scale).item() > 0 else x


class WrittenTo(nn.Module):
    """Reads a number that is overwritten by a call whose first argument is not a tensor."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros(3)
        self.write(numbers, (x > 1e5).float().sum(0))
        return x * 2 if numbers[0] > 0 else x


def _set_data(numbers: torch.Tensor, new: torch.Tensor) -> None:
    numbers.data = new


WRITES = [
    lambda numbers, new: torch._foreach_add_([numbers], [new]),
    lambda numbers, new: torch.ops.aten.copy_.default(numbers, new),
    lambda numbers, new: torch.max(new[None], 0, out=(numbers, torch.zeros(3, dtype=torch.int64))),
    lambda numbers, new: nn.functional.batch_norm(new[:, None].expand(3, 3), numbers, torch.ones(3), training=True),
]


class Flags(nn.Module):
    """Reads numbers after an operator whose name does not say that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.flags = nn.Buffer(torch.tensor([3, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flags = self.flags.clone()
        flags &= x.long().sum()
        return x * 2 if flags[0] > 0 else x


def test_numbers_of_an_earlier_version_are_not_constants() -> None:
    graph_module = trace.trace(Flags(), {"x": torch.randn(4, 3)}).graph_module
    for x in (torch.zeros(2, 3), torch.ones(5, 3)):
        assert torch.equal(graph_module(x), Flags()(x))


class Counting(nn.Module):
    """Takes another branch from the eleventh call on."""

    def __init__(self, count: torch.Tensor, *, is_buffer: bool = True) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("count", count)
        else:
            self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.count.sum() > 10 else x
        self.count += 1
        return x


class CountingAnew(Counting):
    """Counts in a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.count.sum() > 10 else x
        self.count = self.count + 1
        return x


class DrawnInPython(nn.Module):
    """Reads a random number that a Python function draws."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scores", torch.tensor([9.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if nn.functional.gumbel_softmax(self.scores, hard=True)[0] > 0.5 else x


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Asking(), {"x": torch.randn(4, 3)}),
        *((WrittenTo(write), {"x": torch.randn(4, 3)}) for write in WRITES[:-1]),
        (OfText(), {"input_ids": torch.randint(0, 9, (2, 5))}),
        (OfNumbers(), {"x": torch.randn(4, 3), "scale": torch.tensor(2)}),
    ],
)
def test_branch_on_variable_inputs_takes_both_ways(model, example):
    graph_module = trace.trace(model, example).graph_module
    first, *others = example.values()
    for value in (first, -first, first * 0 + 4, first * 0 + 1_000_000):
        torch.testing.assert_close(graph_module(value, *others), model(value, *others))


def test_branch_on_assigned_data_is_refused():
    with pytest.raises(TraceError, match="assignments to tensor.data"):
        trace.trace(WrittenTo(_set_data), {"x": torch.randn(4, 3)})


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [DrawnInPython(), Drawn()])
def test_random_branch_is_part_of_the_graph(model):
    traced = trace.trace(model, {"x": torch.randn(4, 3)})
    with pytest.raises(TraceError, match="depend on random numbers"):
        check_deterministic(traced.graph_module, traced.signature.output_names, traced.signature.output_names)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model",
    [
        *(Counting(torch.zeros(2)), Counting(torch.zeros(2), is_buffer=False), CountingAnew(torch.zeros(2))),
        WrittenTo(WRITES[-1]),
    ],
)
def test_branch_on_state_that_changes_is_refused(model):
    with pytest.raises(TraceError, match=r"branches on values at test_known_values.py:\d+: .* and writes to its state"):
        trace.trace(model, {"x": torch.randn(4, 3)})


class Nested(nn.Module):
    """Reads a value from a dict, next to a constant."""

    def forward(self, x: torch.Tensor, sizes: dict[str, torch.Tensor], twice: bool) -> torch.Tensor:
        x = x[: int(sizes["rows"])]
        return x * 2 if twice else x


def test_nested_input_may_be_constant_with_other_constants():
    model = Nested()
    example, arguments = flat_inputs(model, {"x": torch.randn(6, 3), "sizes": {"rows": torch.tensor(4)}, "twice": True})
    loaded = Loaded(model).with_example(example, arguments)
    traced = trace.trace(loaded.model, example)
    assert list(traced.constants) == ["sizes.rows"]
    x = torch.randn(6, 3)
    assert torch.equal(traced.graph_module(x), x[:4] * 2)
    fixed = loaded.with_constants(list(example), traced.constants)
    assert torch.equal(fixed.model(x=x), x[:4] * 2)
    assert fixed.constants == {"twice": True, "sizes.rows": torch.tensor(4)}


class LoopsOverConstants(nn.Module):
    """Loops over tensors that are the same in every call, as TabNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor([2, 0]))
        self.register_buffer("is_number", torch.tensor([True, False, True]))
        self.spans = torch.tensor([[0, 2], [1, 3]])
        self.embedding = nn.Embedding(9, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x[:, int(column)].unsqueeze(1) for column in self.columns]
        for index, is_number in enumerate(self.is_number):
            parts.append(x[:, index : index + 1] if is_number else self.embedding(x[:, index].long()))
        parts += [x[:, start:end].sum(1, keepdim=True) for start, end in self.spans]
        return torch.cat(parts, 1)


def test_loop_over_constant_tensors_is_unrolled():
    model = LoopsOverConstants().eval()
    traced = trace.trace(model, {"x": torch.rand(3, 3)}, {"x": {0: "rows"}})
    assert traced.branches == ()
    x = torch.rand(7, 3) * 8
    assert torch.equal(traced.graph_module(x), model(x))


class WritesToHeld(nn.Module):
    """Writes to a constant input."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = x[: int(n)]
        n.add_(1)
        return x


def test_constant_input_is_the_same_in_every_call_despite_writes():
    example = {"x": torch.randn(4, 3), "n": torch.tensor(2)}
    traced = trace.trace(WritesToHeld(), example)
    assert torch.equal(example["n"], torch.tensor(2))
    assert torch.equal(traced.constants["n"], torch.tensor(2))
    assert torch.equal(traced.graph_module(example["x"]), example["x"][:2])


class Interrupted(nn.Module):
    """Raises a BaseException during the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise KeyboardInterrupt
        return x


def test_interrupted_call_leaves_no_mode_active() -> None:
    model = Interrupted()
    before = torch._C._len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt), KnownValues({}).track(model):
        torch.export.export(model, (), {"x": torch.randn(3, 2)}, strict=False)
    assert torch._C._len_torch_function_stack() == before
