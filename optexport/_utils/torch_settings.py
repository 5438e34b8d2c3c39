"""Settings of torch that hold for a whole process, which code of others may change as it is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """What torch computes by where nothing else is said.

    Attributes:
        dtype: Of real numbers that are made without one.
        device: Of tensors that are made without one.
        flushes: Whether the smallest numbers are taken for zero.
        is_repeatable: Whether only operators are used that always give the same.
    """

    dtype: torch.dtype
    device: torch.device
    flushes: bool
    is_repeatable: bool

    @classmethod
    def now(cls) -> Settings:
        """Those of this process."""
        smallest = torch.full((), 1e-310, dtype=torch.float64, device="cpu")
        flushes, is_repeatable = float(smallest * 1.0) == 0.0, torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), torch.get_default_device(), flushes, is_repeatable)

    def apply(self) -> None:
        """Makes them those of this process."""
        torch.set_default_dtype(self.dtype)
        if torch.get_default_device() != self.device:
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_flush_denormal(self.flushes)
        torch.use_deterministic_algorithms(self.is_repeatable)


_FRESH = Settings(torch.float32, torch.device("cpu"), flushes=False, is_repeatable=False)


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Puts the settings back, at its end, that held at its begin."""
    before, has_gradients = Settings.now(), torch.is_grad_enabled()
    try:
        yield
    finally:
        before.apply()
        torch.set_grad_enabled(has_gradients)


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Within it torch computes by what holds in a process that has set nothing, as those do that load a file."""
    with put_back(), torch.autocast("cpu", enabled=False):
        _FRESH.apply()
        yield
