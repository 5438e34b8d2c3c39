"""What is given to a model through the Python API: tensors that share memory, gradients, and constants."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.api import symbolic_trace
from optexport.errors import ConfigError
from optexport.inference.bundle import Bundle
from tests._helpers.exports import quick
from tests._helpers.models import randomise


class Difference(nn.Module):
    """Changes its first input on the way."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.mul_(2) - b


class Asking(nn.Module):
    """Tells 1 from True, and passes infinity on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, times: Any = 1, most: float = 1.0) -> torch.Tensor:
        return self.linear(x).clamp(max=most) * (5 if times is True else 1)


X, A, B = torch.linspace(-1, 1, 12).reshape(3, 4), torch.arange(20.0).reshape(5, 4), torch.ones(5, 4)


@pytest.mark.slow
def test_one_tensor_that_is_given_for_two_inputs_is_traced_as_two(tmp_path: Path) -> None:
    both = torch.cat([X, X])
    for given in ({"a": X, "b": X}, {"a": both[:3], "b": both[3:]}, {"a": both[:3], "b": both[1:4]}):
        quick(Difference().eval(), given, tmp_path / "bundle")
        outputs = Bundle.load(tmp_path / "bundle")(a=A, b=B)
        torch.testing.assert_close(torch.from_numpy(outputs["output"]), A * 2 - B)
    traced = symbolic_trace(Difference().eval(), example_inputs={"a": X, "b": X})
    torch.testing.assert_close(traced(A.clone(), B), A * 2 - B)


@pytest.mark.slow
def test_an_input_that_has_a_gradient_is_taken_without_it(tmp_path: Path) -> None:
    result = quick(randomise(nn.Linear(4, 3)), {"input": nn.Parameter(X.clone())}, tmp_path / "bundle")
    assert result.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "told"),
    [(torch.eye(4).to_sparse(), "sparse_coo tensor"), (torch.ones(3, 4, device="meta"), "on the device meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_no_file_takes_is_an_error_that_names_it(tensor: torch.Tensor, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"inputs: input: it is a .*{told}"):
        quick(randomise(nn.Linear(4, 3)), {"input": tensor}, tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.uint64, torch.uint16, torch.float8_e4m3fn, torch.complex128])
def test_a_dtype_that_no_file_holds_is_an_error_that_names_it(dtype: torch.dtype, tmp_path: Path) -> None:
    """Some of them ended in errors of torch's own, as the proof made inputs of them."""
    with pytest.raises(ConfigError, match=f"inputs: input is of {str(dtype).removeprefix('torch.')}, which"):
        quick(randomise(nn.Linear(4, 3)), {"input": torch.ones(3, 4).to(dtype)}, tmp_path / "bundle")


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False)])
def test_constants_that_are_equal_and_of_other_kinds_are_other_constants(one: Any, other: Any, tmp_path: Path) -> None:
    batches = [{"x": X, "times": one}, {"x": X, "times": other}]
    with pytest.raises(ConfigError, match=r"inputs\[1\]: its arguments are other ones"):
        quick(randomise(Asking()), batches, tmp_path / "bundle")


@pytest.mark.slow
def test_an_infinite_constant_is_a_text_in_the_manifest(tmp_path: Path) -> None:
    result = quick(randomise(Asking()), {"x": X, "most": math.inf}, tmp_path / "bundle")
    assert result.manifest.constants == {"most": "inf"}


@pytest.mark.slow
def test_an_output_of_a_size_that_the_model_fixes_has_that_size_in_the_manifest(tmp_path: Path) -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> Any:
            return self.linear(x), x, torch.cat([x, x], 1)

    result = quick(randomise(Returning()), {"x": X}, tmp_path / "bundle")
    assert [output.shape for output in result.manifest.outputs] == [["batch", 3], ["batch", 4], ["batch", 8]]
