"""Versions of installed packages, from their metadata, without importing them."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from optexport._version import __version__
from optexport.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_PACKAGES = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "mlflow", "safetensors")
# Other distributions with the same modules.
_IN_PLACE_OF = {"onnxruntime": [f"onnxruntime-{kind}" for kind in ("gpu", "openvino", "directml", "qnn", "training")]}


def versions() -> dict[str, str]:
    """Returns the versions of all installed packages that affect the files."""
    found = {name: _version(name) for name in _PACKAGES}
    here = {name: version for name, version in found.items() if version is not None}
    return {"optexport": __version__, "python": platform.python_version(), **here}


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each version that changed."""
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield f"{name} was {was.get(name, 'absent')}, and is {now.get(name, 'absent')} now"


def check(was: Mapping[str, str] | None = None) -> None:
    """Checks that the requirements of optexport and transformers are installed.

    transformers raises ImportError for wrong versions when it is imported. Old versions of other packages fail later,
    with errors that name a file or an argument.

    Args:
        was: The package versions of a bundle; the error also lists their changes.

    Raises:
        ConfigError: A package is missing or has a wrong version; the error lists all of them.
    """
    unmet = list(_unmet())
    if unmet:
        lines = [*(each for each, _ in unmet), *([] if was is None else changed(was, versions()))]
        told = "".join(f"\n  {line}" for line in lines)
        # Two packages may need the same one; the command lists it once.
        wanted = {requirement.name: requirement.specifier for _, requirement in unmet}
        for _, requirement in unmet:
            wanted[requirement.name] &= requirement.specifier
        needed = " ".join(f"'{name}{specifier}'" for name, specifier in wanted.items())
        raise ConfigError(f"the installed packages do not go together{told}", hint=f"pip install {needed}")


def _unmet() -> Iterator[tuple[str, Requirement]]:
    """Yields a description of each wrong package, and the requirement."""
    from packaging.requirements import Requirement  # takes 10 ms that --help should not wait for

    for package in ("optexport", "transformers"):
        try:
            needed = map(Requirement, metadata.requires(package) or ())
        except metadata.PackageNotFoundError:  # optexport runs from a checkout, or the package that needs it reports it
            continue
        for one in needed:
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            version = _version(one.name)
            if version is None or not one.specifier.contains(version, prereleases=True):
                found = "is not installed" if version is None else f"{version} is installed"
                yield f"{one.name}: {found}, and {package} needs {one.name}{one.specifier}", one


def _version(package: str) -> str | None:
    for name in (package, *_IN_PLACE_OF.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
