"""Sizes at which a model takes another branch are fixed, or refused if declared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch.utils._sympy.functions import FloorDiv, PythonMod, ToFloat, TruncToInt

from optexport import export
from optexport.errors import ParityError, TraceError
from optexport.parity.cases import basic_cases
from optexport.signature.signature import Dim
from optexport.tracing.shapes import path_probe, size_conditions, size_guards
from optexport.tracing.trace import trace
from tests._helpers.exports import quick, run
from tests._helpers.graphs import Program
from tests._helpers.models import randomise


def _positions(m: Any, image: torch.Tensor) -> torch.Tensor:
    """Adds positions like vision transformers: unchanged if there are as many, otherwise interpolated."""
    height, width = image.shape[-2:]
    patches = m.patches(image)
    if (height // 4) * (width // 4) == 16 and (m.careless or height == width):
        return patches + m.table.reshape(1, 3, *patches.shape[-2:])
    table = nn.functional.interpolate(m.table, size=patches.shape[-2:], mode="bilinear")
    return patches + table


def _model(*, careless: bool = False) -> nn.Module:
    """A model that adds positions. The careless one compares only the number of patches."""
    patches, table = nn.Conv2d(3, 3, 4, 4), nn.Parameter(torch.randn(1, 3, 4, 4))
    model = randomise(Program(_positions, patches=patches, table=table))
    model.careless = careless  # type: ignore[assignment]
    return model


NATIVE, OTHER = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16), torch.ones(2, 3, 24, 32)


@pytest.mark.slow
def test_size_with_another_branch_fails_verification(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="x_2"):
        quick(_model(careless=True), {"x": OTHER}, tmp_path / "bundle")


@pytest.mark.slow
def test_sizes_fixed_by_an_equation_become_static() -> None:
    traced = trace(_model(), {"x": NATIVE})
    (image,) = traced.signature.inputs
    assert image.shape[2:] == (16, 16)
    assert image.shape[0] == "batch"
    assert {"x[2] = 16", "x[3] = 16"} <= set(traced.fixed)
    assert traced.suspect_sizes == ()


@pytest.mark.slow
def test_trace_at_another_size_holds_at_the_branch_size_too() -> None:
    model = _model()
    traced = trace(model, {"x": OTHER})
    (image,) = traced.signature.inputs
    height, width = image.shape[2:]
    assert isinstance(height, str)
    assert isinstance(width, str)
    assert any(sizes[height] == sizes[width] == 16 for sizes in traced.suspect_sizes)
    with torch.no_grad():
        for x in (NATIVE, OTHER, NATIVE.reshape(2, 3, 8, 32)):
            torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("height", ["height", Dim("height", 8, 64)], ids=["named", "ranged"])
def test_declared_sizes_of_a_special_branch_are_traced_at_others(height: str | Dim) -> None:
    model = _model()
    traced = trace(model, {"x": NATIVE}, {"x": {0: "batch", 2: height, 3: "width"}})
    with torch.no_grad():
        for x in (NATIVE, OTHER, NATIVE.reshape(2, 3, 8, 32)):
            torch.testing.assert_close(traced.graph_module(x), model(x))


@pytest.mark.slow
def test_padding_to_a_multiple_that_is_computed_takes_every_size() -> None:
    """The trace fixed this size, but the model does not."""

    def padded(m: Any, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8)).reshape(x.shape[0], -1, 8, 4).sum(2)

    model = Program(padded)
    traced = trace(model, {"x": torch.randn(2, 6, 4)}, {"x": {0: "batch", 1: Dim("length", 2, 64)}})
    for x in (torch.randn(1, 2, 4), torch.randn(3, 8, 4), torch.randn(2, 33, 4)):
        torch.testing.assert_close(traced.graph_module(x=x), model(x))


@pytest.mark.slow
def test_divisor_of_a_size_does_not_fix_it() -> None:
    model = Program(lambda m, x: m.layer(x.reshape(x.shape[0], x.shape[1] // 4, 4)), layer=nn.Linear(4, 4))
    traced = trace(randomise(model), {"x": torch.randn(2, 16)})
    assert traced.signature.inputs[0].shape == ("batch", "x_1")


def test_function_that_is_not_arithmetic_is_never_called() -> None:
    rows = sympy.Symbol("rows", integer=True, positive=True)
    for name in ("exit", "open", "eval", "__import__"):
        assert size_conditions._evaluator(sympy.Eq(sympy.Function(name)(rows), 4)).evaluate is None
        branch = sympy.Or(rows > 60, sympy.Eq(sympy.Function(name)(rows), 4))
        assert not size_conditions.is_broken(branch, {rows: 61})
        assert not size_conditions.is_broken(branch, {rows: 1}), "nothing is known to break"


BATCH, ROWS = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "my rows"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "condition",
    [
        sympy.Eq(FloorDiv(BATCH, 16) * FloorDiv(ROWS, 16), 4),
        sympy.Ne(FloorDiv(BATCH - 1, 2) + 1, ROWS),
        sympy.Eq(PythonMod(BATCH - ROWS, 7), 0),
        sympy.Le(sympy.Max(BATCH, ROWS) - sympy.Min(BATCH, 5), 9),
        sympy.Lt(TruncToInt(ToFloat(BATCH) * 0.7), ROWS),
        sympy.Or(sympy.Eq(BATCH, ROWS), BATCH > 3),
        sympy.Eq(FloorDiv(BATCH, ROWS - 3), 0),
    ],
    ids=str,
)
def test_condition_on_sizes_matches_sympy(condition: Any) -> None:
    def by_sympy(sizes: dict[sympy.Symbol, int]) -> bool:
        try:
            return bool(condition.xreplace({k: sympy.Integer(v) for k, v in sizes.items()}) == sympy.false)
        except ZeroDivisionError:
            return True

    for batch, rows in itertools.product(range(1, 24), repeat=2):
        sizes = {BATCH: batch, ROWS: rows}
        assert size_conditions.is_broken(condition, sizes) == by_sympy(sizes)


def _doubled_at(condition: Callable[[int, int], bool]) -> nn.Module:
    """A model that takes another branch at some sizes."""
    return randomise(Program(lambda m, x: m.norm(x) * (2 if condition(*x.shape[:2]) else 1), norm=nn.LayerNorm(4)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "condition",
    [
        lambda batch, rows: rows // 7 == 300,
        lambda batch, rows: rows % 1009 == 811,
        lambda batch, rows: batch * rows == 1001,
        lambda batch, rows: (batch // 2) * (rows // 3) == 1001,
    ],
    ids=["quotient", "remainder", "product", "product of quotients"],
)
def test_few_declared_sizes_with_another_branch_are_in_doubt(
    condition: Callable[[int, int], bool],
) -> None:
    dynamic = {"x": {0: Dim("batch", 1, 64), 1: Dim("rows", 1, 4096)}}
    traced = trace(_doubled_at(condition), {"x": torch.randn(3, 20, 4)}, dynamic)
    assert traced.suspect_sizes
    assert all(condition(sizes.get("batch", 3), sizes.get("rows", 20)) for sizes in traced.suspect_sizes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("condition", [lambda x: x.numel() > 9000, lambda x: x.numel() * x.element_size() > 30_000])
def test_bound_on_the_product_of_three_sizes_is_reported(condition: Callable[..., bool]) -> None:
    """No tried size exceeded it, and the files were wrong at the largest size of each axis."""
    dynamic = {"x": {0: Dim("batch", 1, 16), 1: Dim("rows", 1, 40), 2: Dim("columns", 1, 40)}}
    model = Program(lambda m, x: x * (2 if condition(x) else 1)).eval()
    with pytest.raises(TraceError, match=r"is valid only if batch\*columns\*rows <= "):
        trace(model, {"x": torch.randn(3, 7, 5)}, dynamic)


def test_conditions_of_a_model_that_returns_its_input_count() -> None:
    """torch.export asserts nothing for a graph without operators."""
    model = Program(lambda m, x: x / 2 if x.shape[0] * x.shape[1] > 1024 else x).eval()
    dynamic = {"x": {0: Dim("batch", 1, 32), 1: Dim("rows", 1, 256)}}
    with pytest.raises(TraceError, match=r"is valid only if batch\*rows <= 1024"):
        trace(model, {"x": torch.randn(3, 7)}, dynamic)


@pytest.mark.slow
def test_product_of_three_declared_sizes_is_in_doubt() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if x.shape[0] * x.shape[1] * x.shape[2] == 1001 else 1)

    dynamic = {"x": {axis: Dim(name, 1, 64) for axis, name in enumerate(("batch", "rows", "columns"))}}
    traced = trace(Program(forward).eval(), {"x": torch.randn(3, 20, 4)}, dynamic)
    assert traced.suspect_sizes
    assert all(math.prod(sizes.values()) == 1001 for sizes in traced.suspect_sizes)


@pytest.mark.parametrize(("traced_at", "ends"), [(20, (2, 40)), (50, (41, 90)), (100, (91, None))])
def test_undeclared_range_ends_at_another_branch(traced_at: int, ends: tuple[int, int | None]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] <= 40 else x * 3 if x.shape[1] <= 90 else x * 4

    traced = trace(Program(forward).eval(), {"x": torch.ones(2, traced_at)})
    (length,) = (dim for name, dim in traced.signature.dims.items() if name != "batch")
    assert (length.min, length.max) == ends


def test_bisection_finds_the_exact_end_of_a_range() -> None:
    for end in range(1, 40):
        assert size_guards._bisect(sympy.Le(ROWS, end), ROWS, 1, 40) == end
        assert size_guards._bisect(sympy.Gt(ROWS, end), ROWS, 41, 1) == max(end + 1, 2)


@pytest.mark.parametrize(
    ("condition", "dim", "traced", "ends"),
    [
        (ROWS <= 5000, Dim("rows", 2), 20, (2, 5000)),
        (ROWS * 7 > 35_003, Dim("rows", 2), 6000, (5001, None)),
        (ROWS <= 3, Dim("rows", 2), 2, (2, 3)),
        (ROWS <= 2, Dim("rows", 2), 2, (2, None)),  # a single size is no range
        (ROWS >= 9, Dim("rows", 1, 9), 9, (1, 9)),
        (sympy.Eq(PythonMod(ROWS, 8), 0), Dim("rows", 2), 16, (2, None)),  # larger sizes are valid again
    ],
    ids=str,
)
def test_range_is_narrowed_to_connected_sizes(
    condition: Any, dim: Dim, traced: int, ends: tuple[int, int | None]
) -> None:
    assert size_guards._narrow(dim, condition, ROWS, traced) == Dim("rows", *ends)


@pytest.mark.parametrize(("traced", "sizes"), [(3, [4, 2]), (4, [3]), (2, [3])])
def test_neighbours_of_a_size_are_in_its_range(traced: int, sizes: list[int]) -> None:
    neighbours = size_guards._neighbours(["rows"], {"rows": Dim("rows", 2, 4)}, {"rows": traced})
    assert list(neighbours) == [{"rows": size} for size in sizes]


@pytest.mark.slow
def test_size_that_is_always_divided_evenly_keeps_its_range() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 4, 4, 3).sum(1)

    traced = trace(Program(forward).eval(), {"x": torch.ones(128, 3)})
    (rows,) = traced.signature.dims.values()
    assert rows.min <= 16
    assert rows.max is None


def _padded(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Pads to a multiple of four, like image models, and only if padding is necessary."""
    if x.shape[1] % 4 != 0:
        x = nn.functional.pad(x, (0, 4 - x.shape[1] % 4))
    return x.reshape(x.shape[0], -1, 4).sum(1)


@pytest.mark.slow
def test_size_without_padding_is_a_multiple_if_others_are_padded() -> None:
    for dynamic, name in ((None, "x_1"), ({"x": {0: "batch", 1: "width"}}, "width")):
        traced = trace(Program(_padded).eval(), {"x": torch.ones(3, 16)}, dynamic)
        assert traced.signature.inputs[0].shape == ("batch", name)
        assert traced.signature.dims[name].multiple_of == 4
    model = Program(_padded).eval()
    declared = trace(model, {"x": torch.ones(3, 16)}, {"x": {0: "batch", 1: Dim("width", 4, 64)}})
    for width in (4, 15, 16, 17, 64):
        x = torch.randn(2, width)
        assert torch.equal(declared.graph_module(x), model(x))


def _filled_up(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes the mean of pairs and fills up to the input's size, by nothing at even sizes."""
    pairs = nn.functional.avg_pool1d(x, 2, 1 + m.careless, padding=0)
    missing = x.shape[2] - 2 * (x.shape[2] // 2)
    x = x[..., : 2 * (x.shape[2] // 2)]
    if x.shape[2] + missing > 2 * (x.shape[2] // 2):
        x = nn.functional.pad(x, (0, missing))
    elif m.careless and x.shape[2] == 34:
        x = x * 2
    return x + pairs.sum(dim=(1, 2), keepdim=True)


@pytest.mark.slow
def test_assertion_is_removed_if_every_branch_computes_the_same() -> None:
    model = Program(_filled_up).eval()
    x, dynamic = torch.linspace(-1, 1, 2 * 3 * 9).reshape(2, 3, 9), {"x": {0: "batch", 2: Dim("length", 2, 64)}}
    model.careless = False  # type: ignore[assignment]
    traced = trace(model, {"x": x}, dynamic)
    assert any(sizes["length"] % 2 == 0 for sizes in traced.suspect_sizes)
    for length in (8, 11, 30):
        batch = torch.randn(2, 3, length)
        torch.testing.assert_close(traced.graph_module(batch), model(batch))
    model.careless = True  # type: ignore[assignment]
    with pytest.raises(TraceError, match="length"):
        trace(model, {"x": x}, dynamic)


def _doubled_by_turns(rows: int) -> int:
    """Takes the same branch for three conditions, and another for the fourth."""
    if rows % 2 == 0 or rows % 3 == 0:
        return 1
    return 2 if rows % 5 == 0 else 1


def _loops(rows: int) -> int:
    """Loops in Python if the size is odd, so that each odd size has a trace for itself."""
    return 1 if rows % 2 == 0 else 1 + (sum(1 for _ in range(rows)) == 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "traced_at"),
    [
        (_doubled_by_turns, 8),
        (lambda rows: (2 if rows % 9 == 0 else 1) if rows % 3 == 0 else 1, 7),
        (_loops, 8),
        (lambda rows: 2 if rows % 2 and rows > 3000 and rows % 7 == 3 else 1, 8),
    ],
    ids=["beyond three conditions", "within what is excluded", "a trace for each size", "at large sizes"],
)
def test_assertion_stays_or_is_refused_if_a_branch_is_unknown(
    times: Callable[[int], int], traced_at: int, tmp_path: Path
) -> None:
    model = randomise(Program(lambda m, x: m.norm(x) * times(x.shape[1]), norm=nn.LayerNorm(4)))
    with pytest.raises((TraceError, ParityError), match="rows"):
        quick(model, {"x": torch.randn(2, traced_at, 4)}, tmp_path / "bundle", dynamic={"x": {1: Dim("rows", 1, 4000)}})


@pytest.mark.slow
@pytest.mark.parametrize(
    "convert", [lambda y: y.to_sparse(), lambda y: torch.complex(y, y), lambda y: y.double(), lambda y: "none"]
)
def test_another_kind_of_result_at_odd_sizes_leaves_even_sizes(convert: Callable[[torch.Tensor], Any]) -> None:
    model = randomise(
        Program(lambda m, x: m.norm(x) if x.shape[1] % 2 == 0 else convert(m.norm(x)), norm=nn.LayerNorm(4))
    )
    with pytest.raises(TraceError, match="the branch that the model takes at rows 8 is valid only if"):
        trace(model, {"x": torch.randn(2, 8, 4)}, {"x": {0: "batch", 1: Dim("rows", 1, 64)}})
    assert trace(model, {"x": torch.randn(2, 8, 4)}).signature.dims["x_1"].multiple_of == 2


def test_undeclared_range_ends_at_a_branch_between_tried_sizes() -> None:
    traced = trace(_doubled_at(lambda _, rows: 3 * rows > 2000), {"x": torch.randn(3, 20, 4)})
    assert traced.signature.dims["x_1"].max == 666


@pytest.mark.slow
def test_size_refused_by_the_model_is_refused_by_the_file(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[1] != 16)
        return m.norm(x)

    model = randomise(Program(forward, norm=nn.LayerNorm(4)))
    x, auto = torch.randn(2, 8, 4), torch.export.Dim.AUTO
    program = torch.export.export(
        model, (), {"x": x}, dynamic_shapes={"x": {1: auto}}, prefer_deferred_runtime_asserts_over_guards=True
    )
    for number, source in enumerate((model, program)):
        export(source, {"x": x}, tmp_path / str(number), formats=["pt2"], transformations=[])
        loaded = torch.export.load(tmp_path / str(number) / "model.pt2").module()
        torch.testing.assert_close(loaded(x=x.repeat(1, 3, 1))[0], model(x.repeat(1, 3, 1)))
        with pytest.raises(RuntimeError, match="Ne"):
            loaded(x=x.repeat(1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_branches_on_the_sum_of_two_sizes_are_found(times: int, tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
            keys = torch.cat([past, x], 1)
            scores = x @ keys.transpose(1, 2) + mask[:, None]
            return (scores if mask.shape[1] % 2 == 0 else scores * times).softmax(-1) @ keys

    model = Attention()
    batch = {"x": torch.randn(2, 4, 4), "mask": torch.randn(2, 8), "past": torch.randn(2, 4, 4)}
    dynamic = {
        "x": {0: "batch", 1: Dim("sequence", 1, 8)},
        "mask": {0: "batch", 1: "past + sequence"},
        "past": {0: "batch", 1: Dim("past", 1, 8)},
    }
    if times == 2:
        with pytest.raises(TraceError, match=r"past \+ sequence"):
            trace(model, batch, dynamic)
        return
    result = quick(model, batch, tmp_path / "bundle", dynamic=dynamic)
    odd = {"x": torch.randn(3, 5, 4), "mask": torch.randn(3, 7), "past": torch.randn(3, 2, 4)}
    torch.testing.assert_close(run(result, **odd)["output"], model(**odd))


@pytest.mark.slow
def test_model_with_padding_is_exported_for_sizes_without_too(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        missing = (8 - x.shape[1] % 8) % 8
        y = nn.functional.pad(m.norm(x), (0, 0, 0, missing)) if missing else m.norm(x)
        return y.reshape(y.shape[0], -1, 8, 4).softmax(2).reshape(y.shape[0], -1, 4)[:, : x.shape[1]]

    model, dynamic = randomise(Program(forward, norm=nn.LayerNorm(4))), {"x": {1: Dim("rows", 1, 24)}}
    result = quick(model, {"x": torch.randn(2, 9, 4)}, tmp_path / "bundle", dynamic=dynamic)
    for rows in (1, 8, 16, 23):
        x = torch.randn(2, rows, 4)
        torch.testing.assert_close(run(result, x=x)["output"], model(x))


@pytest.mark.slow
def test_branch_with_random_numbers_differs_from_the_traced_one(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2 if x.shape[1] % 2 == 0 else x * 2 + torch.rand(x.shape) * 1e-3)
    with pytest.raises(ParityError, match="rows"):
        quick(model, {"x": torch.randn(2, 4)}, tmp_path / "bundle", dynamic={"x": {1: Dim("rows", 1, 20)}})


def _at_forty(m: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = m.layer(x)
    return y * 3 if x.shape[1] == 40 else y


@pytest.mark.slow
def test_size_in_doubt_is_tried_with_the_other_sizes_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was halved, to a size that was not in doubt: wrong files passed if a batch had 16 million numbers."""
    model, x = randomise(Program(_at_forty, layer=nn.Linear(6, 2))), {"x": torch.randn(4, 8, 6)}
    dynamic = {"x": {0: Dim("batch", 1, 4), 1: Dim("sequence", 2, 64)}}
    monkeypatch.setattr(path_probe, "MAX_TRACED_ELEMENTS", 40 * 6)
    monkeypatch.setattr(path_probe, "_MAX_ELEMENTS", 1)
    monkeypatch.setattr(basic_cases, "_BUDGET_OF_SUSPECTS", 40 * 6)
    monkeypatch.setattr(basic_cases, "_BUDGET", 1)
    monkeypatch.setattr(basic_cases, "_BUDGET_TIMES", 0)
    with pytest.raises(ParityError, match="sequence 40"):
        quick(model, x, tmp_path / "bundle", dynamic=dynamic)
    monkeypatch.setattr(basic_cases, "_BUDGET_OF_SUSPECTS", 40 * 6 - 1)
    with pytest.raises(
        TraceError, match="at sequence 40 the model may take another branch .* has 240 elements, which is too large"
    ):
        quick(model, x, tmp_path / "bundle", dynamic=dynamic)
