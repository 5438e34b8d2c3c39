"""Finds the configs of a batch, and checks that their outputs are separate."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optexport.config import toml_file
from optexport.config.load import parse_config
from optexport.config.schema import Config
from optexport.errors import ConfigError


@dataclass(frozen=True)
class Task:
    """One config of a batch.

    Attributes:
        name: Path as the user wrote it, or as a glob found it.
        path: Absolute path.
        digest: SHA-256 of the text; empty if the file cannot be read.
        config: The parsed config; None if it is invalid. Its process then reports the mistake.
    """

    name: str
    path: Path
    digest: str
    config: Config | None

    @property
    def output(self) -> Path | None:
        """The folder of the bundle; None if the config is invalid."""
        return None if self.config is None else self.config.output_path(self.path.parent)


def find_tasks(patterns: Sequence[str]) -> list[Task]:
    """Returns the tasks of paths and globs in their order, without duplicates.

    Raises:
        ConfigError: A glob matches no file, or two configs have overlapping outputs.
    """
    names: list[str] = []
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches and glob.has_magic(pattern):
            raise ConfigError("no file matches this pattern", location=pattern, hint="Check its spelling.")
        names += matches or [pattern]
    tasks = {task.path: task for task in map(_task, names)}
    outputs: dict[Path, Task] = {}
    for task in tasks.values():
        if task.output is not None and (first := outputs.setdefault(task.output, task)) is not task:
            raise ConfigError(
                f"{first.name} has the same output, {task.output}",
                location=f"{task.name}: export.output",
                hint="Give each config a separate output.",
            )
    for output, task in outputs.items():
        for parent in output.parents:
            if parent in outputs:
                raise ConfigError(
                    f"the output is inside the bundle of {outputs[parent].name}",
                    location=f"{task.name}: export.output",
                    hint="Give each config a separate output.",
                )
    return list(tasks.values())


def _task(name: str) -> Task:
    path = Path(os.path.abspath(name))  # not resolved: paths in a config are relative to the link, not to its target
    try:
        text = toml_file.read(path)
    except ConfigError:
        return Task(name, path, "", None)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        config = parse_config(text, path)
    except (ConfigError, OSError, ValueError):
        config = None
    return Task(name, path, digest, config)
