"""Provides a ``.pt2`` file to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._helpers.archives import Plain, saved
from tests._helpers.models import randomise


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return saved(randomise(Plain()), tmp_path / "model.pt2")
