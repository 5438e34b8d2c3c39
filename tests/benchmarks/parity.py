"""Measures the checks of a run: their seconds over the seconds of the ONNX export.

    python -m tests.benchmarks.parity [--threads N] [--rounds N]

Each run is a separate process, on MiniLM with every format and without MLflow; all its steps are in that process. The
settings take turns. The table gives the median and the range of the ratio (below 1, the checks are cheaper).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.memory import PROGRAM

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm.toml"
# The steps of a run that check something.
CHECKS = ("reference", "other sizes", "check graph", "check torchscript", "check onnx", "check pt2", "undo")


def run(folder: Path, effort: str, threads: int, *, is_cached: bool) -> dict[str, float]:
    """Runs the example and returns the seconds of its steps.

    Args:
        is_cached: True if float64 results of an earlier run may be reused.
    """
    text = EXAMPLE.read_text(encoding="utf-8").partition("[tracking]")[0]
    text = text.replace("build/minilm", str(folder / "bundle"))
    (folder / "config.toml").write_text(
        f'{text}\n[parity]\neffort = "{effort}"\n[tracking]\nenabled = false\n', encoding="utf-8"
    )
    shutil.rmtree(folder / "bundle", ignore_errors=True)  # an equal run would reuse all of it
    subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", str(folder / "config.toml")],
        check=True,
        capture_output=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "OPTEXPORT_CACHE": str(folder / "cache") if is_cached else "",
        },
    )
    seconds: dict[str, float] = json.loads((folder / "bundle" / "measurements.json").read_bytes())["seconds"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    ways = {"standard": ("standard", False), "standard, again": ("standard", True), "quick": ("quick", False)}
    seconds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), "standard", arguments.threads, is_cached=True)  # fills the cache
        for _ in range(arguments.rounds):
            for way, (effort, is_cached) in ways.items():
                seconds[way].append(run(Path(folder), effort, arguments.threads, is_cached=is_cached))
    print(f"{arguments.threads} thread(s), {arguments.rounds} rounds\n")
    print("| effort | checks, s | ONNX export, s | checks / export (range) |\n|---|---|---|---|")
    for way, runs in seconds.items():
        checks = [sum(seconds.get(step, 0.0) for step in CHECKS) for seconds in runs]
        export = [seconds["export onnx"] for seconds in runs]
        ratios = [a / b for a, b in zip(checks, export, strict=True)]
        middle = [f"{statistics.median(values):.2f}" for values in (checks, export, ratios)]
        print(f"| {way} | {middle[0]} | {middle[1]} | {middle[2]} ({min(ratios):.2f} to {max(ratios):.2f}) |")


if __name__ == "__main__":
    main()
