"""Progress of a run: its steps, with names and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from optexport._utils import signals


@dataclass
class Progress:
    """Announces and times the steps of a run.

    Attributes:
        announce: Receives a step's name at its start, and its name and seconds at its end.
        seconds: Wall-clock seconds by step.
        note: Receives other lines to show.
        start: When the run started, by `time.monotonic`.
    """

    announce: Callable[[str, float | None], None] = lambda name, seconds: None
    seconds: dict[str, float] = field(default_factory=dict)
    note: Callable[[str], None] = lambda text: None
    start: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Runs a step in a context; a failed step is not announced as ended.

        Raises:
            KeyboardInterrupt: The process received a signal to end.
        """
        signals.check()
        self.announce(name, None)
        start = time.perf_counter()
        yield
        signals.check()
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.announce(name, elapsed)

    def prefixed(self, prefix: str) -> Progress:
        """Returns a progress that announces its steps here, with a prefix; it has its own times."""
        return Progress(lambda name, seconds: self.announce(f"{prefix}: {name}", seconds))
