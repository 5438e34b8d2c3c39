"""The error of a failed check, even if the diagnosis itself fails."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from torch import fx

from optexport.errors import ParityError
from optexport.transformations import Transformation
from tests._helpers import exports
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


def test_tolerance_below_the_noise_floor_is_named_before_a_rule(tmp_path: Path) -> None:
    with pytest.raises(ParityError) as caught:
        exports.quick(exports.block(), exports.batch(), tmp_path / "block", formats=["onnx"], atol=1e-12)
    text, hint = str(caught.value), str(caught.value.hint)
    found = re.search(r"The tolerance of hidden is below its noise floor of (\S+), by which the original itself", text)
    assert found is not None
    assert found.start() < text.find("The rule") or "The rule" not in text
    atol = re.search(r"Set parity.atol to at least (\S+), or remove parity.atol and parity.rtol", hint)
    assert atol is not None
    assert float(atol[1]) == pytest.approx(4 * float(found[1]), rel=0.05)
    result = exports.quick(exports.block(), exports.batch(), tmp_path / "block", formats=["onnx"], atol=float(atol[1]))
    assert result.passed
