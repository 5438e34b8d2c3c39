"""Exports small models of other libraries, and judges the files at other sizes beside those of torch's exporters."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from tests.zoo import runner
from tests.zoo.libraries import catalogue, judge, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.libraries", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="LIBRARY/MODEL", help="by default all")
    add("--only", metavar="WORD", help="models whose name contains it")
    add("--jobs", type=int, default=1, help="how many at a time")
    add("--timeout", type=float, default=300, help="seconds of CPU time for each")
    add("--results", type=Path, default=Path("build/libraries.jsonl"), help="what is in it already is not run again")
    add("--effort", choices=["quick", "standard", "exhaustive"], default="standard", help="how much optexport checks")
    add("--again", action="store_true", help="run also what is in the results")
    add("--failed", action="store_true", help="run also what is in the results and is not right")
    add("--no-peers", action="store_true", help="leave torch.onnx and torch.jit.trace out")
    add("--limit", type=int, help="at most so many")
    add("--table", nargs="?", type=Path, const=Path("docs/libraries.md"), help="where to write the table")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    peers = arguments.results.with_suffix(".peers.jsonl")
    models = catalogue.models()
    names = [name for name in arguments.names or runner.spread(list(models)) if (arguments.only or "") in name]
    done = {} if arguments.again else runner.read(arguments.results)
    if arguments.failed:
        done = {name: record for name, record in done.items() if table.is_right(record)}
    ours = functools.partial(judge.judge, effort=arguments.effort)
    _run([name for name in names if name not in done][: arguments.limit], arguments.results, ours, arguments)
    if not arguments.no_peers:  # they do not change with optexport, so that they run once
        done = runner.read(peers)
        _run([name for name in names if name not in done][: arguments.limit], peers, judge.judge_peers, arguments)
    if arguments.table is not None:
        page = table.table(models, runner.read(arguments.results), runner.read(peers))
        arguments.table.write_text(page, encoding="utf-8")


def _run(names: list[str], results: Path, judge: runner.Judge, arguments: argparse.Namespace) -> None:
    preload = "tests.zoo.libraries.warm"
    jobs, timeout = arguments.jobs, arguments.timeout
    runner.run(names, results, jobs=jobs, timeout=timeout, judge=judge, preload=preload, tell=_tell)


def _tell(record: dict[str, Any]) -> None:
    seconds = sum(record["seconds"].values())
    stages = " ".join(f"{name}={outcome}" for name, outcome in record["stages"].items() if outcome != "done")
    reason = next(iter(record["reasons"].values()), "")
    print(
        f"{record['model_type']:40} {seconds:6.1f} s  {stages or 'done'}  {' '.join(reason.split())[:150]}", flush=True
    )


if __name__ == "__main__":
    main()
