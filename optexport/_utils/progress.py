"""Names and times the stages of a run for the progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from optexport._utils import signals


@dataclass
class Progress:
    """Announces and times the stages of a run.

    Attributes:
        announce: Called with a stage's name and None when it starts, and with its name and seconds when it ends.
        seconds: Wall-clock seconds by stage.
    """

    announce: Callable[[str, float | None], None] = lambda name, seconds: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times the block as a stage. A stage that fails is not announced as ended.

        Raises:
            KeyboardInterrupt: A signal to end arrived.
        """
        signals.check()
        self.announce(name, None)
        start = time.perf_counter()
        yield
        signals.check()
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.announce(name, elapsed)
