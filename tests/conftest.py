"""What all tests share: no network, one thread, the same random numbers every time, one table of operators."""

from __future__ import annotations

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

from tests import sharing
from tests.tiers import mark_samples

# A shell has its jobs in the background ignore these, and so would all programs that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)
# As the program sets it; and what the imports have made stays, so that no collection looks at it.
gc.set_threshold(20_000, 50, 100)
gc.freeze()
transformers.logging.set_verbosity_error()

_EVERY_PROFILE = hypothesis.settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
# Chosen by --hypothesis-profile; tests.tiers.examples() scales the numbers that tests ask for.
hypothesis.settings.register_profile("quick", _EVERY_PROFILE, max_examples=20)
hypothesis.settings.register_profile("full", _EVERY_PROFILE, max_examples=100)
hypothesis.settings.load_profile("quick")

# torch makes a Python object of each of its operators that are made of others, some thirty times an export.
utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_samples(items)


@pytest.fixture(autouse=True, scope="session")
def _folder_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    sharing.folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
