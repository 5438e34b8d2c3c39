"""Large results of user data are stored in files, and runners restore the state of a model."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.parity.reference import map_to_files, repeated_runner
from optexport.signature.signature import Batch


def test_large_results_are_stored_in_unnamed_files() -> None:
    large, small = torch.randn(1 << 18).reshape(512, -1).t(), torch.randn(3)
    mapped = map_to_files({"large": large, "small": small, "half": large.bfloat16().repeat(2, 1)})
    assert torch.equal(mapped["large"], large)
    assert torch.equal(mapped["half"], large.bfloat16().repeat(2, 1))
    assert mapped["small"] is small
    target = mapped["large"].untyped_storage().filename
    assert target is not None
    assert not Path(target).exists()


def test_results_too_large_for_a_file_raise_an_error() -> None:
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            map_to_files({"y": torch.ones(1 << 19)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        signal.signal(signal.SIGXFSZ, before)


class Counter(nn.Module):
    """Writes to a buffer, a list, an attribute and the order of a dict in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.seen: list[int] = []
        self.calls = 0
        self.factors = {"first": 1, "second": 10}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total += x.sum()
        key = next(iter(self.factors))
        self.factors[key] = factor = self.factors.pop(key)
        return self.total + factor * len(self.seen)


def test_every_call_of_a_repeated_runner_starts_with_the_same_state() -> None:
    model = Counter()

    def call(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        output = model(**batch).clone()
        if output > 100:
            raise ValueError(output)
        return {"output": output}

    run = repeated_runner(model, call)
    assert [float(run({"x": torch.tensor([3.0])})["output"]) for _ in range(3)] == [4.0] * 3
    with pytest.raises(ValueError, match="201"):
        run({"x": torch.tensor([200.0])})
    assert (model.calls, model.seen, float(model.total)) == (0, [], 0.0)
    assert list(model.factors) == ["first", "second"]
