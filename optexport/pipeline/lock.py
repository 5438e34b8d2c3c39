"""Locks a config: loads its model, and records what a later run must find."""

from __future__ import annotations

import os
from pathlib import Path

from optexport._utils import packages, signals
from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport.config.load import load_config
from optexport.pipeline import lockfile, run
from optexport.pipeline.plan import RunPlan
from optexport.pipeline.rules import load_rules
from optexport.report.progress import show_progress


def lock(config: str | os.PathLike[str], *, progress: bool | Progress | None = None) -> Path:
    """Pins the versions, model and files that a config uses, like ``optexport lock``.

    ``optexport.run(config, locked=True)`` then refuses to run if any of them differs.

    Args:
        config: The config file.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Returns:
        The path of the lock, next to the config.

    Raises:
        ConfigError: The config is invalid, or the lock cannot be written.
        SourceError: The model cannot be loaded.
    """
    path = as_path(config, "config")
    loaded_config = load_config(path)
    packages.check()
    with show_progress(progress) as shown, signals.temporary_folder() as scratch:
        # As a run does, to import the rules' modules in the config's folder.
        rules = load_rules(loaded_config, path.parent, ())
        job = run.load_job(RunPlan(path, loaded_config, rules, scratch / "bundle", keep=False), scratch, shown)
        return lockfile.write(lockfile.make_lock(job, path.parent, packages.versions()), path)
