"""Times tuned TorchScript files and torch's own compilers on the same models.

    python -m tests.benchmarks.compiled [MODEL...] [--folder FOLDER] [--launches 3] [--rounds 4] [--threads 1]

Packages of AOTInductor and models of `torch.compile` do not run everywhere that TorchScript runs, so they are not peers
of a format. They are alternatives for a program that has torch. The tuned files come from `peer_turns.py` in the
same folder. Each launch is a separate process, in which all three take turns on inputs without padding. Ratios are
their time over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from optexport._utils.platform import machine
from optexport.bench.comparison import compare
from tests.benchmarks.models import RACERS, Racer
from tests.benchmarks.turns import in_turns

_OURS, _PACKAGE, _COMPILED = "optexport", "AOTInductor", "torch.compile"

Times = dict[str, dict[str, list[float]]]


def measured(name: str, folder: Path, rounds: int, threads: int) -> Times:
    """Returns the median seconds of a call, by shape and callable; each list has one number per round."""
    torch.set_num_threads(threads)
    racer = RACERS[name]
    model = racer.load()
    file = torch.jit.load(json.loads((folder / "ours.json").read_text())["torchscript"]["path"])
    with torch.no_grad():
        package = torch._inductor.aoti_load_package(_packed(racer, model, folder))
        calls: dict[str, Callable[..., Any]] = {_OURS: file, _PACKAGE: package, _COMPILED: torch.compile(model)}
        times: Times = {}
        for shape in racer.shapes:
            inputs = racer.inputs(shape)
            calls_on_inputs = {key: partial(call, **inputs) for key, call in calls.items()}
            times["x".join(map(str, shape))] = in_turns(calls_on_inputs, rounds)
    return times


def _packed(racer: Racer, model: torch.nn.Module, folder: Path) -> str:
    """Returns the AOTInductor package of a model, with the same dynamic sizes; cached in the folder."""
    path = folder / "aoti.pt2"
    if not path.exists():
        inputs = racer.inputs((4, 17) if racer.kind == "text" else (2,))
        axes = dict.fromkeys(range(2 if racer.kind == "text" else 1), torch.export.Dim.AUTO)
        program = torch.export.export(model, (), inputs, dynamic_shapes=dict.fromkeys(inputs, axes))
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return str(path)


def rows(name: str, launches: list[Times]) -> list[str]:
    """Returns the rows of the table for one model."""
    lines = []
    for shape in launches[0]:
        own = [launch[shape][_OURS] for launch in launches]
        cells = []
        for peer in (_PACKAGE, _COMPILED):
            c = compare([launch[shape][peer] for launch in launches], own)
            cells.append(f"{c.speedup:.2f} ({c.low:.2f} to {c.high:.2f})")
        milliseconds = statistics.median(time for launch in own for time in launch) * 1e3
        lines.append(f"| {name} | {shape} | {milliseconds:.1f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(RACERS), metavar="MODEL", help=", ".join(RACERS))
    parser.add_argument(
        "--folder", type=Path, default=Path("build/race"), help="folder of peer_turns.py, which must run first"
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--launch", action="store_true", help="measure one model, in this process, and print JSON")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.launch:
        (name,) = arguments.models
        print(json.dumps(measured(name, folder / name, arguments.rounds, arguments.threads)))
        return
    paths = os.pathsep.join([str(folder / "packages"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(arguments.threads)}
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s)\n")
    print(f"| model | shape | ms | {_PACKAGE} / ours | {_COMPILED} / ours |\n|---|---|---|---|---|")
    options = [f"--{key}={getattr(arguments, key)}" for key in ("folder", "rounds", "threads")]
    for name in arguments.models:
        command = [sys.executable, "-m", "tests.benchmarks.compiled", name, "--launch", *options]
        launches = []
        for _ in range(arguments.launches):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            launches.append(json.loads(done.stdout.splitlines()[-1]))
        print("\n".join(rows(name, launches)), flush=True)


if __name__ == "__main__":
    main()
