"""The environment variable that forbids custom code."""

from __future__ import annotations

import os

# Any value except 0 applies to the whole process, its children, and calls from Python.
VARIABLE = "OPTEXPORT_NO_CUSTOM_CODE"


def is_forbidden() -> bool:
    """Returns True if the environment forbids code that is not of optexport."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
