"""Exports small models of other libraries, and checks the files at other sizes.

Torch's own exporters run on the models that are not right.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

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
    add("--table", nargs="?", type=Path, const=Path("docs/explanation/libraries.md"), help="where to write the table")
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
    if not arguments.no_peers:
        results, done = runner.read(arguments.results), runner.read(peers)
        failed = [name for name in names if name in results and not table.is_right(results[name])]
        _run([name for name in failed if name not in done][: arguments.limit], peers, judge.judge_peers, arguments)
    if arguments.table is not None:
        page = table.table(models, runner.read(arguments.results), runner.read(peers))
        arguments.table.write_text(page, encoding="utf-8")


def _run(names: list[str], results: Path, judge: runner.Judge, arguments: argparse.Namespace) -> None:
    preload = "tests.zoo.libraries.warm"
    jobs, timeout = arguments.jobs, arguments.timeout
    runner.run(names, results, jobs=jobs, timeout=timeout, judge=judge, preload=preload)


if __name__ == "__main__":
    main()
