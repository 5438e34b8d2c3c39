"""The table ``[export.onnx]``: the execution providers that will run the ONNX file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from optexport.config.validation import InvalidValueError, Table, show_value
from optexport.runtime.providers import FORBIDDEN_PROVIDER


def _check_name(name: str) -> str:
    if not re.fullmatch("[A-Za-z0-9]+ExecutionProvider", name):
        raise InvalidValueError(
            f"{show_value(name)} is not the name of an execution provider",
            'Write a name such as "OpenVINOExecutionProvider".',
        )
    if name == FORBIDDEN_PROVIDER:
        raise InvalidValueError(f"{name} sends inputs to a server", "Remove it.")
    return name


class OnnxConfig(Table):
    """``[export.onnx]``: where the ONNX file will run.

    Attributes:
        providers: The execution providers of ONNX Runtime, the preferred one first, such as
            ``["OpenVINOExecutionProvider"]``. Checks and benchmarks run in them, and the file records them. By default,
            those of ``model.device``.
    """

    providers: list[Annotated[str, AfterValidator(_check_name)]] = []
