"""The configs of a batch: files and globs, each once, and no two that write to the same place."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optexport.config import text as config_text
from optexport.config.load import parse_config
from optexport.config.schema import Config
from optexport.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """One config of a batch.

    Attributes:
        name: The path as it was given.
        path: The same, from the root.
        digest: SHA-256 of its text; empty where it cannot be read.
        config: What it says; None where that is wrong, which its own process tells.
    """

    name: str
    path: Path
    digest: str
    config: Config | None

    @property
    def output(self) -> Path | None:
        """The folder of its bundle."""
        return None if self.config is None else self.config.output_path(self.path.parent)


def tasks_of(given: Sequence[str]) -> list[Task]:
    """The tasks of files and globs, in their order.

    Raises:
        ConfigError: A glob finds nothing, or two configs name one output.
    """
    names: list[str] = []
    for each in given:
        found = [each] if os.path.exists(each) else sorted(glob.glob(each, recursive=True))
        if not found and glob.has_magic(each):
            raise ConfigError("no file is called so", location=each, hint="Look how it is spelt.")
        names += found or [each]
    tasks = {task.path: task for task in map(_task, names)}
    outputs: dict[Path, Task] = {}
    for task in tasks.values():
        if task.output is not None and (other := outputs.setdefault(task.output, task)) is not task:
            raise ConfigError(
                f"{other.name} writes to {task.output} too",
                location=f"{task.name}: export.output",
                hint="Give each config an output of its own.",
            )
    for output, task in outputs.items():
        for parent in output.parents:
            if parent in outputs:
                raise ConfigError(
                    f"it lies in the bundle of {outputs[parent].name}",
                    location=f"{task.name}: export.output",
                    hint="Give each config an output of its own.",
                )
    return list(tasks.values())


def _task(name: str) -> Task:
    path = Path(os.path.abspath(name))  # where a link lies is what paths in the config are relative to
    try:
        text = config_text.read(path)
    except ConfigError:
        return Task(name, path, "", None)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        config = parse_config(text, path)
    except (ConfigError, OSError, ValueError):
        config = None
    return Task(name, path, digest, config)
