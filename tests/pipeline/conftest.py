"""What the tests of the pipeline share: a project for each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.projects import write_modules


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with the models and rules of these tests, which are forgotten afterwards."""
    write_modules(tmp_path)
    yield tmp_path
    for name in ("pipeline_models", "wrong_rules"):
        sys.modules.pop(name, None)
