"""Measures how the time and the peak memory of a run grow with the parameters and with the nodes, per step.

    python -m tests.benchmarks.growth parameters|nodes [--steps N] [--threads N] [--plot FILE.svg] [--folder DIR]

The models are decoders like Llama with random weights. For `parameters`, the width grows and the graph stays the same:
12 million to 2 billion parameters, each size about four times the one before. For `nodes`, the depth grows and the
width stays 32: about 250 to 20,000 nodes, each size about three times the one before. Each model is exported once, in
all formats with quick effort and without MLflow, in a process of its own. CPU time hardly depends on what else runs.
The exponent is the exponent of the growth between the last three sizes (1: linear). Memory is resident memory above
that of the imports (see `memory.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

from optexport._utils.platform import machine
from tests.benchmarks.memory import CONFIG, GIB, IMPORTS, MAKE, PROGRAM, Watch, bytes_of, run

# Hidden size, layers, heads, heads of keys and values, inner size and vocabulary; True if head and embedding are tied.
Size = tuple[int, int, int, int, int, int, bool]
SIZES: dict[str, list[Size]] = {
    "parameters": [(width, 8, 8, 4, 4 * width, 8000, False) for width in (256, 512, 1024, 2048, 4096)],
    "nodes": [(32, layers, 2, 1, 64, 100, False) for layers in (3, 10, 32, 100, 320)],
}
LAST = 3  # sizes whose growth the exponent describes; a step of a small model is mostly overhead


def count(folder: Path, by: str) -> int:
    """Returns the parameters of a saved model in float32, or the nodes after the trace that its bundle states."""
    if by == "parameters":
        return sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors")) // 4
    return int(json.loads((folder / "bundle" / "manifest.json").read_text(encoding="utf-8"))["nodes_before"])


def measure(size: Size, by: str, threads: int, parent: Path | None) -> tuple[int, Watch]:
    """Exports a model; returns its parameters or nodes, and what was sampled."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        run(MAKE.format(size=size, dtype="float32"), str(folder / "model"))
        values = {
            "model": folder / "model",
            "dtype": "float32",
            "formats": json.dumps(["onnx", "torchscript", "pt2"]),
            "output": folder / "bundle",
            "effort": "quick",
            "multiple": 4,
        }
        (folder / "config.toml").write_text(CONFIG.format(**values), encoding="utf-8")
        watch = Watch([PROGRAM, "run", str(folder / "config.toml")], threads)
        return count(folder, by), watch


def exponent(sizes: list[int], values: list[float]) -> str:
    """Returns the exponent of the growth between the last sizes, or "-" if a value is too small to tell."""
    if len(sizes) < LAST or min(values[-LAST:]) < 0.1:
        return "-"
    return f"{math.log(values[-1] / values[-LAST]) / math.log(sizes[-1] / sizes[-LAST]):.2f}"


def plot(path: Path, by: str, sizes: list[int], tables: dict[str, dict[str, list[float]]]) -> None:
    """Plots each table over the sizes, both as logarithms, with a line of linear growth."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(tables), figsize=(12, 5), layout="constrained")
    for axes, (unit, rows) in zip(panels, tables.items(), strict=True):
        for name, values in rows.items():
            axes.loglog(sizes, values, marker=".", label=name, linewidth=2.5 if name == "whole run" else 1)
        last = rows["whole run"][-1]
        axes.loglog(sizes, [last * size / sizes[-1] for size in sizes], "k:", label="linear")
        axes.set(xlabel=by, ylabel=unit)
    panels[0].legend(fontsize="x-small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("by", choices=SIZES)
    parser.add_argument("--steps", type=int, help="only so many sizes, from the smallest")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--folder", type=Path, help="where models and bundles are made for the time")
    arguments = parser.parse_args()
    *_, imported = bytes_of(run(IMPORTS), "RssAnon", "RssFile", "VmHWM")
    measured = [
        measure(size, arguments.by, arguments.threads, arguments.folder)
        for size in SIZES[arguments.by][: arguments.steps]
    ]
    sizes = [size for size, _ in measured]
    steps = list(dict.fromkeys(step for _, watch in measured for step in watch.peaks))
    seconds, memory = {}, {}
    for step in steps:
        peaks = [watch.peaks.get(step, (0.0, 0, 0)) for _, watch in measured]
        seconds[step] = [watch.cpu_seconds.get(step, 0.0) for _, watch in measured]
        memory[step] = [max(sum(peak[1:]) - imported, 0) / GIB for peak in peaks]
    seconds["whole run"] = [sum(values) for values in zip(*seconds.values(), strict=True)]
    memory["whole run"] = [(watch.peak - imported) / GIB for _, watch in measured]
    tables = {"CPU seconds": seconds, "peak memory (GiB)": memory}
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s)")
    for unit, rows in tables.items():
        print(f"\n| {unit} | {' | '.join(f'{size:,}' for size in sizes)} | exponent |")
        print(f"|---|{'---|' * (len(sizes) + 1)}")
        for step, values in rows.items():
            print(f"| {step} | {' | '.join(f'{value:.2f}' for value in values)} | {exponent(sizes, values)} |")
    if arguments.plot is not None:
        plot(arguments.plot, arguments.by, sizes, tables)
        print(f"\n{arguments.plot}")


if __name__ == "__main__":
    main()
