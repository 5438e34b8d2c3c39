"""Gross faults of targets in lower precision: outputs without a gate, and padding."""

from __future__ import annotations

import torch

from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import Gate
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Reference
from optexport.signature.signature import Batch

_GATE = Gate("cosine", "gated", 0.9)


def _passes(original: dict[str, torch.Tensor], changed: dict[str, torch.Tensor], batch: Batch) -> bool:
    """Checks a lowered target that returns other values for some outputs."""
    exact = {name: value.double() for name, value in original.items()}
    reference = Reference((Case("traced", batch),), (original,), (exact,))
    checker = ParityChecker(reference, measure_tolerances(reference, 4.0), [_GATE])
    target = checker.check("onnx", lambda _: original | changed, precision="int8")
    return target.passed and all(output.passed for output in target.outputs)


def test_output_without_a_gate_must_not_be_another() -> None:
    """It passed with any numbers if the inputs were made up."""
    original = {"gated": torch.randn(4, 6), "cache": torch.randn(4, 6)}
    batch = {"x": torch.ones(4, 6)}
    assert _passes(original, {"cache": original["cache"] * 1.1}, batch)
    assert not _passes(original, {"cache": torch.randn(4, 6)}, batch)


def test_padding_is_left_out_by_its_axes() -> None:
    """A mask of the shape of logits hid a class."""
    original = {"gated": torch.randn(4, 2), "hidden": torch.randn(4, 2, 3), "logits": torch.randn(4, 2)}
    batch = {"attention_mask": torch.tensor([[1, 0]] * 4)}
    padded = original["hidden"].clone()
    padded[:, 1] = 999
    assert _passes(original, {"hidden": padded}, batch)
    logits = original["logits"].clone()
    logits[:, 1] = 999
    assert not _passes(original, {"logits": logits}, batch)
