"""Measures what padding costs in ONNX Runtime: its softmax computes subnormal numbers for masked positions.

    python -m tests.benchmarks.padding [--rounds 8]

MiniLM's file with the format passes of this processor, one thread, 8 texts of 128 tokens: without padding, with half of
the tokens masked, and the latter with `session.set_denormal_as_zero`. That option changes the thread that creates a
session, so each call runs in a process of its own, in turns. The table gives the median time over that without padding,
and its range.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

from optexport._utils.platform import machine, processor_flags
from optexport.exporters import registry
from tests.benchmarks import workloads
from tests.exporters import files

_BATCH, _LENGTH, _CALLS = 8, 128, 15


def seconds(path: str, lengths: list[int], flushes: bool) -> float:
    """Returns the median seconds of a call with texts of some lengths, in a new process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.set_denormal_as_zero", str(int(flushes)))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs = {name: tensor.numpy() for name, tensor in workloads._text(_BATCH, _LENGTH).items()}
    inputs["attention_mask"] = (np.arange(_LENGTH) < np.array(lengths)[:, None]).astype(np.int64)
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        session.run(None, {node.name: inputs[node.name] for node in session.get_inputs()})
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    full = [_LENGTH] * _BATCH
    half = [_LENGTH * (index + 1) // _BATCH - _LENGTH // (2 * _BATCH) for index in range(_BATCH)]
    cases = {"no padding": (full, False), "half masked": (half, False), "half masked, option": (half, True)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        path = Path(folder) / "model.onnx"
        example = workloads._text(4, 17)
        subject = files.prepare(workloads._minilm(), example, workloads._TEXT, rules=True)
        files.save_onnx(subject, path, passes=registry.default_passes("onnx", processor_flags()))
        for _ in range(arguments.rounds):
            for name, (lengths, flushes) in cases.items():
                times[name].append(pool.apply(seconds, (str(path), lengths, flushes)))
    print(f"{json.dumps(machine())}, {arguments.rounds} rounds, ONNX Runtime {onnxruntime.__version__}\n")
    print("| inputs | ms | time / no padding (range) |\n|---|---|---|")
    for name, values in times.items():
        ratios = [own / base for own, base in zip(values, times["no padding"], strict=True)]
        print(
            f"| {name} | {statistics.median(values) * 1e3:.0f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )


if __name__ == "__main__":
    main()
