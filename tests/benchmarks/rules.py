"""Measures each rule: the speed of exported files with it over the same files without it.

    python -m tests.benchmarks.rules [--threads N] [--rounds N] [NAME ...]

The files are measured like in `optexport bench`. The table gives the median of the ratio without / with (above 1: the
rule makes the file faster) and its 95 % interval. Both files of a pair have passed verification.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
import torch
from safetensors.torch import save_file

from optexport import export
from optexport._utils.platform import machine
from optexport.bench.artifact import open_artifacts
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from tests.benchmarks.workloads import PAIRS, Pair

FORMATS = ("onnx", "torchscript")


def race(pair: Pair, folder: Path, settings: Settings) -> Iterator[str]:
    """Returns the rows of the table for one pair."""
    model, example = pair.model().eval(), pair.batch(*pair.shapes[0])
    sides = []
    for part, rules in (("without", pair.without), ("with", pair.with_)):
        export(model, example, folder / part, transformations=rules, formats=FORMATS, dynamic=pair.dynamic)
        sides.append({artifact.format: artifact for artifact in open_artifacts(folder / part).artifacts})
    without, with_ = sides
    workloads = []
    for shape in pair.shapes:
        label = "x".join(map(str, shape))
        save_file(pair.batch(*shape), folder / f"{label}.safetensors")
        workloads.append(
            Workload({label: shape[0]}, shape[0], folder / f"{label}.safetensors", shape == pair.shapes[0])
        )
    for name in FORMATS:
        report = measure([with_[name], without[name]], workloads, [(with_[name], without[name])], settings)
        cells = []
        for compared in report.comparisons:
            c = compared.comparison
            cells.append(f"{', '.join(compared.workload.sizes)}: {c.speedup:.2f} ({c.low:.2f} to {c.high:.2f})")
        yield f"| {pair.name} | {name} | {'; '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only pairs whose name holds one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s), {arguments.rounds} rounds, "
          f"ONNX Runtime {onnxruntime.__version__}, torch {torch.__version__}\n")  # fmt: skip
    print("| rule, model | file | without / with, by shape (95 % interval) |\n|---|---|---|")
    for pair in PAIRS:
        if not arguments.names or any(name in pair.name for name in arguments.names):
            with tempfile.TemporaryDirectory() as folder:
                for row in race(pair, Path(folder), Settings(arguments.threads, arguments.rounds)):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
