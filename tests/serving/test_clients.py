"""The example clients, which do not need optexport, reproduce the original's results."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from optexport.report.result import Result
from tests._helpers import exports
from tests.serving.models import served

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"


def distances(text: str, cases: Sequence[str], result: Result) -> None:
    """Checks a client's output: every case and output is within its limit."""
    rows = re.findall(r"^(.*): (.*) \[(.*)\]: (\S+) from the original$", text, re.MULTILINE)
    outputs = [output.name for output in result.manifest.outputs]
    assert [(case, output) for case, output, _, _ in rows] == list(itertools.product(cases, outputs))
    for case, output, _, distance in rows:
        bound = result.manifest.parity.bounds[output]
        limit = bound.extremes.get(case.rpartition(": ")[2], bound.limit)
        # The limit is for the distance from float64, and the original itself differs from that by the noise floor.
        assert limit is None or float(distance) <= limit + bound.floor, (case, output)


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_onnx_runtime_in_python_gets_the_originals_results() -> None:
    for result in (exports.exported(), served("rows")):
        output = run(sys.executable, EXAMPLES / "onnx_runtime.py", result.output)
        distances(output, result.manifest.reference_cases, result)


def test_client_imports_neither_optexport_nor_torch() -> None:
    script = EXAMPLES / "onnx_runtime.py"
    code = f"import runpy, sys; sys.argv[1:] = [{str(exports.exported().output)!r}]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__'); "
    code += "print(sorted({'optexport', 'torch', 'transformers', 'mlflow'} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_mlflow_client_compares_booleans_too() -> None:
    distance = runpy.run_path(str(EXAMPLES / "client.py"))["distance"]
    flags = np.array([True, False])
    assert distance(np.asarray(json.loads("[true, false]")), flags) == 0
    assert distance(np.asarray(json.loads("[true, true]")), flags) == 1


@pytest.mark.system
def test_onnx_runtime_in_node_gets_the_originals_results(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES, tmp_path / "serving", ignore=shutil.ignore_patterns("node_modules"))
    run("npm", "install", "--prefix", folder, "--ignore-scripts", "--no-audit", "--no-fund")
    for result in (exports.exported(), served("block"), served("rows")):
        output = run("node", folder / "onnx_runtime.mjs", result.output)
        distances(output, result.manifest.reference_cases, result)
