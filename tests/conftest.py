"""What all tests share: no network, one thread, the same random numbers every time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Read when transformers is imported, so it must stand before that.
os.environ["HF_HUB_OFFLINE"] = "1"
# What one test computes in float64 is not kept for another.
os.environ["OPTEXPORT_CACHE"] = ""

import hypothesis
import pytest
import torch
import transformers

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


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
