"""The error of a failed check, even if the diagnosis itself fails."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from torch import fx

from optexport.transformations import Transformation
from tests.diagnosis.failures import Spoil, failing


class Once(Transformation):
    """Changes the outputs, and raises when it is applied again."""

    preserves_computation = True
    calls = itertools.count()

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        if next(self.calls):
            raise LookupError("only once")
        return Spoil().transform(graph_module)


@pytest.mark.slow
def test_error_during_diagnosis_does_not_hide_the_failure(tmp_path: Path) -> None:
    text = failing(tmp_path / "block", Once())
    assert "graph: hidden is off by " in text
    assert re.search(r"\n  The diagnosis failed: .*:Once: .*LookupError: only once( \(at .*)?\.\n", text)
    assert (tmp_path / "block-failure" / "parity.json").is_file()
