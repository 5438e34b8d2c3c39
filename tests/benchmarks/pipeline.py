"""Measures the time of a run, alone and next to a busy process, against a bare export; and of two other commands.

    python -m tests.benchmarks.pipeline [--threads N] [--rounds N] [--config FILE]

The bare export is `OnnxExporter().export(...)` of transformers, with saving. The run exports the config's model in all
formats, with standard parity and MLflow, without tuning and with an empty cache. The second run has the cache of an
equal run. Each is a separate process, including its imports, and they take turns. The table gives medians, and the
median and range of the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from optexport._utils.platform import machine
from tests.benchmarks.parity import EXAMPLE

PROGRAM = "from optexport.__main__ import main; main()"
BARE = """
import importlib.util, pathlib, sys, torch
from transformers import AutoModel
from transformers.exporters import OnnxConfig, OnnxExporter
package, _, folder = sys.argv[2].removeprefix("package:").partition("/")
spec = importlib.util.find_spec(package)
model = AutoModel.from_pretrained(pathlib.Path(next(iter(spec.submodule_search_locations))) / folder).eval()
ids = torch.randint(5, 400, (4, 17))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
exporter = OnnxExporter()
exported = exporter.export(model, inputs, OnnxConfig(dynamic=True))
exporter.save_program(exported.program, pathlib.Path(sys.argv[1]) / "model.onnx")
"""


def seconds(code: str, arguments: Sequence[str], threads: int, cache: str = "") -> tuple[float, float]:
    """Returns the CPU and wall-clock seconds of a successful Python process.

    Args:
        cache: The folder of the cache; by default there is none.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPTEXPORT_CACHE": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have bytecode
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        env=environment,
    )
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keeps one core busy within the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--config", type=Path, default=EXAMPLE, help="a config with a model of transformers")
    arguments = parser.parse_args()
    text = arguments.config.read_text(encoding="utf-8")
    config_values = tomllib.loads(text)
    source, output = config_values["model"]["source"], config_values["export"]["output"]
    times: dict[str, list[tuple[float, float]]] = {
        "bare": [],
        "run": [],
        "second run": [],
        "run next to a busy process": [],
    }
    short: dict[str, list[float]] = {"second run, without imports": [], "--help": [], "check": []}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(arguments.config.parent, folder, dirs_exist_ok=True)
        config = Path(folder) / arguments.config.name
        cache = str(Path(folder) / "cache")
        seconds(PROGRAM, ["run", str(config)], arguments.threads, cache)
        for _ in range(arguments.rounds):
            times["bare"].append(seconds(BARE, [folder, source], arguments.threads))
            times["run"].append(seconds(PROGRAM, ["run", str(config)], arguments.threads))
            second = seconds(PROGRAM, ["run", str(config)], arguments.threads, cache)
            times["second run"].append(second)
            steps = json.loads((Path(folder) / output / "measurements.json").read_text())["seconds"]
            short["second run, without imports"].append(second[1] - steps["import libraries"])
            with busy():
                next_to_it = seconds(PROGRAM, ["run", str(config)], arguments.threads)
            times["run next to a busy process"].append(next_to_it)
            short["--help"].append(seconds(PROGRAM, ["--help"], arguments.threads)[1])
            short["check"].append(seconds(PROGRAM, ["check", str(config)], arguments.threads)[1])
    about = machine()
    print(
        f"{arguments.config.name}: {about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s), "
        f"{arguments.rounds} rounds\n"
    )
    print("| what | CPU seconds | seconds |\n|---|---|---|")
    for name, pairs in times.items():
        cpu, wall = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {cpu:.1f} | {wall:.1f} |")
    for name, values in short.items():
        print(f"| {name} | | {statistics.median(values):.2f} |")
    print(f"| run / bare | {ratio(times, 'run', 'bare', 0)} | {ratio(times, 'run', 'bare', 1)} |")
    parts = [part / bare for part, (_, bare) in zip(short["second run, without imports"], times["bare"], strict=True)]
    print(f"| second run, without imports / bare | | {_describe(parts)} |")
    print(f"| next to a busy process / alone | | {ratio(times, 'run next to a busy process', 'run', 1)} |")


def ratio(times: Mapping[str, Sequence[tuple[float, float]]], name: str, base: str, index: int) -> str:
    """Returns the median and the range of a ratio, of CPU seconds (index 0) or wall-clock seconds (1)."""
    return _describe([own[index] / reference[index] for own, reference in zip(times[name], times[base], strict=True)])


def _describe(ratios: Sequence[float]) -> str:
    """Returns the median and the range of ratios."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
