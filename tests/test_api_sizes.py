"""Sizes in the Python API: declared, found, refused, and checked without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.api import symbolic_trace
from optexport.errors import ConfigError, ParityError, TraceError
from optexport.parity.verify import verify
from optexport.signature.signature import Dim
from tests._helpers import exports
from tests._helpers.exports import X, quick, run
from tests._helpers.graphs import Program
from tests._helpers.models import randomise


@pytest.mark.slow
def test_batch_of_one_stays_one_unless_its_axis_is_declared(tmp_path: Path) -> None:
    model = randomise(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    result = quick(model, X[:1], tmp_path / "bundle")
    assert result.manifest.inputs[0].shape == [1, 4]
    assert "the example has one row" in result.manifest.fixed_axes[0]
    declared = quick(model, X[:1], tmp_path / "declared", dynamic={"input": {0: "batch"}})
    assert declared.manifest.inputs[0].shape == ["batch", 4]


@pytest.mark.slow
def test_model_of_a_single_row_is_exported_without_declared_axes(tmp_path: Path) -> None:
    """The model rejects two rows."""
    model = randomise(Program(lambda m, x: m.linear(x.view(4)), linear=nn.Linear(4, 2)))
    result = quick(model, {"x": X[:1]}, tmp_path / "bundle")
    torch.testing.assert_close(run(result, x=X[1:2])["output"], model(X[1:2]))


@pytest.mark.slow
def test_dynamic_axes_may_have_a_name_or_a_range(tmp_path: Path) -> None:
    by_name = quick(exports.block(), exports.batch(), tmp_path / "name", dynamic={
        "x": {0: "batch", 1: "sequence"}, "mask": {0: "batch", 1: "sequence"},
    })  # fmt: skip
    assert by_name.manifest.inputs[0].shape == ["batch", "sequence", 8]
    by_range = exports.exported()
    assert by_range.manifest.dims["batch"].max == 32
    static = quick(exports.block(), exports.batch(), tmp_path / "static", dynamic={})
    assert static.manifest.inputs[0].shape == [2, 5, 8]
    assert static.manifest.dims == {}
    assert all(target.passed for target in verify(static.output).targets)


def test_declared_axis_that_the_model_fixes_is_an_error(tmp_path: Path) -> None:
    model = randomise(nn.Linear(4, 2))
    for width in ("width", Dim("width", 2, 64)):
        with pytest.raises(TraceError) as caught:
            quick(model, {"input": X}, tmp_path / "bundle", dynamic={"input": {0: "batch", 1: width}})
        assert "width" in str(caught.value)
        assert list(tmp_path.iterdir()) == []


_BRANCHES: dict[str, tuple[Any, tuple[int, int], Any]] = {
    "a large product": (lambda h, w: h * w > 1_000_000, (64, 64), (Dim("h", 32, 4096), Dim("w", 32, 4096))),
    "one product": (lambda h, w: h * w == 35, (8, 8), (Dim("h", 1, 64), Dim("w", 1, 64))),
    "a large multiple": (lambda h, w: h % 1000 == 0, (10, 3), (Dim("h", 1, 3999), Dim("w", 1, 8))),
    "a large size": (lambda h, w: h > 5000, (10, 3), (Dim("h", 1, 9000), Dim("w", 1, 8))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _BRANCHES)
def test_branch_far_from_the_traced_sizes_is_found(name: str, tmp_path: Path) -> None:
    condition, shape, (h, w) = _BRANCHES[name]
    model = Program(lambda m, x: x * 2 if condition(*x.shape) else x + 1)
    with pytest.raises((ParityError, TraceError)):  # torch finds some in a declared range
        quick(model, {"x": torch.rand(shape)}, tmp_path / "bundle", dynamic={"x": {0: h, 1: w}})


@pytest.mark.slow
def test_undeclared_range_ends_where_the_model_branches(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2 if x.shape[0] > 5000 else x + 1)
    result = quick(model, {"x": torch.rand(10, 3)}, tmp_path / "bundle", dynamic={"x": {0: "h", 1: "w"}})
    assert result.manifest.dims["h"].max == 5000


@pytest.mark.slow
def test_size_that_float32_rounds_differently_is_tried(tmp_path: Path) -> None:
    model = Program(lambda m, x: nn.functional.interpolate(x, scale_factor=0.7, mode="bilinear"))
    dynamic = {"x": {2: Dim("h", 8, 256), 3: Dim("w", 8, 256)}}
    with pytest.raises(ParityError, match=r"onnx: output: .* \(case: h 90,"):  # 0.7 * 90 is 62.99999 in float64 only
        quick(model, {"x": torch.rand(1, 2, 17, 20)}, tmp_path / "bundle", dynamic=dynamic, formats=["onnx"])


@pytest.mark.slow
def test_lengthened_batches_have_no_ties_that_the_data_lacks(tmp_path: Path) -> None:
    sorts = Program(lambda m, x: x.sort(1))
    result = quick(sorts, {"x": torch.randn(3, 17)}, tmp_path / "bundle", dynamic={"x": {1: Dim("n", 8, 200)}})
    assert result.passed


@pytest.mark.slow
def test_end_of_a_huge_range_is_not_built(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2)
    result = quick(model, {"x": X}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 2**31 - 1)}})
    assert result.passed


class Branching(nn.Module):
    """Takes another branch at some sizes. A trace does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 100 if x.shape[0] % 11 == 0 else x * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [{"x": {0: Dim("batch", 1, 64)}}, {"x": {0: "batch"}}, None])
def test_branch_on_a_size_is_found(dynamic: Any, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="batch 11"):
        quick(Branching(), {"x": torch.rand(3, 4)}, tmp_path / "bundle", dynamic=dynamic)


@pytest.mark.slow
def test_branch_on_an_undeclared_size_does_no_harm(tmp_path: Path) -> None:
    result = quick(Branching(), {"x": torch.rand(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 10)}})
    assert result.passed


def test_both_ends_of_a_range_are_checked(tmp_path: Path) -> None:
    model = Program(lambda m, x: x * 2)
    result = quick(model, {"x": torch.rand(3, 768)}, tmp_path / "bundle", dynamic={"x": {0: Dim("batch", 1, 64)}})
    assert {"batch 1", "batch 64"} <= set(result.manifest.parity.cases)


@pytest.mark.slow
def test_dimension_of_a_single_size_is_fixed(tmp_path: Path) -> None:
    dynamic = {"input": {0: Dim("batch", 1, 1)}}
    result = quick(nn.Linear(4, 3).eval(), torch.randn(1, 4), tmp_path / "one", dynamic=dynamic)
    assert result.manifest.dims == {}
    assert result.manifest.inputs[0].shape == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({0: Dim("batch", 1, 1)}, "has size 2, but"),
        ({"0": "batch"}, "the input does not have the axes"),
        ({True: "batch"}, "the input does not have the axes"),
        ({0: Dim("", 1, 4)}, "is not a dimension"),
        ({0: "my batch"}, "is not a dimension"),
        ({0: Dim("batch", 1.5, 4)}, "is not a range of sizes from 1 to 2147483647"),  # type: ignore[arg-type]
        ({0: Dim("batch", 1, 10**30)}, "is not a range of sizes from 1 to 2147483647"),
        ({0: Dim("batch", 9, 15, 8)}, "no multiple of 8 lies in the range 9 to 15\nHint: Write a max of at least 16"),
        ({0: Dim("batch", 1, 4, 0)}, "`multiple_of` must be a whole number .found 0, expected 1 or more"),
    ],
)
def test_unknown_dimension_is_refused(axes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        quick(nn.Linear(4, 3).eval(), torch.randn(2, 4), tmp_path / "one", dynamic={"input": axes})


def test_mistyped_input_of_dynamic_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='dynamic: inptu: the model has no input of this name\nHint: Did you mean "i'):
        quick(nn.Linear(4, 3).eval(), torch.randn(2, 4), tmp_path / "one", dynamic={"inptu": {0: "batch"}})


def test_symbolic_trace_refuses_a_range_without_sizes() -> None:
    dynamic = {"input": {0: Dim("batch", multiple_of=0)}}
    with pytest.raises(ConfigError, match="dynamic: input: `multiple_of` must be a whole number"):
        symbolic_trace(nn.Linear(4, 3).eval(), example_inputs=(torch.randn(2, 4),), dynamic=dynamic)
