"""Progress of a run: its steps, with names and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from optexport._utils import signals


@dataclass
class StepCount:
    """Number of steps that a run has started, and of all its steps.

    Attributes:
        total: None until the steps are known; a tuned run has as many as the graphs that the search chooses need.
        after_bundle: How many steps follow those of the export that is running; None if that is not known.
    """

    number: int = 0
    total: int | None = None
    after_bundle: int | None = 0

    def expect(self, steps: Sequence[str]) -> None:
        """Sets the total, unless it is known already.

        Args:
            steps: The next steps of this export.
        """
        if self.total is None:
            self._count(steps)

    def change(self, steps: Sequence[str]) -> None:
        """Changes a known total, because other steps follow.

        Args:
            steps: The next steps of this export.
        """
        if self.total is not None:
            self._count(steps)

    def _count(self, steps: Sequence[str]) -> None:
        if self.after_bundle is not None:
            self.total = self.number + len(steps) + self.after_bundle

    def __str__(self) -> str:
        return str(self.number) if self.total is None else f"{self.number:{len(str(self.total))}}/{self.total}"


@dataclass
class Progress:
    """Announces and times the steps of a run.

    Attributes:
        announce: Receives a step's name at its start, and its name and seconds at its end.
        seconds: Wall-clock seconds by step.
        note: Receives other lines to show.
        start: When the run started, by `time.monotonic`.
        count: The number of the current step, and of all steps.
    """

    announce: Callable[[str, float | None], None] = lambda name, seconds: None
    seconds: dict[str, float] = field(default_factory=dict)
    note: Callable[[str], None] = lambda text: None
    start: float = field(default_factory=time.monotonic)
    count: StepCount = field(default_factory=StepCount)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.start

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Runs a step in a context; a failed step is not announced as ended.

        Raises:
            KeyboardInterrupt: The process received a signal to end.
        """
        signals.check()
        self.count.number += 1
        self.announce(name, None)
        start = time.perf_counter()
        yield
        signals.check()
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.announce(name, elapsed)

    def prefixed(self, prefix: str) -> Progress:
        """Returns a progress that announces its steps here, with a prefix; it has its own times."""
        return Progress(lambda name, seconds: self.announce(f"{prefix}: {name}", seconds), count=self.count)
