"""Measures ONNX Runtime's session options on files that need no optimization at load time.

    python -m tests.benchmarks.session_options [MODEL...] [--rounds N]

Each option's session runs the same file in the same process, in turns with a session without options, on one thread.
The table gives the median ratio of CPU times, without / with the option (above 1: it makes the file faster). The row
"none, again" is a second session without options. It shows the variation between two equal sessions.

`session.set_denormal_as_zero` is left out: it changes the whole thread that creates a session, so it would apply to
every session here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import onnxruntime

from optexport._utils.platform import machine
from optexport.exporters import registry
from tests.benchmarks.models import RACERS
from tests.benchmarks.workloads import _TEXT
from tests.exporters import files

_LEVELS = onnxruntime.GraphOptimizationLevel
_Change = Callable[[onnxruntime.SessionOptions], object]
OPTIONS: Mapping[str, _Change] = {
    "none": lambda options: None,
    "none, again": lambda options: None,
    "graph optimizations: basic": lambda o: setattr(o, "graph_optimization_level", _LEVELS.ORT_ENABLE_BASIC),
    "graph optimizations: extended": lambda o: setattr(o, "graph_optimization_level", _LEVELS.ORT_ENABLE_EXTENDED),
    "enable_mem_pattern = False": lambda o: setattr(o, "enable_mem_pattern", False),
    "enable_cpu_mem_arena = False": lambda o: setattr(o, "enable_cpu_mem_arena", False),
    "session.disable_prepacking": lambda o: o.add_session_config_entry("session.disable_prepacking", "1"),
}
_LOWERED = [name for name in registry.list_passes("onnx") if name in ("attention", "sum-residuals")]


def seconds(path: Path, inputs: Mapping[str, object], rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each option's runs, without the warm-up runs."""
    sessions = {}
    for name, change in OPTIONS.items():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        change(options)
        sessions[name] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(rounds + 2):
        for name, session in sessions.items():
            start = time.process_time()
            session.run(None, inputs)
            if turn >= 2:
                times[name].append(time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["MiniLM", "MobileNetV2"], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    print(f"{machine()}, {arguments.rounds} rounds, ONNX Runtime {onnxruntime.__version__}\n")
    print(f"| option | {' | '.join(arguments.models)} |\n|---|{'---|' * len(arguments.models)}")
    cells: dict[str, list[str]] = {name: [] for name in OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            racer = RACERS[model]
            example = racer.inputs((4, 17) if racer.kind == "text" else (2,))
            dims = next(iter(_TEXT.values()))
            axes = dims if racer.kind == "text" else {0: dims[0]}
            path = Path(folder) / f"{model}.onnx"
            subject = files.prepare(racer.load(), example, dict.fromkeys(example, axes), rules=True)
            files.save_onnx(subject, path, passes=_LOWERED)
            ratios: dict[str, list[str]] = {name: [] for name in OPTIONS}
            for shape in racer.shapes:
                inputs = {name: tensor.numpy() for name, tensor in racer.inputs(shape).items()}
                times = seconds(path, inputs, arguments.rounds)
                for name in OPTIONS:
                    pairs = zip(times["none"], times[name], strict=True)
                    ratio = statistics.median(base / own for base, own in pairs)
                    ratios[name].append(f"{'x'.join(map(str, shape))}: {ratio:.2f}")
            for name, cell in ratios.items():
                cells[name].append("; ".join(cell))
    for name, row in list(cells.items())[1:]:
        print(f"| {name} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
