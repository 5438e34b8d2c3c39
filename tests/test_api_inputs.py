"""Inputs of the Python API: tensors that share memory, gradients, and constants."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optexport.api import symbolic_trace
from optexport.errors import ConfigError
from optexport.inference.bundle import Bundle
from tests._helpers.exports import quick
from tests._helpers.models import randomise


class Difference(nn.Module):
    """Changes its first input in place."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.mul_(2) - b


class Asking(nn.Module):
    """Distinguishes 1 from True, and returns infinity unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, times: Any = 1, limit: float = 1.0) -> torch.Tensor:
        return self.linear(x).clamp(max=limit) * (5 if times is True else 1)


X, A, B = torch.linspace(-1, 1, 12).reshape(3, 4), torch.arange(20.0).reshape(5, 4), torch.ones(5, 4)


@pytest.mark.slow
def test_one_tensor_passed_as_two_inputs_is_traced_as_two(tmp_path: Path) -> None:
    both = torch.cat([X, X])
    for inputs in ({"a": X, "b": X}, {"a": both[:3], "b": both[3:]}, {"a": both[:3], "b": both[1:4]}):
        quick(Difference().eval(), inputs, tmp_path / "bundle")
        outputs = Bundle.load(tmp_path / "bundle")(a=A, b=B)
        torch.testing.assert_close(torch.from_numpy(outputs["output"]), A * 2 - B)
    traced = symbolic_trace(Difference().eval(), example_inputs={"a": X, "b": X})
    torch.testing.assert_close(traced(A.clone(), B), A * 2 - B)


@pytest.mark.slow
def test_input_with_a_gradient_is_used_without_it(tmp_path: Path) -> None:
    result = quick(randomise(nn.Linear(4, 3)), {"input": nn.Parameter(X.clone())}, tmp_path / "bundle")
    assert result.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "problem"),
    [(torch.eye(4).to_sparse(), "sparse_coo tensor"), (torch.ones(3, 4, device="meta"), "on the device meta")],
    ids=["sparse", "meta"],
)
def test_tensor_that_no_file_supports_is_refused_by_name(tensor: torch.Tensor, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"inputs: input: expected a dense tensor on the CPU, found a .*{problem}"):
        quick(randomise(nn.Linear(4, 3)), {"input": tensor}, tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint16, torch.float8_e4m3fn, torch.complex128])
def test_dtype_that_no_file_supports_is_an_error_with_its_name(dtype: torch.dtype, tmp_path: Path) -> None:
    """Some of them raised errors of torch when the verification made inputs of them."""
    with pytest.raises(ConfigError, match=f"inputs: the dtype of input, {str(dtype).removeprefix('torch.')}, is not"):
        quick(randomise(nn.Linear(4, 3)), {"input": torch.ones(3, 4).to(dtype)}, tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0, False)])
def test_equal_constants_of_different_types_are_distinct(first: Any, second: Any, tmp_path: Path) -> None:
    batches = [{"x": X, "times": first}, {"x": X, "times": second}]
    with pytest.raises(ConfigError, match=r"inputs\[1\]: the batch has other arguments or other constants"):
        quick(randomise(Asking()), batches, tmp_path / "bundle")


@pytest.mark.slow
def test_infinite_constant_is_a_string_in_the_manifest(tmp_path: Path) -> None:
    result = quick(randomise(Asking()), {"x": X, "limit": math.inf}, tmp_path / "bundle")
    assert result.manifest.constants == {"times": 1, "limit": "inf"}


@pytest.mark.slow
def test_output_size_fixed_by_the_model_is_in_the_manifest(tmp_path: Path) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x), x, torch.cat([x, x], 1)

    result = quick(randomise(Returning()), {"x": X}, tmp_path / "bundle")
    assert [output.shape for output in result.manifest.outputs] == [["batch", 3], ["batch", 4], ["batch", 8]]


class Scales(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 1.5, mode: str = "plain", *, twice: bool = False) -> torch.Tensor:
        return x * scale


def test_number_that_is_left_at_its_default_is_a_constant_of_the_files(tmp_path: Path) -> None:
    result = quick(Scales().eval(), {"x": torch.randn(3, 4)}, tmp_path / "out", formats="onnx")
    assert result.manifest.constants == {"scale": 1.5}
    assert "\nConstants scale = 1.5\n" in result.summary()
    bundle = Bundle.load(result.output)
    x = np.ones((2, 4), np.float32)
    assert (bundle(x=x, scale=1.5)["output"] == 1.5).all()
    with pytest.raises(ConfigError, match="scale"):
        bundle(x=x, scale=2.0)
