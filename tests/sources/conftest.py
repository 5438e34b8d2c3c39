"""A ``.pt2`` file to alter, and silence about those that torch cannot read."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models import randomise
from tests.sources.altered_archives import Plain, saved


@pytest.fixture
def quiet() -> Iterator[None]:
    """torch logs a traceback for each archive that it cannot read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return saved(randomise(Plain()), tmp_path / "model.pt2")
