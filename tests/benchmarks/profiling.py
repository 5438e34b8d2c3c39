"""Shows the time of each operator in an ONNX file, from ONNX Runtime's profiler.

    python -m tests.benchmarks.profiling FILE.onnx... [--shape batch=1,sequence=128] [--threads 1] [--runs 30]

Without a file, MiniLM is exported without rules, once plainly and once with the format pass `sum-residuals`. Times are
means over the runs. Times per element are over all elements that an operator returns.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import onnxruntime
from safetensors.numpy import load_file

from optexport._utils.platform import machine
from optexport.bench.artifact import open_artifacts
from optexport.bench.workload import from_onnx
from tests.benchmarks import workloads
from tests.exporters import files


def profile(path: Path, sizes: dict[str, int], threads: int, runs: int, folder: Path) -> dict[str, list[float]]:
    """Returns the microseconds, calls and elements of one run, by operator."""
    (artifact,) = open_artifacts(path).artifacts
    (workload,), _ = from_onnx(artifact, [sizes], folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = load_file(workload.file)
    for _ in range(runs):
        session.run(None, {node.name: inputs[node.name] for node in session.get_inputs()})
    events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            row = operators[event["args"]["op_name"]]
            shapes = [shape for entry in event["args"]["output_type_shape"][:1] for shape in entry.values()]
            row[0] += event["dur"] / runs
            row[1] += 1 / runs
            row[2] += sum(math.prod(shape) for shape in shapes) / runs
    return operators


def report(path: Path, operators: dict[str, list[float]]) -> None:
    total = sum(row[0] for row in operators.values())
    print(f"{path.name}: {total / 1e3:.2f} ms in kernels\n")
    print("| operator | calls | ms | share | ns an element |\n|---|---|---|---|---|")
    for name, (spent, calls, elements) in sorted(operators.items(), key=lambda item: -item[1][0])[:12]:
        nanoseconds = f"{1e3 * spent / elements:.2f}" if elements else ""
        print(f"| {name} | {calls:.0f} | {spent / 1e3:.3f} | {100 * spent / total:.1f} % | {nanoseconds} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.onnx")
    parser.add_argument("--shape", default="batch=1,sequence=128")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in arguments.shape.split(","))}
    print(f"{machine()['processor']}, {arguments.threads} thread(s), {arguments.shape}\n")
    with tempfile.TemporaryDirectory() as place:
        paths = arguments.files
        if not paths:
            subject = files.prepare(workloads._minilm(), workloads._text(2, 17), workloads._TEXT)
            paths = [Path(place) / "plain.onnx", Path(place) / "sum-residuals.onnx"]
            for path, passes in zip(paths, ((), ("sum-residuals",)), strict=True):
                files.save_onnx(subject, path, passes=passes)
        for path in paths:
            report(path, profile(path, sizes, arguments.threads, arguments.runs, Path(place)))


if __name__ == "__main__":
    main()
