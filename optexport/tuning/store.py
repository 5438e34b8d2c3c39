"""Keeps what tuning found, by content, so that a second run starts from there.

The name of an entry is a digest of all that has a say in it: the weights, the traced graph, the rules, the tolerance,
the shapes, the versions and the processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from optexport.config_measuring import LEAST_ROUNDS
from optexport.machine import machine
from optexport.places import cache
from optexport.tuning.outcome import NOT_THE_SAME, Trial

_TRIALS = TypeAdapter(list[Trial])


def digest(*parts: Any) -> str:
    """Names a search by all that has a say in it, and by the machine."""
    said = json.dumps([*parts, machine()], sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def read(name: str) -> list[Trial]:
    """The trials under a name, the chosen one first; none where nothing is kept."""
    place = cache()
    if place is None:
        return []
    try:
        return _TRIALS.validate_json((place / f"{name}.tuning.json").read_bytes())
    except (OSError, ValidationError):  # none, or a damaged one: it is searched anew
        return []


def write(name: str, chosen: Trial, trials: Sequence[Trial]) -> None:
    """Keeps what was chosen, and the trials that need not be repeated, where there is a place for them.

    Those are what was measured to an end, and what does not compute the same. What dropped out early, or could not be
    made, may fare better another time.
    """
    ended = [trial for trial in trials if trial.comparison is not None and trial.comparison.rounds >= LEAST_ROUNDS]
    refused = [trial for trial in trials if (trial.refused or "").startswith(NOT_THE_SAME)]
    place = cache()
    if place is None:
        return
    with contextlib.suppress(OSError):  # where nothing can be written it is searched every time
        place.mkdir(parents=True, exist_ok=True)
        draft = place / f"{name}.{os.getpid()}.draft"
        draft.write_text(json.dumps([asdict(trial) for trial in (chosen, *ended, *refused)]), encoding="utf-8")
        draft.replace(place / f"{name}.tuning.json")
