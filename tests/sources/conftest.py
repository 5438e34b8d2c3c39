"""A ``.pt2`` file to alter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import randomise
from tests.sources.altered_archives import Plain, saved


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return saved(randomise(Plain()), tmp_path / "model.pt2")
