"""Keeps what tuning found, so that a second run starts from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from optexport.cache import store
from optexport.config.benchmarks import LEAST_ROUNDS
from optexport.tuning.outcome import NOT_THE_SAME, Trial

_TRIALS = TypeAdapter(list[Trial])


def read(entry: str) -> list[Trial]:
    """The trials under a name, the chosen one first; none where nothing is kept."""
    if (kept := store.read(entry)) is None:
        return []
    try:
        return _TRIALS.validate_python(kept[1])
    except ValidationError:  # as another version kept them
        return []


def write(entry: str, chosen: Trial, trials: Sequence[Trial]) -> None:
    """Keeps what was chosen, and the trials that need not be repeated.

    Those are what was measured to an end, and what does not compute the same. What dropped out early, or could not be
    made, may fare better another time.
    """
    ended = [trial for trial in trials if trial.comparison is not None and trial.comparison.rounds >= LEAST_ROUNDS]
    refused = [trial for trial in trials if (trial.refused or "").startswith(NOT_THE_SAME)]
    store.write(entry, [asdict(trial) for trial in (chosen, *ended, *refused)])
