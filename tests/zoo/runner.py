"""Runs many model types, each in a process with a limit of CPU time, and stores the results as JSON lines.

The limit is CPU time, so that other work on the machine makes no model type fail.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.zoo import stages

Judge = Callable[[str, stages.Announce], stages.Outcome]

# Children are forked from a process with all imports, because importing takes longer than many models.
_CONTEXT = multiprocessing.get_context("forkserver")
# A deadlocked process spends no CPU time, so this many times the limit is the limit of wall-clock time.
_PATIENCE = 20


@dataclass
class _Running:
    model_type: str
    process: BaseProcess
    answer: Connection
    since: float
    last: dict[str, Any] | None = None


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Returns the results by model type, the last one of each. A truncated line is skipped."""
    records: dict[str, dict[str, Any]] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the runner was killed while it wrote
            continue
        records[record["model_type"]] = record
    return records


def spread(model_types: Sequence[str]) -> list[str]:
    """Returns the types in an order that mixes families and initials, so that its beginning is a fair sample."""
    return sorted(model_types, key=lambda name: zlib.crc32(name.encode()))


def run(
    model_types: Sequence[str],
    results: Path,
    *,
    jobs: int,
    timeout: float,
    judge: Judge = stages.judge,
    preload: str = "tests.zoo.child",
) -> None:
    """Runs model types through the pipeline and appends their results to a file.

    Args:
        jobs: Number of parallel processes.
        timeout: Limit of CPU time in seconds for each type.
        judge: Judges a type; a function of a module.
        preload: Module whose imports all processes share.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "OPTEXPORT_CACHE": "", "OMP_NUM_THREADS": "1"}
    _CONTEXT.set_forkserver_preload([preload])
    waiting, running = list(reversed(model_types)), list[_Running]()
    with results.open("a", encoding="utf-8") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(), judge))
            multiprocessing.connection.wait([model_type.process.sentinel for model_type in running], timeout=1)
            for model_type in list(running):
                record = _result(model_type, timeout)
                if record is not None:
                    running.remove(model_type)
                    file.write(json.dumps(record, sort_keys=True) + "\n")
                    file.flush()
                    _show(record)


def _show(record: dict[str, Any]) -> None:
    seconds = sum(record["seconds"].values())
    stages = " ".join(f"{name}={outcome}" for name, outcome in record["stages"].items() if outcome != "done")
    reason = " ".join(next(iter(record["reasons"].values()), "").split())[:150]
    print(f"{record['model_type']:40} {seconds:6.1f} s  {stages or 'done'}  {reason}", flush=True)


def _start(model_type: str, judge: Judge) -> _Running:
    from tests.zoo import child

    answer, end = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=child.main, args=(model_type, end, judge))
    process.start()
    end.close()
    return _Running(model_type, process, answer, time.monotonic())


def _result(running: _Running, timeout: float) -> dict[str, Any] | None:
    """Returns the result of a model type, or None while it runs."""
    while running.answer.poll():
        try:
            running.last = running.answer.recv()
        except EOFError:
            break
    last = running.last
    if running.process.is_alive():
        elapsed = time.monotonic() - running.since
        if elapsed < timeout or (elapsed < _PATIENCE * timeout and _cpu_seconds(running.process) < timeout):
            return None
        running.process.kill()
        running.process.join()
        return _cut_short(running.model_type, last, "timeout", f"still at work after {timeout:g} s")
    running.process.join()
    if running.process.exitcode == 0 and last is not None and last.get("finished"):
        return last
    return _cut_short(running.model_type, last, "crash", f"the process ended with {running.process.exitcode}")


def _cpu_seconds(process: BaseProcess) -> float:
    """Returns the CPU seconds of a process and its finished children."""
    try:
        return sum(psutil.Process(process.pid).cpu_times()[:4])
    except psutil.NoSuchProcess:  # the process has just ended
        return 0.0


def _cut_short(model_type: str, last: dict[str, Any] | None, how: str, reason: str) -> dict[str, Any]:
    record = last or {"model_type": model_type, "stages": {}, "reasons": {}, "seconds": {}}
    stage = record.pop("at", "built")
    record["stages"][stage] = how
    record["reasons"][stage] = reason
    return record
