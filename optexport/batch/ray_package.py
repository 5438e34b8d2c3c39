"""A config on its way to another machine and back: what it needs goes there, and what came of it comes home."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from optexport._utils import atomic_dir
from optexport._utils.atomic_dir import locked, locked_for_a_moment
from optexport._utils.packages import versions
from optexport.batch.results import TaskResult
from optexport.batch.supervisor import Limits, attempts, log_name
from optexport.batch.tasks import Task, tasks_of
from optexport.bundle import layout
from optexport.bundle.parts import read_bundles
from optexport.config.schema import Config
from optexport.errors import ConfigError, OptexportError, TrackingError
from optexport.generation.export import check_output
from optexport.pipeline.lockfile import named_files
from optexport.tracking.resume import log_locked
from optexport.tracking.run import LATER_VARIABLE
from optexport.tracking.store import resolved_uri

# What has a say in the bytes of a bundle, or in what may be run.
_VARIABLES = ("OMP_NUM_THREADS", "OPTEXPORT_NO_CUSTOM_CODE", "HF_HUB_OFFLINE", "HF_ENDPOINT")

_PREFIX = "optexport-parcel-"


@dataclass(frozen=True)
class RemoteTask:
    """What a config needs on another machine.

    Attributes:
        files: Zipped, as seen from the folder that holds all of them.
        config: The config's path in it.
        variables: Environment variables that have a say.
        versions: Of the packages that have a say in the files.
    """

    files: bytes
    config: str
    variables: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Return:
    """What came of a config on another machine.

    Attributes:
        files: Zipped: the bundle, and what lies beside it.
        logs: By suffix.
        log: What they were called there, without it.
        target: Where the files were.
    """

    ended: TaskResult
    files: bytes
    logs: Mapping[str, bytes]
    log: str
    place: str


def check_portable(task: Task) -> None:
    """Checks that the output of a config is a place that another machine has too.

    Raises:
        ConfigError: It is a place of this machine.
    """
    assert task.config is not None
    if Path(task.config.export.output).expanduser().is_absolute():
        raise ConfigError(
            "it is a place of this machine",
            location=f"{task.name}: export.output",
            hint="Write it relative to the config: it comes home to there.",
        )


def packed(task: Task) -> RemoteTask:
    """A config with the files that it names."""
    assert task.config is not None and task.output is not None
    files = [task.path, *(path for name, path in named_files(task.config, task.path.parent) if not _is_absolute(name))]
    root = Path(os.path.commonpath([*(path.parent for path in map(_whole, files)), task.output.parent]))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", strict_timestamps=False) as archive:  # weights do not get smaller
        for path in dict.fromkeys(map(_whole, files)):
            archive.write(path, path.relative_to(root))
    known = {name: value for name, value in os.environ.items() if name in _VARIABLES}
    return RemoteTask(content.getvalue(), str(task.path.relative_to(root)), known, versions())


def _is_absolute(name: str) -> bool:
    return Path(name).expanduser().is_absolute()


def _whole(path: Path) -> Path:
    return Path(os.path.abspath(path))


def run_there(parcel: RemoteTask, limits: Limits) -> Return:
    """Runs a config in a folder of another machine."""
    if (here := versions()) != parcel.versions:
        differ = sorted(name for name in {*here, *parcel.versions} if here.get(name) != parcel.versions.get(name))
        told = ", ".join(f"{n} {here.get(n)} in place of {parcel.versions.get(n)}" for n in differ)
        return Return(TaskResult("", "", "", 2, f"the node has {told}: its bundle would be another"), b"", {}, "", "")
    with _place() as place:
        root = place / "files"
        with zipfile.ZipFile(io.BytesIO(parcel.files)) as archive:
            archive.extractall(root)  # our own
        before = {name: os.environ.get(name) for name in (*_VARIABLES, LATER_VARIABLE)}
        os.environ.update({**parcel.variables, LATER_VARIABLE: "1"})
        try:
            (task,) = tasks_of([str(root / parcel.config)])
            logs = root.with_name("logs")
            logs.mkdir()
            ended = attempts(task, limits, logs, threading.Event())
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        output = task.output
        assert output is not None
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", strict_timestamps=False) as archive:
            for each in layout.kept(output):
                for path in sorted(each.rglob("*")):
                    archive.write(path, path.relative_to(output.parent))
        said = {path.suffix: path.read_bytes() for path in logs.iterdir()}
        return Return(ended, content.getvalue(), said, str(logs / log_name(task)), str(root))


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder for a parcel, gone afterwards; so are those of workers that were killed, which have locked theirs."""
    beside = Path(tempfile.gettempdir()).resolve()
    with contextlib.ExitStack() as own:
        with locked_for_a_moment(beside):
            for other in beside.glob(f"{_PREFIX}*"):
                with locked(other, wait=False) as was_free:
                    if was_free:
                        shutil.rmtree(other, ignore_errors=True)
            place = Path(own.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=beside)))
            own.enter_context(locked(place, wait=False))
        yield place


def brought_home(task: Task, folder: Path, found: Return) -> TaskResult:
    """Unpacks what came of a task: its logs, what its failure left, and its bundle, which appears whole."""
    assert task.output is not None and task.config is not None
    told = found.ended.error
    if told is not None and found.place:
        told = told.replace(found.log, str(folder / log_name(task))).replace(f"{found.place}/", "")
    ended = replace(found.ended, config=task.name, path=str(task.path), digest=task.digest, output=None, error=told)
    for suffix, log in found.logs.items():
        (folder / f"{log_name(task)}{suffix}").write_bytes(log)
    if not found.files:  # nothing was run
        return ended
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(io.BytesIO(found.files)) as archive:
        archive.extractall(place)
        came = Path(place) / task.output.name
        try:
            for each in layout.kept(task.output):
                if each != task.output and (Path(place) / each.name).is_dir():
                    shutil.copytree(Path(place) / each.name, each, dirs_exist_ok=True)
            if came.is_dir():
                with contextlib.ExitStack() as held:  # until it is sent
                    _keep(came, task.output, task.config, held)
                    ended = replace(ended, output=str(task.output))
                    return _tracked(ended, task.output, task.config, task.path.parent)
        except OptexportError as error:
            return replace(ended, exit_code=error.exit_code, error=str(error))
    return ended


def _keep(came: Path, output: Path, config: Config, held: contextlib.ExitStack) -> None:
    read_bundles(came)  # it came whole
    output.parent.mkdir(parents=True, exist_ok=True)
    check = layout.check_replaceable if config.generation is None else check_output
    with atomic_dir.drafting(output, check, held) as draft:
        shutil.copytree(came, draft, dirs_exist_ok=True)


def _tracked(ended: TaskResult, output: Path, config: Config, folder: Path) -> TaskResult:
    """Sends a bundle, which is locked, to MLflow from here, whose stores a node need not reach."""
    if not config.tracking.enabled or ended.exit_code:
        return ended
    try:
        uri = resolved_uri(config.tracking.uri, folder)
        logged = [log_locked(bundle, uri, config.tracking.experiment, folder) for bundle in read_bundles(output)]
    except TrackingError as error:
        return replace(ended, exit_code=error.exit_code, error=str(error))
    failures = [done.registered.failure for done in logged if done.registered is not None and done.registered.failure]
    if failures:
        return replace(ended, exit_code=failures[0].exit_code, error=str(failures[0]), run_id=logged[0].run_id)
    return replace(ended, run_id=logged[0].run_id)
