"""Caches the trials of a search, so that the next run starts from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from optexport.bundle.outcomes import LEAST_ROUNDS, PARITY_FAILED, Trial
from optexport.cache import store

_TRIALS = TypeAdapter(list[Trial])


def read(entry: str) -> list[Trial]:
    """Returns the cached trials of an entry, with the chosen one first."""
    if (cached := store.read(entry)) is None:
        return []
    try:
        return _TRIALS.validate_python(cached[1])
    except ValidationError:  # written by another version
        return []


def write(entry: str, chosen: Trial, trials: Sequence[Trial]) -> None:
    """Caches the chosen trial and those that need not be repeated.

    These are fully measured trials, and those that failed the parity check. Trials that dropped out early or could not
    be built may do better next time.
    """
    measured = [trial for trial in trials if trial.comparison is not None and trial.comparison.rounds >= LEAST_ROUNDS]
    wrong = [trial for trial in trials if (trial.refused or "").startswith(PARITY_FAILED)]
    store.write(entry, [asdict(trial) for trial in (chosen, *measured, *wrong)])
