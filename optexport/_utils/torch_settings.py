"""Process-wide settings of torch, which imported code may change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    """Process-wide defaults of torch.

    Attributes:
        dtype: The default floating point dtype.
        device: The default device.
        flushes: Whether denormal numbers are flushed to zero.
        is_repeatable: Whether only deterministic algorithms are used.
    """

    dtype: torch.dtype
    device: torch.device
    flushes: bool
    is_repeatable: bool

    @classmethod
    def now(cls) -> Settings:
        """Returns the settings of this process."""
        smallest = torch.full((), 1e-310, dtype=torch.float64, device="cpu")
        flushes, is_repeatable = float(smallest * 1.0) == 0.0, torch.are_deterministic_algorithms_enabled()
        return cls(torch.get_default_dtype(), torch.get_default_device(), flushes, is_repeatable)

    def apply(self) -> None:
        """Applies the settings to this process."""
        torch.set_default_dtype(self.dtype)
        if torch.get_default_device() != self.device:
            torch.set_default_device(None if self.device.type == "cpu" else self.device)
        torch.set_flush_denormal(self.flushes)
        torch.use_deterministic_algorithms(self.is_repeatable)


_FRESH = Settings(torch.float32, torch.device("cpu"), flushes=False, is_repeatable=False)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restores the settings at the end of a context."""
    before, has_gradients = Settings.now(), torch.is_grad_enabled()
    try:
        yield
    finally:
        before.apply()
        torch.set_grad_enabled(has_gradients)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Computes with this number of threads in a context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Runs a context with torch's defaults, as in a new process that loads a file."""
    with preserved(), torch.autocast("cpu", enabled=False):
        _FRESH.apply()
        yield
