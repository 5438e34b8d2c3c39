"""The engine that runs a batch on a Ray cluster: what a config needs goes there, and what came of it comes home."""

from __future__ import annotations

import functools
import io
import logging
import os
import shutil
import socket
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optexport.batch.attempt import Limits, attempts
from optexport.batch.ended import Ended
from optexport.batch.run import Engine
from optexport.batch.tasks import Task, tasks_of
from optexport.bundle import digests, drafts, places
from optexport.bundle.lockfile import named_files
from optexport.bundle.places import MANIFEST
from optexport.config.file import Config
from optexport.errors import ConfigError, OptexportError, TrackingError
from optexport.generation.export import check_output
from optexport.kept.surroundings import versions
from optexport.tracking.later import log_bundle
from optexport.tracking.run import LATER_VARIABLE

# What the head of a cluster has to answer.
_ANSWER_SECONDS = 10.0
# How often the cluster starts a task again whose node was lost.
_LOST_NODES = 5
# What a run takes beside its model, and how many times the model, as was seen of small ones; Ray reserves as much.
_BESIDE_BYTES, _TIMES = 2 << 30, 6


@dataclass(frozen=True)
class _Parcel:
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
class _Return:
    """What came of a config on another machine.

    Attributes:
        files: Zipped: the bundle, and what lies beside it.
        logs: By name.
        place: Where it all was.
    """

    ended: Ended
    files: bytes
    logs: Mapping[str, bytes]
    place: str


def on_ray(address: str | None, limits: Limits, memory: int | None) -> Engine:
    """Runs configs on a cluster, as many at a time as it has room for; without an address on one of this machine.

    Args:
        memory: Bytes that Ray reserves for each; by default by the size of its model.
    """
    return functools.partial(_run, address, limits, memory)


def _run(
    address: str | None, limits: Limits, memory: int | None, tasks: Sequence[Task], folder: Path
) -> Iterator[tuple[Task, Ended]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without it Ray warns of accelerators, which nobody here asked for.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed", place="--engine ray", mend='pip install "optexport[ray]"') from error
    parcels = {task.path: _packed(task) for task in tasks if task.config is not None}
    try:
        _check_address(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no cluster answers: {error}", place=f"--address {address}") from error
    try:
        remote = ray.remote(num_cpus=1, max_retries=_LOST_NODES)(_there)
        pending = {}
        for task in tasks:
            if (parcel := parcels.get(task.path)) is None:  # a mistake in a config is told here
                yield task, attempts(task, limits, folder, threading.Event())
                continue
            reserved = _needed(task) if memory is None else memory
            options = {"memory": reserved, "name": task.name}
            pending[remote.options(**options).remote(parcel, limits)] = task
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            task = pending.pop(ready)
            yield task, _home(task, folder, lambda ready=ready: ray.get(ready))
    finally:
        ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raises an OSError at once where Ray would try without end."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()


def _packed(task: Task) -> _Parcel:
    """A config with the files that it names.

    Raises:
        ConfigError: Its output is no path that another machine could have too.
    """
    assert task.config is not None and task.output is not None
    if Path(task.config.export.output).expanduser().is_absolute():
        raise ConfigError(
            "it is a place of this machine",
            place=f"{task.name}: export.output",
            mend="Write it relative to the config: it comes home to there.",
        )
    files = [task.path, *(path for name, path in named_files(task.config, task.path.parent) if not _is_absolute(name))]
    root = Path(os.path.commonpath([*(path.parent for path in map(_whole, files)), task.output.parent]))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # weights do not get smaller
        for path in dict.fromkeys(map(_whole, files)):
            archive.write(path, path.relative_to(root))
    known = {name: value for name, value in os.environ.items() if name in _VARIABLES}
    return _Parcel(packed.getvalue(), str(task.path.relative_to(root)), known, versions())


# What has a say in the bytes of a bundle, or in what may be run.
_VARIABLES = ("OMP_NUM_THREADS", "OPTEXPORT_NO_CODE", "HF_HUB_OFFLINE", "HF_ENDPOINT")


def _is_absolute(name: str) -> bool:
    return Path(name).expanduser().is_absolute()


def _whole(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _needed(task: Task) -> int:
    """Bytes that a run may take, as far as the files of its model tell."""
    assert task.config is not None
    return _BESIDE_BYTES + _TIMES * sum(
        path.stat().st_size for _, path in named_files(task.config, task.path.parent) if path.is_file()
    )


def _there(parcel: _Parcel, limits: Limits) -> _Return:
    """Runs a config in a folder of another machine."""
    if (here := versions()) != parcel.versions:
        differ = sorted(name for name in {*here, *parcel.versions} if here.get(name) != parcel.versions.get(name))
        told = ", ".join(f"{n} {here.get(n)} in place of {parcel.versions.get(n)}" for n in differ)
        return _Return(Ended("", "", 2, f"the node has {told}: its bundle would be another"), b"", {}, "")
    with tempfile.TemporaryDirectory(prefix="optexport-batch-") as place:
        root = Path(place).resolve() / "files"
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
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for each in places.kept(output):
                for path in sorted(each.rglob("*")):
                    archive.write(path, path.relative_to(output.parent))
        said = {path.name: path.read_bytes() for path in logs.iterdir()}
        return _Return(ended, packed.getvalue(), said, str(root.parent))


def _home(task: Task, folder: Path, fetch: Any) -> Ended:
    """Unpacks what came of a task: its logs, what its failure left, and its bundle, which appears whole."""
    assert task.output is not None and task.config is not None
    try:
        found: _Return = fetch()
    except Exception as error:  # of Ray's: the node is lost for good, or memory ran out
        return Ended(task.name, task.digest, 1, f"the cluster did not run it: {error}")
    told = found.ended.error
    if told is not None and found.place:
        told = told.replace(f"{found.place}/logs", str(folder)).replace(f"{found.place}/files/", "")
    ended = replace(found.ended, config=task.name, digest=task.digest, output=None, error=told)
    for name, log in found.logs.items():
        (folder / name).write_bytes(log)
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(io.BytesIO(found.files)) as archive:
        archive.extractall(place)
        came = Path(place) / task.output.name
        try:
            for each in places.kept(task.output):
                if each != task.output and (Path(place) / each.name).is_dir():
                    shutil.copytree(Path(place) / each.name, each, dirs_exist_ok=True)
            if came.is_dir():
                _keep(came, task.output, task.config)
                ended = replace(ended, output=str(task.output))
                return _tracked(ended, task.output, task.config, task.path.parent)
        except OptexportError as error:
            return replace(ended, exit_code=error.exit_code, error=str(error))
    return ended


def _bundles(folder: Path) -> list[Path]:
    """The bundle in a folder, or those of a generative model's parts."""
    return [folder] if (folder / MANIFEST).exists() else sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))


def _keep(came: Path, output: Path, config: Config) -> None:
    for bundle in _bundles(came):
        digests.read_manifest(bundle)  # it came whole
    output.parent.mkdir(parents=True, exist_ok=True)
    check = places.check_replaceable if config.generation is None else check_output
    with drafts.drafting(output, check) as draft:
        shutil.copytree(came, draft, dirs_exist_ok=True)


def _tracked(ended: Ended, output: Path, config: Config, folder: Path) -> Ended:
    """Sends a bundle to MLflow from here, whose stores a node need not reach."""
    if not config.tracking.enabled or ended.exit_code:
        return ended
    from optexport.tracking.store import resolved_uri

    try:
        uri = resolved_uri(config.tracking.uri, folder)
        logged = [log_bundle(bundle, uri, config.tracking.experiment) for bundle in _bundles(output)]
    except TrackingError as error:
        return replace(ended, exit_code=error.exit_code, error=str(error))
    failures = [done.registered.failure for done in logged if done.registered is not None and done.registered.failure]
    if failures:
        return replace(ended, exit_code=failures[0].exit_code, error=str(failures[0]), run_id=logged[0].run_id)
    return replace(ended, run_id=logged[0].run_id)
