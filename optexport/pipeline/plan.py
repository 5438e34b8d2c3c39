"""Plans a run: reads and checks everything that does not need the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optexport import tracking
from optexport._utils.packages import versions
from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport.bundle import contents, layout
from optexport.bundle.git import checkout
from optexport.bundle.measurements import Origin
from optexport.config import toml_file
from optexport.config.benchmarks import TuneConfig
from optexport.config.derived import disable_measurements, resolve_config, resolve_passes
from optexport.config.error_locations import naming_config
from optexport.config.load import parse_config
from optexport.config.requirements import check_extras, check_onnx_file_runs
from optexport.config.schema import Config
from optexport.errors import ConfigError
from optexport.exporters import registry
from optexport.pipeline import lockfile
from optexport.pipeline.lockfile import Lock
from optexport.pipeline.portable_config import portable_config
from optexport.pipeline.rules import load_rules
from optexport.tracking import run_params
from optexport.transformations.apply import NamedRule


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that are not part of its config; see `optexport.run`."""

    without: Sequence[str] = ()
    tune: bool = False
    baseline: bool = False
    dump: str | Path | None = None
    locked: bool = False
    keep: bool = True


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run knows before it loads the model.

    Attributes:
        path: The path of the config. Paths in the config are relative to its folder.
        config: The config with the options of the run and the applied rules.
        rules: The rules to apply, in order.
        output: The bundle's folder.
        config_text: The text of the config file, without secrets.
        baseline: The folder for the untransformed export; None if it was not requested.
        dump: The folder for the graph before and after every transformation; None if it was not requested.
        lock: The lock that packages, files and the model must match; None if it was not requested.
        origin: The git commit of the config.
        keep: False if the run only checks parity, and writes its bundle to a temporary folder.
    """

    path: Path
    config: Config
    rules: tuple[NamedRule, ...]
    output: Path
    config_text: str | None = None
    baseline: Path | None = None
    dump: Path | None = None
    lock: Lock | None = None
    origin: Origin = field(default_factory=Origin)
    keep: bool = True

    @property
    def folder(self) -> Path:
        """The folder that paths in the config are relative to."""
        return self.path.parent


@contextlib.contextmanager
def start_tracking(
    config: Config,
    path: Path | None,
    output: Path,
    origin: Origin,
    progress: Progress,
    process: tracking.TrackingProcess | None = None,
) -> Iterator[tracking.Tracker]:
    """Starts the MLflow run as a step, and ends it as finished or failed when the block ends.

    Args:
        path: The path of the config; None for a model in memory.
        output: The bundle's folder.
        origin: The origin of the bundle.
        process: The process that tracks the run; None tracks it in this process.
    """
    settings = portable_config(config)
    formats = config.export.formats
    tags = run_params.tags(settings["model"]["source"], formats, versions() | registry.versions(formats), origin)
    tracker = tracking.make_tracker(config.tracking, path, output, process)
    with contextlib.ExitStack() as stack:
        with progress.step("start tracking") if config.tracking.enabled else contextlib.nullcontext():
            stack.enter_context(tracking.tracking(tracker, settings, tags))
        if tracker.failure is not None:
            progress.note(f"MLflow failed: {tracker.failure.message}. The export continues.")
        yield tracker


def plan_run(path: str | Path, options: RunOptions, text: str | None = None) -> RunPlan:
    """Reads a config, and checks its lock, its rules and its output folders.

    Args:
        text: The text of a config that is in no file; paths in it start at the folder of ``path``.

    Raises:
        ConfigError: The config, the lock or an option is invalid, or an output folder cannot be written.
    """
    path = as_path(path, "path")
    dump = None if options.dump is None else as_path(options.dump, "dump")
    text = toml_file.read_config(path) if text is None else text
    config = parse_config(text, path, options.without)
    _check_config(config, path)
    lock = lockfile.read(path) if options.locked else None
    if lock is not None:
        lockfile.check_environment(lock, config, path, versions())
        config = lockfile.pin_revision(config, lock, path.parent)
    with naming_config(path):
        rules = load_rules(config, path.parent, options.without)
        config = _apply_options(resolve_passes(resolve_config(config, rules)), options)
        output = config.output_path(path.parent)
        baseline = layout.sibling(output, "baseline") if options.baseline else None
        if dump is not None:
            layout.check_outside("dump", dump, layout.output_folders(output), is_file=False)
        if options.keep:
            for folder in (output,) if baseline is None else (output, baseline):
                contents.check_output(folder)
    if dump is not None:
        dump = _make_dump_folder(dump)
    return RunPlan(
        path,
        config,
        rules,
        output,
        config_text=toml_file.redact_text(text, path),
        baseline=baseline,
        dump=dump,
        lock=lock,
        origin=Origin(git=checkout(path.parent)),
        keep=options.keep,
    )


def _check_config(config: Config, path: Path) -> None:
    """Checks that the config has one result, and that this machine has its extras and its device."""
    if config.generation is not None:
        raise ConfigError(
            "optexport.run does not export generative models, because they have several parts",
            location=f"{path}: generation",
            hint="Call optexport.run_generation(path), or run: optexport run",
        )
    check_extras(config, path)
    registry.check_device(config.model.device, config.export.formats, f"{path}: model.device")
    check_onnx_file_runs(config, path)


def _apply_options(config: Config, options: RunOptions) -> Config:
    """Returns the config with tuning, or without measurements and tracking, as the options request."""
    if options.tune and config.tune is None:
        config = config.model_copy(update={"tune": TuneConfig()})
    if options.keep:
        return config
    tracking_off = config.tracking.model_copy(update={"enabled": False})
    return disable_measurements(config).model_copy(update={"tracking": tracking_off})


def _make_dump_folder(dump: Path) -> Path:
    """Creates the folder of `dump`; returns its absolute path, because a model may change the working directory."""
    try:
        dump.mkdir(parents=True, exist_ok=True)
        return dump.resolve()
    except OSError as error:
        raise ConfigError(f"the folder cannot be created: {error}", location=f"`dump={dump}`") from error
