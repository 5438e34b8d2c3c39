"""Models that ask for values while they are traced: of buffers, of constants, and of inputs that are held."""

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
from optexport.tracing.fallbacks.constants import KnownValues


class Switched(nn.Module):
    """Asks a buffer, at every step, whether to take it."""

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
    """Goes over the images of a batch, whose heights and widths are values."""

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
def test_a_model_that_asks_a_buffer_is_traced_with_all_sizes_dynamic():
    model = Switched().eval()
    traced = trace.trace(model, {"x": torch.randn(3, 4)})
    assert traced.held == {}
    assert set(traced.fixed) == {"x[1] = 4"}
    x = torch.randn(7, 4)
    assert torch.equal(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_an_input_whose_values_decide_sizes_is_held_and_the_text_beside_it_stays_dynamic():
    model = Grids().eval()
    traced = trace.trace(model, _grids())
    assert list(traced.held) == ["grid"]
    assert [spec.name for spec in traced.signature.inputs] == ["pixels", "text"]
    assert traced.fixed[0].startswith("grid = [[2, 3], [4, 2]]; the model reads its values at test_constants.py:")
    pixels, text = torch.randn(14, 4), torch.randn(9, 4)
    want = model(pixels, text, GRID)
    for name, got in traced.graph_module(pixels, text).items():
        assert torch.equal(got, want[name])


def test_a_bundle_holds_the_values_and_its_files_take_the_other_inputs(tmp_path):
    model = Grids().eval()
    result = optexport.export(model, _grids(), tmp_path / "bundle")
    assert result.manifest.constants == {"grid": GRID.tolist()}
    bundle = optexport.Bundle.load(tmp_path / "bundle")
    pixels, text = torch.randn(14, 4), torch.randn(5, 4)
    want = model(pixels, text, GRID)
    for name, got in bundle(pixels=pixels, text=text).items():
        torch.testing.assert_close(torch.from_numpy(got), want[name.removesuffix("_out")])
    assert bundle(pixels=pixels, text=text, grid=GRID)["images"].shape == (14, 4)
    with pytest.raises(ConfigError, match=r"grid: the file holds for \[\[2, 3\], \[4, 2\]\] alone"):
        bundle(pixels=pixels, text=text, grid=GRID.flip(0))


@pytest.mark.slow
def test_where_sizes_are_declared_the_message_says_how_to_hold_the_input():
    with pytest.raises(TraceError, match=r"inputs: grid: the model reads the values at test_constants.py") as error:
        trace.trace(Grids().eval(), _grids(), {"text": {0: Dim("rows", 1, 8)}})
    assert "[inputs.constants] grid = [[2, 3], [4, 2]]" in str(error.value)


@pytest.mark.slow
def test_constants_of_a_config_may_be_lists_and_sizes_be_declared_beside_them(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        """
        [model]
        source = "python:tests.tracing.fallbacks.test_constants:make_grids"
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
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["dims"]["rows"] == {"min": 1, "max": 8}


def make_grids() -> nn.Module:
    return Grids().eval()


class Overwritten(nn.Module):
    """Overwrites numbers that were known with ones that are not, through a view."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros(3)
        part = numbers[1:]
        part[0] = x.sum()
        if int(n) > 1:
            x = x * 2
        return x + numbers


def test_what_is_overwritten_is_known_no_longer():
    model, n = Overwritten(), torch.tensor(2)
    traced = trace.trace(model, {"x": torch.randn(4, 3), "n": n})
    x = torch.randn(6, 3)
    assert list(traced.held) == ["n"]
    torch.testing.assert_close(traced.graph_module(x), model(x, n))


class Asking(nn.Module):
    """Asks for the overwritten number itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = torch.zeros(3)
        numbers[1] = x.sum()
        return x * 2 if numbers[1] > 0 else x


class Drawn(nn.Module):
    """Asks for a random number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand_like(torch.ones(2))[0] > 0.5 else x


class OfText(nn.Module):
    """Asks for tokens, which are others in every call."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids * 2 if input_ids[0, 0] > 3 else input_ids


class OfNumbers(nn.Module):
    """Asks for what is computed from an input that may not be held and one that may."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * 2 if (x.sum() * scale).item() > 0 else x


class WrittenTo(nn.Module):
    """Asks for a number that is written to in a way that names no tensor first."""

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
    _set_data,
    lambda numbers, new: torch._foreach_add_([numbers], [new]),
    lambda numbers, new: torch.ops.aten.copy_.default(numbers, new),
    lambda numbers, new: torch.max(new[None], 0, out=(numbers, torch.zeros(3, dtype=torch.int64))),
    lambda numbers, new: nn.functional.batch_norm(new[:, None].expand(3, 3), numbers, torch.ones(3), training=True),
]


class Counting(nn.Module):
    """Goes another way from the eleventh call on."""

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
    """Asks for a number that a function of Python draws."""

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
        *((WrittenTo(write), {"x": torch.randn(4, 3)}) for write in WRITES),
        (Counting(torch.zeros(2)), {"x": torch.randn(4, 3)}),
        (Counting(torch.zeros(2), is_buffer=False), {"x": torch.randn(4, 3)}),
        (CountingAnew(torch.zeros(2)), {"x": torch.randn(4, 3)}),
        (DrawnInPython(), {"x": torch.randn(4, 3)}),
        (Drawn(), {"x": torch.randn(4, 3)}),
        (OfText(), {"input_ids": torch.randint(0, 9, (2, 5))}),
        (OfNumbers(), {"x": torch.randn(4, 3), "scale": torch.tensor(2)}),
    ],
)
def test_values_that_hang_on_what_is_not_held_are_refused(model, example):
    with pytest.raises(TraceError, match="could not trace it"):
        trace.trace(model, example)


class Nested(nn.Module):
    """Takes what it asks for in a dict, beside a constant."""

    def forward(self, x: torch.Tensor, sizes: dict[str, torch.Tensor], twice: bool) -> torch.Tensor:
        x = x[: int(sizes["rows"])]
        return x * 2 if twice else x


def test_a_nested_input_is_held_beside_other_constants():
    model = Nested()
    example, arguments = flat_inputs(model, {"x": torch.randn(6, 3), "sizes": {"rows": torch.tensor(4)}, "twice": True})
    loaded = Loaded(model).called_with(example, arguments)
    traced = trace.trace(loaded.model, example)
    assert list(traced.held) == ["sizes.rows"]
    x = torch.randn(6, 3)
    assert torch.equal(traced.graph_module(x), x[:4] * 2)
    held = loaded.holding(list(example), traced.held)
    assert torch.equal(held.model(x=x), x[:4] * 2)
    assert held.constants == {"twice": True, "sizes.rows": torch.tensor(4)}


class WritesToHeld(nn.Module):
    """Writes to an input that is held."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        x = x[: int(n)]
        n.add_(1)
        return x


def test_what_is_held_is_the_same_in_every_call_of_a_model_that_writes_to_it():
    example = {"x": torch.randn(4, 3), "n": torch.tensor(2)}
    traced = trace.trace(WritesToHeld(), example)
    assert torch.equal(example["n"], torch.tensor(2))
    assert torch.equal(traced.held["n"], torch.tensor(2))
    assert torch.equal(traced.graph_module(example["x"]), example["x"][:2])


class Interrupted(nn.Module):
    """Ends in what is no ordinary error where it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_exporting():
            raise KeyboardInterrupt
        return x


def test_a_call_that_is_interrupted_leaves_no_mode_behind() -> None:
    model = Interrupted()
    before = torch._C._len_torch_function_stack()
    with pytest.raises(KeyboardInterrupt), KnownValues({}).of(model):
        torch.export.export(model, (), {"x": torch.randn(3, 2)}, strict=False)
    assert torch._C._len_torch_function_stack() == before
