"""Texts of errors: message, location, details and hint, and the label of each line on a terminal."""

from __future__ import annotations

import pytest
import torch

from optexport.bundle.parity_records import ParityRecord
from optexport.errors import (
    BundleError,
    ConfigError,
    GateError,
    OptexportError,
    ParityError,
    did_you_mean,
    first_line,
    unreadable,
)

PARITY = ParityRecord(cases=[], bounds={}, ways=[], fallback=None, unguided=[], left_out=[], gates=[], targets=[])


def test_parts_of_an_error_have_a_fixed_order() -> None:
    error = ConfigError("unknown key", location="my.toml", hint="Remove it.\nOr rename it.", details="first\nsecond")
    text = "my.toml: unknown key\n  first\n  second\nHint: Remove it.\n      Or rename it."
    assert (str(error), error.labelled) == (text, f"Error: {text}")


@pytest.mark.parametrize("kind", [ParityError, GateError])
def test_failed_check_has_a_label_for_each_failure(kind: type[OptexportError]) -> None:
    message = "onnx: hidden is off by 4.3e-03\nonnx: longest is off by 1.0e-02"
    error = kind(message, details="The graph passes.", hint="Run again.", parity=PARITY)
    assert str(error) == f"{message}\n  The graph passes.\nHint: Run again."
    assert error.labelled == (
        "FAILED  onnx: hidden is off by 4.3e-03\nFAILED  onnx: longest is off by 1.0e-02\n"
        "  The graph passes.\nHint: Run again."
    )


@pytest.mark.parametrize("kind", [ParityError, GateError])
def test_error_before_any_comparison_is_not_a_failed_check(kind: type[OptexportError]) -> None:
    assert kind("the output is empty", location="output x").labelled == "Error: output x: the output is empty"


def test_location_of_a_failed_check_is_on_its_first_line() -> None:
    error = GateError("the exported files miss the gates", location="[gate]", details="onnx: 12 MB", parity=PARITY)
    assert error.labelled == "FAILED  [gate]: the exported files miss the gates\n  onnx: 12 MB"


def test_details_contain_no_secrets() -> None:
    error = ConfigError("cannot log in", details="https://user:password@host/")
    assert "password" not in str(error)
    assert "https://***@host/" in str(error)


def test_details_that_are_added_later_are_printed() -> None:
    error = ConfigError("the run failed", hint="Run again.")
    error.details = "The earlier bundle is unchanged."
    assert str(error) == "the run failed\n  The earlier bundle is unchanged.\nHint: Run again."


def test_first_weight_that_does_not_fit_is_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(2, 4).state_dict())
    assert first_line(caught.value).startswith(
        "Error(s) in loading state_dict for Linear: size mismatch for weight: copying a param with shape"
    )


def test_similar_word_is_suggested_and_otherwise_all() -> None:
    assert did_you_mean("hihg", ["high", "low"]) == 'Did you mean "high"?'
    assert did_you_mean("zzz", ["high", "low"]) == "Choose one of: high, low."
    assert did_you_mean("zzz", []) == "There is no name to choose from."


def test_missing_permission_is_a_config_error() -> None:
    assert isinstance(unreadable(PermissionError(13, "denied"), "a"), ConfigError)
    assert isinstance(unreadable(ValueError("no JSON"), "a"), BundleError)
