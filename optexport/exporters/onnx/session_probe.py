"""Opens an ONNX file in a process of its own, where ONNX Runtime is known to crash rather than to raise.

For a float16 model with an embedding before a bidirectional LSTM, ONNX Runtime 1.31 ends its process by a segmentation
fault as it opens the file. Nothing can be told, nor a draft be removed, by a process that is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from optexport.errors import ExportError

_RISKY = frozenset({"LSTM", "GRU", "RNN"})
# What is refused with an exception is refused again where the file is opened to be proven, and told there.
_OPEN = """
import contextlib, sys
import onnxruntime
for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    with contextlib.suppress(Exception):
        onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""


def check_opens(path: Path, operators: Iterable[str]) -> None:
    """Checks that ONNX Runtime does not crash as it opens a file; only a file with risky operators, to save time.

    Args:
        operators: The types of the file's nodes.

    Raises:
        ExportError: It does.
    """
    if _RISKY.isdisjoint(operators):
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _OPEN, str(path)],  # nothing is imported from where we are called
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # an interrupt from the terminal comes to us alone, and we end it
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
