"""Checks the laws of transformations and of formats, for the tests of packages that add one.

`optexport.testing.rules` has those of transformations: outputs, second application, undo, no side effects.
`check_format` lists those of formats.
"""

from optexport.testing.formats import FormatModel, check_format, format_models
from optexport.testing.rules import (
    Inputs,
    assert_close,
    assert_same,
    check_applied,
    check_laws,
    check_refused,
    check_undo_alone,
    copy_sharing_modules,
    graph_state,
    model_state,
    outputs,
)

__all__ = [
    "FormatModel",
    "Inputs",
    "assert_close",
    "assert_same",
    "check_applied",
    "check_format",
    "check_laws",
    "check_refused",
    "check_undo_alone",
    "copy_sharing_modules",
    "format_models",
    "graph_state",
    "model_state",
    "outputs",
]
