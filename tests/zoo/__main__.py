"""Runs tiny random models of all transformers types through the whole pipeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.zoo import runner, stages, table
from tests.zoo.shrinking import model_types

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    add = parser.add_argument
    add("model_types", nargs="*", metavar="MODEL_TYPE", help="by default all, in an order that mixes families")
    add("--jobs", type=int, default=1, help="how many at a time")
    add("--timeout", type=float, default=240, help="seconds of CPU time for each")
    add("--results", type=Path, default=Path("build/zoo.jsonl"), help="what is in it already is not run again")
    add("--build", action="store_true", help="only build each, and run it eagerly")
    add("--again", action="store_true", help="run also what is in the results")
    add("--failed", action="store_true", help="run also what is in the results and did not pass")
    add("--limit", type=int, help="at most so many")
    add("--table", type=Path, help="where to write the table, as tests/zoo/COVERAGE.md")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    done = {} if arguments.again else runner.read(arguments.results)
    if not arguments.build:  # types that were only built still have to run
        done = {name: record for name, record in done.items() if not table.only_built(record)}
    if arguments.failed:
        done = {name: record for name, record in done.items() if table.passed(record)}
    pending = [name for name in arguments.model_types or runner.spread(model_types()) if name not in done]
    runner.run(
        pending[: arguments.limit],
        arguments.results,
        jobs=arguments.jobs,
        timeout=arguments.timeout,
        judge=stages.judge_building if arguments.build else stages.judge,
    )
    if arguments.table is not None:
        arguments.table.write_text(table.table(runner.read(arguments.results), model_types()), encoding="utf-8")


if __name__ == "__main__":
    main()
