"""Provides a project for each test of the pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.projects import write_modules


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder with the models and rules of these tests, and unloads them after the test."""
    write_modules(tmp_path)
    yield tmp_path
    for name in ("pipeline_models", "wrong_rules"):
        sys.modules.pop(name, None)
