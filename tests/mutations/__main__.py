"""Mutation check: breaks the package in small seeded ways and reports which test notices each of them.

    python -m tests.mutations                        # all mutations against the tests of `make test`
    python -m tests.mutations --tier all             # against the tests of `make test-all`
    python -m tests.mutations --only gates-do-not-count history-loses-holder
    python -m tests.mutations --list

Each mutation (catalogue.py) replaces one snippet in a copy of the repository, never in the repository itself. The test
files that the mutation names run first; if they pass, the whole tier runs. At the end, the tests that failed run once
more on an unchanged copy: a test that fails there as well shows nothing. The exit code is 1 if a mutation survived or
a test fails without it. Expect minutes per mutation for those that only the whole tier catches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"fast": "not slow and not system and not nightly", "all": "not system and not nightly"}
_LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv", ".*_cache", ".hypothesis", "node_modules"),
    *("build", "dist", "mlruns", "mlartifacts", "mlflow.db*"),
)
_USAGE_ERROR, _NO_TESTS_COLLECTED = 4, 5
# A node id may contain blanks within its brackets. pytest writes " - " and the message after it.
_FAILED = re.compile(
    r"^(?:FAILED|ERROR) (?:collecting )?(\S+?\.py(?:::[^\[\s]+(?:\[.*?\])?)?)(?= - |\s*$)", re.MULTILINE
)

# Runs of pytest. Each has its own session, so that Ctrl-C does not reach it.
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Outcome:
    """Result of one mutation.

    Attributes:
        caught_by: Node id of the first test that failed, or a phrase; None if the mutation survived.
    """

    mutation: Mutation
    caught_by: str | None
    seconds: float

    def __str__(self) -> str:
        return f"{self.mutation.name:44} {self.mutation.file:48} {self.seconds:6.0f} s  {self.caught_by or 'SURVIVED'}"


def check(mutation: Mutation, marker: str, *, first_only: bool, timeout: float) -> Outcome:
    """Applies a mutation to a copy of the repository and runs the tests there."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = _copy_repository(Path(folder))
        mutation.apply(copy)
        caught_by = _first_failure(copy, marker, mutation.tests, timeout)
        if caught_by is None and not first_only:
            caught_by = _first_failure(copy, marker, ("tests",), timeout)
    return Outcome(mutation, caught_by, time.monotonic() - start)


def failures_without_mutation(tests: Sequence[str], timeout: float) -> str | None:
    """Returns the first of the tests that fails on an unchanged copy; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        return _first_failure(_copy_repository(Path(folder)), TIERS["all"], tests, timeout)


def _copy_repository(folder: Path) -> Path:
    return Path(shutil.copytree(ROOT, folder / "repository", ignore=_LEFT_OUT, symlinks=True))


def _first_failure(copy: Path, marker: str, tests: Sequence[str], timeout: float) -> str | None:
    if missing := [test for test in tests if not (copy / test.partition("::")[0]).exists()]:
        raise FileNotFoundError(f"{missing[0]}: no such test file.")
    # test_mutations.py fails on any changed copy.
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", marker, "--ignore=tests/mutations")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:  # a mutation may cause an endless loop
        _kill(process)
        return f"no result within {timeout:g} s"
    finally:
        _running.discard(process)
    if process.returncode in (0, _NO_TESTS_COLLECTED):
        return None
    if process.returncode == _USAGE_ERROR and "while loading conftest" not in output:
        raise RuntimeError(f"pytest could not run: {output.strip()[-500:]}")
    failed = _FAILED.search(output)
    return failed[1] if failed else f"pytest exited with {process.returncode}: {output.strip()[-200:]!r}"


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a run of pytest and the processes that its tests started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _check_import() -> None:
    """Fails if a copy's tests would import the package from elsewhere, such as from an installed wheel."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = _copy_repository(Path(folder))
        command = [sys.executable, "-c", "import optexport; print(optexport.__file__)"]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        found = subprocess.run(command, cwd=copy, env=environment, check=True, capture_output=True, text=True).stdout
        if not Path(found.strip()).is_relative_to(copy):
            raise RuntimeError(f"optexport is imported from {found.strip()}, expected {copy}.")


def _chosen(names: Sequence[str] | None, parser: argparse.ArgumentParser) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in MUTATIONS}
    if unknown := [name for name in names or () if name not in known]:
        parser.error(f"--only: unknown mutation {unknown[0]}. Run with --list to see all names.")
    return [known[name] for name in names] if names else list(MUTATIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutations and exit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="check these mutations only")
    parser.add_argument("--tier", choices=TIERS, default="fast", help="tests to run (default: fast, as make test)")
    parser.add_argument("--first-only", action="store_true", help="run only the test files that a mutation names")
    parser.add_argument("--jobs", type=int, default=1, help="mutations checked at the same time (default: 1)")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run of pytest (default: 3600)")
    options = parser.parse_args(arguments)
    mutations = _chosen(options.only, parser)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name:44} {mutation.file:48} {mutation.before}  ->  {mutation.after}")
        return 0
    _check_import()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as executor:
        try:
            for outcome in executor.map(
                lambda mutation: check(
                    mutation, TIERS[options.tier], first_only=options.first_only, timeout=options.timeout
                ),
                mutations,
            ):
                print(outcome, flush=True)
                outcomes.append(outcome)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                _kill(process)
            raise
    survivors = [outcome.mutation.name for outcome in outcomes if outcome.caught_by is None]
    print(f"\n{len(outcomes) - len(survivors)} of {len(outcomes)} caught.")
    if survivors:
        print(f"Survived: {', '.join(survivors)}")
    tests = sorted({outcome.caught_by for outcome in outcomes if outcome.caught_by and ".py" in outcome.caught_by})
    failed = failures_without_mutation(tests, options.timeout) if tests else None
    if failed is not None:
        print(f"Not counted: {failed} fails without any mutation.")
    return 1 if survivors or failed is not None else 0


if __name__ == "__main__":
    sys.exit(main())
