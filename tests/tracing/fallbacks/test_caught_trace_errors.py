"""A model that catches an error raised only by the trace is refused with the line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

import numpy as np
import pytest
import torch

from optexport.api import symbolic_trace, trace
from optexport.errors import TraceError
from optexport.testing import outputs
from tests._helpers.graphs import Program
from tests.tracing.test_trace import X

Body = Callable[[object, torch.Tensor], torch.Tensor]


class Everything:
    """A context manager that swallows every exception."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> bool:
        return True


def rare_branch(_: object, x: torch.Tensor) -> torch.Tensor:
    try:
        if x.max() > 1e30:
            return x * 2
    except Exception:
        pass
    return x + 1


def suppressed_branch(_: object, x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        if x.max() > 1e30:
            return x * 2
    return x + 1


def branch_within_everything(_: object, x: torch.Tensor) -> torch.Tensor:
    with Everything():
        if x.max() > 1e30:
            return x * 2
    return x + 1


def size_of_a_value(_: object, x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    try:
        y = y[: int(x[0, 0].item())]
    except:  # noqa: E722 - as models have it
        pass
    return y


def number_of_hits(_: object, x: torch.Tensor) -> torch.Tensor:
    try:
        if x[x > 0.5].shape[0] > 1000:
            return x * 2
    except ValueError:
        return x * 3
    except Exception:
        return x + 1
    return x + 1


def asking_numpy(_: object, x: torch.Tensor) -> torch.Tensor:
    try:
        large = bool(np.abs(x.detach().numpy()).max() > 1e6)
    except Exception:
        large = False
    return x / 1000 if large else x


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "body", [asking_numpy, rare_branch, suppressed_branch, branch_within_everything, size_of_a_value, number_of_hits]
)
def test_caught_trace_error_is_refused_with_the_line(body: Body) -> None:
    with pytest.raises(TraceError, match=r"catches the error at test_caught_trace_errors\.py:\d+: \w+") as raised:
        trace(Program(body), {"x": X})
    assert raised.value.exit_code == 3
    assert raised.value.hint


def test_code_without_a_file_belongs_to_the_model() -> None:
    body: dict[str, Body] = {}
    exec(
        "def body(_, x):\n    try:\n        big = bool(x.max() > 1e30)\n    except Exception:\n        big = False\n"
        "    return x / 1000 if big else x\n",
        body,
    )
    with pytest.raises(TraceError, match="catches the error at <string>:3"):
        trace(Program(body["body"]), {"x": X})


def test_models_own_caught_error_is_allowed() -> None:
    def body(_: object, x: torch.Tensor) -> torch.Tensor:
        try:
            raise ValueError
        except ValueError:
            return x + 1

    assert torch.equal(outputs(symbolic_trace(Program(body), example_inputs={"x": X}), X)[0], X + 1)
