"""What all tests share: no network, one thread, the same random numbers every time, one table of operators."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
from collections.abc import Iterator

# Read when transformers is imported, so it must stand before that.
os.environ["HF_HUB_OFFLINE"] = "1"
# What one test computes in float64 is not kept for another.
os.environ["OPTEXPORT_CACHE"] = ""

import hypothesis
import pytest
import torch
import transformers
from torch._export import utils
from torch.onnx._internal.exporter import _constants, _registration

# A shell has its jobs in the background ignore these, and so would all programs that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)
# As the program sets it; and what the imports have made stays, so that no collection looks at it.
gc.set_threshold(20_000, 50, 100)
gc.freeze()
transformers.logging.set_verbosity_error()

hypothesis.settings.register_profile(
    "optexport",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("optexport")

_read_torchlib = functools.cache(_registration.ONNXRegistry.from_torchlib)


def _from_torchlib(opset_version: int = _constants.TORCHLIB_OPSET) -> _registration.ONNXRegistry:
    """A table of its own, since an export enters more into it, of entries that were read once.

    torch.onnx reads the sources of 550 functions for every export: a quarter of the time of a small one.
    """
    registry = copy.copy(_read_torchlib(opset_version))
    registry.functions = {target: [*known] for target, known in registry.functions.items()}
    return registry


_registration.ONNXRegistry.from_torchlib = staticmethod(_from_torchlib)  # type: ignore[method-assign]

# torch makes a Python object of each of its operators that are made of others, some thirty times an export.
utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
