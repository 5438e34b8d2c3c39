"""What a config's result depends on beside its text: packages, the model's revision and weights, files that it names.

``optexport lock`` writes it down beside the config, and ``optexport run --locked`` refuses to run on anything else.
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
from optexport.cache.imported_modules import imports_of, needed_from, packages_of
from optexport.config.metrics import METRIC
from optexport.config.schema import Config
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError, first_line

if TYPE_CHECKING:
    from optexport.job import Job

_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".gguf")
_MEND = "Go back to what was locked; or see that the change is meant, and lock again: optexport lock {}"


class Lock(BaseModel):
    """What was there when the config was locked.

    Attributes:
        versions: Of the packages that have a say in the files, of Python, and of optexport.
        revision: The model's commit on the hub, the version of the package that it is from, or its URI in MLflow.
        weights_sha256: Over names, dtypes, shapes and bytes of its state_dict.
        files: SHA-256 of each file that the config names, and of each module beside it that code which it names
            imports, by its path as seen from the config.
        imports: Versions of the installed packages that the code of the model, its rules and its measures imports, and
            of those that its texts and images are read with.
        packages: SHA-256 over the code of each other package that the model, its rules and its measures are of, and of
            each that this code imports and that is not installed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    lock_version: Literal[1] = 1
    versions: dict[str, str]
    revision: str | None
    weights_sha256: str
    files: dict[str, str]
    imports: dict[str, str]
    packages: dict[str, str]


def lock_path(config: Path) -> Path:
    """Where the lock of a config lies."""
    return config.with_name(f"{config.name}.lock")


def make(job: Job, folder: Path, versions: Mapping[str, str]) -> Lock:
    """Writes down what is there now.

    Args:
        folder: The config's folder, which paths are relative to.
    """
    imports, packages = _code(job, folder)
    return Lock(
        versions=dict(versions),
        revision=job.loaded.revision,
        weights_sha256=job.loaded.weights_sha256,
        files=_digests(job.config, folder, needed_from(folder)),
        imports=imports,
        packages=packages,
    )


def write(lock: Lock, config: Path) -> Path:
    """Writes a lock beside its config, in place of the one that is there."""
    path = lock_path(config)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        draft.write_text(json.dumps(lock.model_dump(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"it cannot be written: {error}", location=str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return path


def read(config: Path) -> Lock:
    """Reads the lock of a config.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    path = lock_path(config)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        return Lock.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no such file", location=path.name, hint=f"optexport lock {config} writes it."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        cause = f"{error.errors()[0]['msg']}" if isinstance(error, ValidationError) else first_line(error)
        raise ConfigError(
            f"it cannot be read: {cause}", location=path.name, hint=f"optexport lock {config} writes it anew."
        ) from error


def pinned(config: Config, lock: Lock, folder: Path) -> Config:
    """The config with the revision that was locked, where the hub has others too."""
    if source_kind(config.model.source, folder) is not SourceKind.HUB or lock.revision is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"revision": lock.revision})})


def check_surroundings(lock: Lock, config: Config, path: Path, versions: Mapping[str, str]) -> None:
    """Checks that packages and files are those that were locked.

    Args:
        path: The config's.

    Raises:
        ConfigError: They are not; all that differ are named.
    """
    files = _digests(config, path.parent, lock.files)
    was, now = {**lock.imports, **lock.versions}, {**_versions(lock.imports), **versions}
    _refuse(_differences(was, now) + _differences(lock.files, files, 12), path)


def check_model(lock: Lock, job: Job, path: Path) -> None:
    """Checks that a model is the one that was locked, of the same packages and modules beside the config.

    Args:
        path: The config's.

    Raises:
        ConfigError: It is not.
    """
    was = {"the model's weights": lock.weights_sha256, **lock.files}
    beside = {name: sha256(path.parent / name) for name in needed_from(path.parent)}
    now = {"the model's weights": job.loaded.weights_sha256, **lock.files, **beside}
    imports, packages = _code(job, path.parent)
    locked, found = (
        {f"the code of {name}": digest for name, digest in each.items()} for each in (lock.packages, packages)
    )
    others = _differences(lock.imports, imports) + _differences(locked, found, 12)
    _refuse(_differences(was, now, 12) + others, path)


def _refuse(differences: list[str], path: Path) -> None:
    if differences:
        told = "".join(f"\n  {difference}" for difference in differences)
        raise ConfigError(f"what was locked is no more{told}", location=lock_path(path).name, hint=_MEND.format(path))


def _differences(was: Mapping[str, str], now: Mapping[str, str], shown: int | None = None) -> list[str]:
    """A line for each name whose value differs; of digests the first characters are enough."""
    names = sorted({*was, *now})
    absent = "absent"
    return [
        f"{name}: {was.get(name, absent)[:shown]} when it was locked, {now.get(name, absent)[:shown]} now"
        for name in names
        if was.get(name) != now.get(name)
    ]


def _digests(config: Config, folder: Path, others: Iterable[str]) -> dict[str, str]:
    """Of all files but weights in the model's own folder, for which the digest of the model stands.

    Args:
        others: Names of files beside those that the config names.
    """
    source, files = config.model.source, {name: folder / name for name in others}
    # Code that a folder brings may read anything that lies in it.
    apart = source_kind(source, folder) is SourceKind.FOLDER and not config.model.trust_remote_code
    for named in _named(config, folder):
        found = _within(named, folder)
        files |= {n: path for n, path in found if not (apart and named == source and path.suffix in _WEIGHTS)}
    return {name: sha256(path) for name, path in sorted(files.items()) if path.is_file()}


def _code(job: Job, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The lock's ``imports`` and ``packages``."""
    made = [*job.loaded.model.modules(), *(rule.transformation for rule in job.rules)]
    called = [job.config.model.source, *(job.config.parity.metrics or ())]
    named = [location.removeprefix(METRIC).partition(":")[0] for location in called if location.startswith(METRIC)]
    modules = {*named, *(type(each).__module__ for each in made)}
    imported = imports_of(modules, folder)
    imported |= set() if job.loaded.pretrained is None else {"tokenizers"}
    imported |= set() if job.config.inputs.images is None else {"PIL", "numpy"}
    installed = metadata.packages_distributions() if imported else {}
    while new := imports_of(imported - installed.keys(), folder) - imported:
        imported |= new
    versions = _versions(package for name in imported for package in installed.get(name, ()))
    return versions, packages_of({*modules, *(imported - installed.keys())}, folder)


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def named_files(config: Config, folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file beside the config, or elsewhere on this machine, that it names; of folders all that is in them."""
    for name in _named(config, folder):
        yield from _within(name, folder)


def _named(config: Config, folder: Path) -> list[str]:
    """The files and folders that a config names."""
    source, inputs = config.model.source, config.inputs
    named = [*([inputs.data] if inputs.data is not None else []), *(inputs.images or [])]
    if config.model.adapter is not None:
        named.append(config.model.adapter)
    if source_kind(source, folder) in (SourceKind.FOLDER, SourceKind.PT2, SourceKind.TORCHSCRIPT):
        named.append(source)
    called = [source, *(rule.use for rule in config.rules()), *(config.parity.metrics or ())]
    for location in called:
        if location.startswith(METRIC):
            module = location.removeprefix(METRIC).partition(":")[0].partition(".")[0]
            named += [name for name in (f"{module}.py", module) if (folder / name).exists()]
    return list(dict.fromkeys(named))


def _within(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A file that a config names, or all files in a folder that it names."""
    path = folder / Path(name).expanduser()
    for file in _files(path):
        yield str(Path(name) / file.relative_to(path)), file


def _files(path: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """A file, or all files in a folder and in what its links lead to, but for a link to a folder that it lies in."""
    if path.is_file():
        yield path
    elif path.is_dir() and (real := path.resolve()) not in above:
        for inner in sorted(path.iterdir()):
            # Kubernetes keeps what it mounts in "..2025_01_01_00_00_00.1", and links to it under the files' names.
            if inner.name != "__pycache__" and not inner.name.startswith(".."):
                yield from _files(inner, (*above, real))
