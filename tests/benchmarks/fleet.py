"""Measures a batch of many small models: seconds of each by quarter, and the memory of the parent process.

``python -m tests.benchmarks.fleet --models 500 --jobs 2`` runs small models in one batch, each in a separate process,
and prints a table by quarter. Ten of them crash, hang or fill the memory. The cost is flat if the last quarter costs as
much as the first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import click
import psutil

from tests.batch import fleets

_BAD = ("crashes", "hangs", "eats")


@click.command()
@click.option("--models", default=500, show_default=True)
@click.option("--bad", default=10, show_default=True, help="How many crash, hang or eat memory.")
@click.option("--jobs", default=2, show_default=True)
def main(models: int, bad: int, jobs: int) -> None:
    """Runs the batch in a temporary folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for index in range(models):
            is_bad = index % (models // bad) == models // bad // 2 if bad else False
            fleets.config(folder, f"model_{index:04}", _BAD[index % len(_BAD)] if is_bad else "good")
        command = [sys.executable, "-m", "optexport", "batch", "*.toml", "--jobs", str(jobs), "--timeout", "30s"]
        command += ["--memory", "2", "--retries", "0", "--json"]
        start = time.monotonic()
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            resident: list[tuple[float, int]] = []
            watcher = threading.Thread(target=_watch, args=(process.pid, resident), daemon=True)
            watcher.start()
            document = json.loads(process.communicate()[0])
        seconds = time.monotonic() - start
    rows = document["configs"]
    good = [row for row in rows if row["exit_code"] == 0]
    click.echo(f"{len(good)} of {len(rows)} verified in {seconds:.0f} s, {jobs} at a time; the others: ")
    for row in rows:
        if row["exit_code"]:
            click.echo(f"  {row['config']}: {row['error'].splitlines()[0]}")
    click.echo(
        "| quarter | seconds of a model (median) | its peak memory, MiB (median) | the batch itself, MiB (largest) |"
    )
    click.echo("|---|---:|---:|---:|")
    for quarter in range(4):
        part = good[quarter * len(good) // 4 : (quarter + 1) * len(good) // 4]
        took = statistics.median(row["seconds"] for row in part)
        peak = statistics.median(row["peak_memory"] for row in part) / 2**20
        began, ended = seconds * quarter / 4, seconds * (quarter + 1) / 4
        itself = max((used for at, used in resident if began <= at < ended), default=0) / 2**20
        click.echo(f"| {quarter + 1} | {took:.1f} | {peak:.0f} | {itself:.0f} |")


def _watch(pid: int, resident: list[tuple[float, int]]) -> None:
    """Records the memory of the batch's parent process in bytes, every second."""
    start = time.monotonic()
    try:
        process = psutil.Process(pid)
        while process.is_running():
            resident.append((time.monotonic() - start, process.memory_info().rss))
            time.sleep(1)
    except psutil.NoSuchProcess:
        pass


if __name__ == "__main__":
    main()
