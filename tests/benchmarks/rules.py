"""What each rule is worth: the speed of exported files with it over the same files without it.

    python -m tests.benchmarks.rules [--threads N] [--rounds N] [NAME ...]

Each file runs in a process of its own. The two of a pair take turns, in an order that changes from round to round, and
the table gives the median of the ratio without / with (above 1: the rule makes it faster) and its 95 % interval by
bootstrap over the rounds. Both files of a pair have passed the proof.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import onnxruntime
import torch

from optexport import export, runtimes
from tests.benchmarks.workloads import PAIRS, Pair

FORMATS = ("onnx, optimised", "torchscript")
_LEAST_SECONDS = 0.05  # of one measurement, in which a file runs as often as fits


def _serve(path: Path, file_format: str, place: str, outputs: list[str], threads: int, calls: Connection) -> None:
    """Runs a file as often as asked, and answers with the seconds of one run."""
    torch.set_num_threads(threads)
    if file_format == "onnx":
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        # Threads that spin after a run would take the cores from the other file of the pair.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        def run(batch: dict[str, torch.Tensor]) -> object:
            return session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
    else:
        run = dict(runtimes.open_file(path, file_format, outputs))[place]
    while (asked := calls.recv()) is not None:
        batch, times = asked
        start = time.perf_counter()
        for _ in range(times):
            run(batch)
        calls.send((time.perf_counter() - start) / times)


@contextmanager
def _serving(bundle: Path, place: str, threads: int) -> Iterator[Connection]:
    file_format = place.partition(",")[0]
    path = bundle / {"onnx": "model.onnx", "torchscript": "model.torchscript.pt"}[file_format]
    outputs = [value.name for value in onnxruntime.InferenceSession(bundle / "model.onnx").get_outputs()]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(path, file_format, place, outputs, threads, theirs), daemon=True
    )
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join(10)
        process.kill()


def _measure(calls: Connection, batch: dict[str, torch.Tensor], times: int) -> float:
    calls.send((batch, times))
    return float(calls.recv())


def ratios(without: Connection, with_: Connection, batch: dict[str, torch.Tensor], rounds: int) -> list[float]:
    """Seconds without over seconds with, a number each round."""
    once = max(_measure(calls, batch, 3) for calls in (without, with_) for _ in range(2))  # also warms both up
    times = max(1, round(_LEAST_SECONDS / once))
    found = []
    for turn in range(rounds):
        order = (without, with_) if turn % 2 else (with_, without)
        seconds = {calls: _measure(calls, batch, times) for calls in order}
        found.append(seconds[without] / seconds[with_])
    return found


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def race(pair: Pair, folder: Path, threads: int, rounds: int) -> Iterator[str]:
    """The rows of the table for one pair."""
    model, example = pair.model().eval(), pair.batch(*pair.shapes[0])
    bundles = []
    for part, rules in (("without", pair.without), ("with", pair.with_)):
        bundles.append(folder / part)
        formats = ("onnx", "torchscript")
        export(model, example, bundles[-1], transformations=rules, formats=formats, dynamic=pair.dynamic)
    for place in FORMATS:
        cells = []
        with _serving(bundles[0], place, threads) as without, _serving(bundles[1], place, threads) as with_:
            for shape in pair.shapes:
                values = ratios(without, with_, pair.batch(*shape), rounds)
                low, high = interval(values)
                cells.append(f"{'x'.join(map(str, shape))}: {statistics.median(values):.2f} ({low:.2f} to {high:.2f})")
        yield f"| {pair.name} | {place} | {'; '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only pairs whose name holds one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    print(f"{_machine()}, {arguments.threads} thread(s), {arguments.rounds} rounds, ONNX Runtime "
          f"{onnxruntime.__version__}, torch {torch.__version__}\n")  # fmt: skip
    print("| rule, model | file | without / with, by shape (95 % interval) |\n|---|---|---|")
    for pair in PAIRS:
        if not arguments.names or any(name in pair.name for name in arguments.names):
            with tempfile.TemporaryDirectory() as folder:
                for row in race(pair, Path(folder), arguments.threads, arguments.rounds):
                    print(row, flush=True)


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]} ({len(models)} cores)" if models else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
