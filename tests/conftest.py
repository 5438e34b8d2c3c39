"""Common setup of all tests: no network, one thread, fixed random numbers, one table of operators."""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator

# transformers reads this on import.
os.environ["HF_HUB_OFFLINE"] = "1"
# Float64 results of one test must not be reused in another.
os.environ["OPTEXPORT_CACHE"] = ""

import hypothesis
import pytest
import torch
import transformers
from torch._export import utils

from optexport.pipeline import gain
from tests import sharing
from tests.tiers import mark_samples, start_elsewhere

# A shell makes its background jobs ignore these signals, and the programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# CI has to end in time on any machine: tests that have not started by then are skipped. Each commit starts with another
# file, so that all tests run sooner or later.
_SECONDS = 60 * float(os.environ.get("TEST_MINUTES", "inf"))
_STARTED = time.monotonic()

torch.set_num_threads(1)
# The files of a run are not timed; tests/pipeline/test_gain.py restores the limit.
gain.SECONDS = 0.0
# optexport.cli.main sets the same; frozen objects of the imports are skipped by every collection.
gc.set_threshold(20_000, 50, 100)
gc.freeze()
transformers.logging.set_verbosity_error()

_EVERY_PROFILE = hypothesis.settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
# Selected by --hypothesis-profile; tests.tiers.examples() scales the numbers that tests ask for.
hypothesis.settings.register_profile("quick", _EVERY_PROFILE, max_examples=20)
hypothesis.settings.register_profile("full", _EVERY_PROFILE, max_examples=100)
hypothesis.settings.load_profile("quick")

# torch creates a Python object for each of its composite operators, some thirty times per export.
utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)  # type: ignore[assignment]


@pytest.hookimpl(tryfirst=True)  # before pytest reads -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_samples(items)
    if not math.isinf(_SECONDS):
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        start_elsewhere(items, git.stdout)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.monotonic() - _STARTED > _SECONDS:
        pytest.skip("TEST_MINUTES are over")


@pytest.fixture(autouse=True, scope="session")
def _folder_of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    sharing.folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(autouse=True)
def _no_store_of_another_test() -> None:
    os.environ.pop("MLFLOW_TRACKING_URI", None)  # mlflow sets it when a test names a store


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
