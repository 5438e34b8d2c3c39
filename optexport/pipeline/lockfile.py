"""Lock of a config: package versions, model revision, and digests of weights and files.

``optexport lock`` writes it next to the config, and ``optexport run --locked`` refuses to run if anything differs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from optexport.bundle.digests import sha256
from optexport.cache.imported_modules import IDENTIFIED_PACKAGES, imported_from
from optexport.config.metrics import CUSTOM_METRIC
from optexport.config.schema import Config
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError, first_line
from optexport.exporters import registry

if TYPE_CHECKING:
    from optexport.job import Job

_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".gguf")
_HINT = "Restore the locked versions and files. If the change is intended, lock again: optexport lock {}"
_ABSENT = "absent"


class Lock(BaseModel):
    """State at the time when the config was locked.

    Attributes:
        versions: Versions of Python, of optexport, of the packages that write the files, of those that define the
            model, its rules and its metrics, and of those that read its texts and images.
        revision: The model's commit on the hub, the version of its package, or its URI in MLflow.
        weights_sha256: Digest over names, dtypes, shapes and bytes of the model's state_dict.
        files: SHA-256 of each file that the config names, and of each module that was imported from the config's
            folder, by its path relative to that folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    lock_version: Literal[2] = 2
    versions: dict[str, str]
    revision: str | None
    weights_sha256: str
    files: dict[str, str]


def lock_path(config: Path) -> Path:
    """Returns the path of a config's lock."""
    return config.with_name(f"{config.name}.lock")


def make_lock(job: Job, folder: Path, versions: Mapping[str, str]) -> Lock:
    """Returns a lock of the current state.

    Args:
        job: The loaded model with its config.
        folder: The config's folder.
        versions: Versions of the packages that write the files.
    """
    return Lock(
        versions={**_versions(_packages(job)), **registry.versions(job.config.export.formats), **versions},
        revision=job.loaded.revision,
        weights_sha256=job.loaded.weights_sha256,
        files=_digests(job.config, folder, imported_from(folder)),
    )


def write(lock: Lock, config: Path) -> Path:
    """Writes a lock next to its config, and replaces an older one.

    Args:
        lock: The lock.
        config: The path of the config.

    Returns:
        The path of the lock.

    Raises:
        ConfigError: The lock cannot be written; an older one stays unchanged.
    """
    path = lock_path(config)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        draft.write_text(json.dumps(lock.model_dump(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"the lock cannot be written: {error}", location=str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def read(config: Path) -> Lock:
    """Reads the lock of a config.

    Raises:
        ConfigError: The lock is missing or damaged.
    """
    path = lock_path(config)
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block
            raise ValueError("the path is not a file")
        return Lock.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            "the config has no lock", location=path.name, hint=f"Write the lock: optexport lock {config}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        cause = f"{error.errors()[0]['msg']}" if isinstance(error, ValidationError) else first_line(error)
        raise ConfigError(
            f"the lock cannot be read: {cause}", location=path.name, hint=f"Write it again: optexport lock {config}"
        ) from error


def pin_revision(config: Config, lock: Lock, folder: Path) -> Config:
    """Returns the config with the locked revision if the model is from the hub."""
    if source_kind(config.model.source, folder) is not SourceKind.HUB or lock.revision is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"revision": lock.revision})})


def check_environment(lock: Lock, config: Config, path: Path, versions: Mapping[str, str]) -> None:
    """Checks packages and files against the lock.

    Args:
        lock: The lock.
        config: The config.
        path: The path of the config.
        versions: Versions of the packages that write the files.

    Raises:
        ConfigError: Some differ; the message lists all of them.
    """
    files = _digests(config, path.parent, lock.files)
    installed = {**_versions(lock.versions), **versions}
    _raise_differences(_differences(lock.versions, installed) + _differences(lock.files, files, 12), path)


def check_model(lock: Lock, job: Job, path: Path) -> None:
    """Checks that a loaded model, its packages and the modules in the config's folder match the lock.

    Args:
        lock: The lock.
        job: The loaded model with its config.
        path: The path of the config.

    Raises:
        ConfigError: Something differs.
    """
    locked = {"the model's weights": lock.weights_sha256, **lock.files}
    modules = {name: sha256(path.parent / name) for name in imported_from(path.parent)}
    current = {"the model's weights": job.loaded.weights_sha256, **lock.files, **modules}
    packages = _versions(_packages(job))
    locked_packages = {name: lock.versions[name] for name in packages if name in lock.versions}
    _raise_differences(_differences(locked, current, 12) + _differences(locked_packages, packages), path)


def named_files(config: Config, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name and path of every local file that a config names.

    Folders yield all their files.
    """
    for name in _paths_in_config(config, folder):
        yield from _list_files(name, folder)


def _raise_differences(differences: list[str], path: Path) -> None:
    if differences:
        raise ConfigError(
            "the lock no longer matches",
            location=lock_path(path).name,
            details="\n".join(differences),
            hint=_HINT.format(path),
        )


def _differences(locked: Mapping[str, str], current: Mapping[str, str], length: int | None = None) -> list[str]:
    """Returns a line for each name whose value differs."""
    return [
        f"{name}: locked {locked.get(name, _ABSENT)[:length]}, now {current.get(name, _ABSENT)[:length]}"
        for name in sorted({*locked, *current})
        if locked.get(name) != current.get(name)
    ]


def _digests(config: Config, folder: Path, modules: Iterable[str]) -> dict[str, str]:
    """Returns the digests of files in the folder of a config.

    Weights in the model's own folder are excluded, because the model's digest covers them.
    """
    source, files = config.model.source, {name: folder / name for name in modules}
    # Code in the model's folder may read any file there, so the weights are included if there is code.
    skips_weights = source_kind(source, folder) is SourceKind.FOLDER and not config.model.trust_remote_code
    for config_path in _paths_in_config(config, folder):
        skips = skips_weights and config_path == source
        files |= {
            name: path for name, path in _list_files(config_path, folder) if not (skips and path.suffix in _WEIGHTS)
        }
    return {name: sha256(path) for name, path in sorted(files.items()) if path.is_file()}


def _packages(job: Job) -> set[str]:
    """Returns the packages of the model, its rules, metrics, tokenizer and processors."""
    objects = [*job.loaded.model.modules(), *(rule.transformation for rule in job.rules)]
    references = [job.config.model.source, *(job.config.parity.metrics or ())]
    modules = {type(item).__module__ for item in objects}
    modules |= {
        name.removeprefix(CUSTOM_METRIC).partition(":")[0] for name in references if name.startswith(CUSTOM_METRIC)
    }
    names = {module.partition(".")[0] for module in modules} - IDENTIFIED_PACKAGES
    names |= set() if job.loaded.pretrained is None else {"tokenizers"}
    names |= set() if job.config.inputs.images is None else {"PIL", "numpy"}
    installed = metadata.packages_distributions() if names else {}
    return {package for name in names for package in installed.get(name, ())}


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _paths_in_config(config: Config, folder: Path) -> list[str]:
    """Returns the files and folders that a config names."""
    source, inputs = config.model.source, config.inputs
    paths = [*([inputs.data] if inputs.data is not None else []), *(inputs.images or [])]
    if config.model.adapter is not None:
        paths.append(config.model.adapter)
    if source_kind(source, folder) in (SourceKind.FOLDER, SourceKind.PT2, SourceKind.TORCHSCRIPT):
        paths.append(source)
    for reference in (source, *(rule.use for rule in config.rules()), *(config.parity.metrics or ())):
        if reference.startswith(CUSTOM_METRIC):
            module = reference.removeprefix(CUSTOM_METRIC).partition(":")[0].partition(".")[0]
            paths += [name for name in (f"{module}.py", module) if (folder / name).exists()]
    return list(dict.fromkeys(paths))


def _list_files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields a file that a config names, or all files in a folder."""
    path = folder / Path(name).expanduser()
    for file in _walk(path):
        yield str(Path(name) / file.relative_to(path)), file


def _walk(path: Path, parents: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yields a file, or all files in a folder.

    Follows links, except to a folder that contains the link.
    """
    if path.is_file():
        yield path
    elif path.is_dir() and (real := path.resolve()) not in parents:
        for inner in sorted(path.iterdir()):
            # Kubernetes stores mounted files in "..2025_01_01_00_00_00.1" and links to them by their names.
            if inner.name != "__pycache__" and not inner.name.startswith(".."):
                yield from _walk(inner, (*parents, real))
