"""Checks of values, which raise or do nothing: the trace continues after them."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from optexport.tracing import trace


class Checks(nn.Module):
    """Raises if its inputs do not fit together, in several ways."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if x is not None and x[mask].numel() != 2 * mask.sum():
            raise ValueError("the mask does not fit")
        if not (x.sum() > -1e9):
            raise ValueError("too small")
        assert x.max() < 1e9, "too large"
        assert not torch.isnan(x).any()
        return x * mask[:, None]


class Branches(nn.Module):
    """Raises, and has other code that depends on the same condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("negative numbers alone")
        else:  # noqa: RET506
            x = x * 2
        return x


class Mixed(nn.Module):
    """A condition that has no known way to pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0 and not x.max() > 1e9:
            raise ValueError("odd numbers")
        return x * 2


def test_trace_continues_after_checks_of_values():
    model = Checks()
    example = {"x": torch.randn(5, 2), "mask": torch.tensor([True, False, True, True, False])}
    traced = trace.trace(model, example)
    x, mask = torch.randn(7, 2), torch.rand(7) > 0.5
    assert torch.equal(traced.graph_module(x, mask), model(x, mask))


class Kept(nn.Module):
    """Stores the condition and raises for another reason."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (is_large := bool(x.max() > 1e5)) and self.training:
            raise ValueError("large")
        return x * 2 if is_large else x


class Chosen(nn.Module):
    """Chooses within the condition itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (y := x * 2 if x.max() > 1e5 else x).isnan().any():
            raise ValueError("no number")
        return y


class OneLine(nn.Module):
    """Branches on the line of a check."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 if x.max() < 1e5 else x; assert x.max() < 1e9  # fmt: skip  # noqa: E702
        return y


class Caught(nn.Module):
    """Takes another branch if a check raises."""

    def check(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1e5:
            raise ValueError("large")
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.check(x)
        except ValueError:
            return x * 2


class Suppressed(nn.Module):
    """Suppresses the error of a check."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(AssertionError):
            assert x.max() < 1e5
            x = x * 2
        return x


class Swallowing:
    """A context manager that continues after a check within it fails."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, *rest: object) -> bool:
        return kind is AssertionError


class Swallowed(nn.Module):
    """Swallows the error of a check."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), Swallowing():
            assert x.max() < 1e5
            x = x * 2
        return x


class Ends(nn.Module):
    """Ends a loop by raising."""

    class Steps:
        def __init__(self, x: torch.Tensor) -> None:
            self.x, self.step = x, 0

        def __iter__(self) -> "Ends.Steps":
            return self

        def __next__(self) -> int:
            self.step += 1
            if self.step > 3:
                raise StopIteration
            if self.x.max() > 1e5:
                raise StopIteration
            return self.step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(Ends.Steps(x))


_NAMES: dict[str, Any] = {}
exec("def note(x, found):\n    if x.max() > 1e5:\n        found.append(x)\n    return True", _NAMES)


class Generated(nn.Module):
    """Branches in code without a file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: list[torch.Tensor] = []
        assert _NAMES["note"](x, result)
        return x * 2 if result else x


class RaisedAgain(nn.Module):
    """Catches the error of a check and raises another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            assert x.max() < 1e5
        except AssertionError as error:
            raise ValueError("large") from error
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            assert x.min() > -1e5
        if any(value > 1e5 for value in x.flatten()[:2]):
            raise ValueError("large")
        if not 0 <= (x > 1e5).sum() <= 4:
            raise ValueError("large")
        if x.max() > 1e7 or \
                x.min() < -1e7:  # fmt: skip
            raise ValueError("large")
        return x * 2


@pytest.mark.slow
def test_check_with_a_translated_error_is_skipped():
    model = RaisedAgain().eval()
    traced = trace.trace(model, {"x": torch.rand(5, 2)})
    x = torch.rand(7, 2)
    assert torch.equal(traced.graph_module(x), model(x))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model",
    [Branches(), Mixed(), Kept(), Chosen(), OneLine(), Caught(), Suppressed(), Swallowed(), Ends(), Generated()],
    ids=lambda model: type(model).__name__,
)
def test_condition_with_another_effect_is_right_for_both_ways(model):
    traced = trace.trace(model.eval(), {"x": -torch.rand(5, 2)})
    for x in (-torch.rand(7, 2), torch.rand(3, 2) * 1e6 + 1e5):
        with contextlib.suppress(ValueError):
            assert torch.equal(traced.graph_module(x), model(x))


class Asserts(nn.Module):
    """Checks values with torch's functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.max() < 1e6, "too large")
        torch._check(x.min().item() > -1e6)
        torch._assert_async(x.sum() < 1e6, "too large")
        if torch.isnan(x).any():
            text = "NaN"
            raise ValueError(text)
        return x * 2


def test_left_out_checks_are_listed_and_leave_nothing_in_the_graph():
    traced = trace.trace(Asserts(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert [line.split(": ", 1)[1] for line in traced.skipped_checks] == [
        'torch._assert(x.max() < 1e6, "too large")',
        "torch._check(x.min().item() > -1e6)",
        'torch._assert_async(x.sum() < 1e6, "too large")',
        "if torch.isnan(x).any():",
    ]
    assert len(traced.graph_module.graph.nodes) == 3
    x = torch.randn(6, 4)
    assert torch.equal(traced.graph_module(x), x * 2)


class RaisesForNaN(nn.Module):
    """Checks its input as the first statement of a raise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.isnan(x).any():
            raise ValueError("NaN")
        return x * 2


def test_check_leaves_no_choice_among_numbers():
    traced = trace.trace(RaisesForNaN(), {"x": torch.randn(3, 4)}, {"x": {0: "rows"}})
    assert [node.op for node in traced.graph_module.graph.nodes] == ["placeholder", "call_function", "output"]
    assert traced.skipped_checks[0].endswith("if torch.isnan(x).any():")
