"""Measures caught faults and false alarms at each multiple of the noise floor.

    python -m tests.faults.measure [--honest N] [--nightly]

Runs every fault that the checks can see, and exports every correct model. Repeats the checks of each target at all
multiples. Prints a Markdown table, and the multiples that each run needs to pass on standard error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from optexport.errors import OptexportError, ParityError
from tests.faults import attention, layers, merging, onnx_files, torch_files  # noqa: F401  # which enter their faults
from tests.faults.catalogue import FAULTS
from tests.faults.honest import run_honestly
from tests.faults.seeding import Passes, prepare, run_with, watched

MULTIPLES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)


def observe(name: str, run: Callable[[Path], object]) -> Passes | None:
    """Returns the multiples at which each target passes, or None if the run failed before a check."""
    start = time.perf_counter()
    with watched(MULTIPLES) as passes, tempfile.TemporaryDirectory() as folder:
        try:
            run(Path(folder) / "bundle")
        except ParityError:
            pass  # the passes hold the result
        except OptexportError as error:
            print(f"{name}: not compared: {error}", file=sys.stderr, flush=True)
            return None
    alarms = [multiple for multiple in MULTIPLES if passes.caught(multiple)]
    outcome = f"caught up to {alarms[-1]:g}" if alarms else "passes at 1"
    print(f"{name}: {outcome} ({time.perf_counter() - start:.1f} s)", file=sys.stderr, flush=True)
    return passes


def table(faults: list[Passes], honest: list[Passes]) -> str:
    """Returns the table as Markdown."""
    rows = [f"| multiple | faults caught, of {len(faults)} | false alarms, of {len(honest)} |", "|---|---|---|"]
    for multiple in MULTIPLES:
        caught, alarms = (sum(passes.caught(multiple) for passes in group) for group in (faults, honest))
        rows.append(f"| {multiple:g} | {caught} | {alarms} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=200, help="how many honest models")
    parser.add_argument("--nightly", action="store_true", help="also the faults in larger models")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start = time.perf_counter()
    shown = [f for f in FAULTS.values() if f.missed is None and (arguments.nightly or not f.nightly)]
    for fault in shown:
        prepare(fault)
    faults = [observe(fault.name, partial(run_with, fault)) for fault in shown]
    honest = [observe(f"honest model {seed}", partial(run_honestly, seed)) for seed in range(arguments.honest)]
    print(table([f for f in faults if f is not None], [h for h in honest if h is not None]))
    print(f"\n{len(FAULTS) - len(shown)} faults are skipped, {time.perf_counter() - start:.0f} seconds.")


if __name__ == "__main__":
    main()
