"""Opens an ONNX file in a separate process, because ONNX Runtime may crash.

ONNX Runtime 1.31 crashes with a segmentation fault when it opens a float16 model with an embedding before a
bidirectional LSTM. A crashed process can neither report the error nor remove the draft.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from optexport.errors import ExportError

_CRASHING_OPERATORS = frozenset({"LSTM", "GRU", "RNN"})
# Exceptions are ignored here, because the parity check opens the file again and reports them.
_SCRIPT = """
import contextlib, sys
import onnxruntime
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    with contextlib.suppress(Exception):
        onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""


def check_no_crash(path: Path, operators: Iterable[str]) -> None:
    """Checks that ONNX Runtime does not crash when it opens a file.

    Files without risky operators are not opened, to save time.

    Args:
        operators: Types of the file's nodes.

    Raises:
        ExportError: ONNX Runtime crashes.
    """
    if _CRASHING_OPERATORS.isdisjoint(operators):
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _SCRIPT, str(path)],  # -P: no imports from the current folder
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only this process, which ends the child
    )
    try:
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code < 0:
        raise ExportError(
            f"ONNX Runtime crashed when it opened the file ({signal.Signals(-code).name}, signal {-code})",
            location=path.name,
            hint='Try another model.dtype, or leave "onnx" out of export.formats.',
        )
