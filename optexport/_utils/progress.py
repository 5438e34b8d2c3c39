"""The stages of a run, for whoever watches it: each has a name, and takes time that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from optexport._utils import signals


@dataclass
class Progress:
    """Names and times the stages of a run.

    Attributes:
        announce: Called with a stage's name as it starts, and with its name and seconds as it ends.
        seconds: Wall-clock seconds by stage.
    """

    announce: Callable[[str, float | None], None] = lambda name, seconds: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Within it, the stage runs; one that fails is not announced as ended.

        Raises:
            KeyboardInterrupt: A signal to end came before its end.
        """
        signals.check()
        self.announce(name, None)
        start = time.perf_counter()
        yield
        signals.check()
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
        self.announce(name, elapsed)
