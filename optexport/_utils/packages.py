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
    packages = {name: version for name in _PACKAGES if (version := _find_version(name)) is not None}
    return {"optexport": __version__, "python": platform.python_version(), **packages}


def describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each version that changed."""
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name, 'not installed')} before, {after.get(name, 'not installed')} now"


def check(bundle_versions: Mapping[str, str] | None = None) -> None:
    """Checks that the requirements of optexport and transformers are installed.

    transformers raises ImportError for wrong versions when it is imported. Old versions of other packages fail later,
    with errors that name a file or an argument.

    Args:
        bundle_versions: The package versions of a bundle; the error also lists their changes.

    Raises:
        ConfigError: A package is missing or has a wrong version; the error lists all of them.
    """
    unmet = list(_unmet())
    if unmet:
        lines = [description for description, _ in unmet]
        lines += [] if bundle_versions is None else describe_changes(bundle_versions, versions())
        # Two packages may need the same one; the command lists it once.
        specifiers = {requirement.name: requirement.specifier for _, requirement in unmet}
        for _, requirement in unmet:
            specifiers[requirement.name] &= requirement.specifier
        arguments = " ".join(f"'{name}{specifier}'" for name, specifier in specifiers.items())
        raise ConfigError(
            "the versions of the installed packages do not fit together",
            details="\n".join(lines),
            hint=f"Install other versions: pip install {arguments}",
        )


def _unmet() -> Iterator[tuple[str, Requirement]]:
    """Yields a description of each wrong package, and the requirement."""
    from packaging.requirements import Requirement  # takes 10 ms that --help should not wait for

    for package in ("optexport", "transformers"):
        try:
            needed = map(Requirement, metadata.requires(package) or ())
        except metadata.PackageNotFoundError:  # optexport runs from a checkout, or the package that needs it reports it
            continue
        for requirement in needed:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = _find_version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                name = requirement.name
                state = "not installed" if version is None else f"found {version}"
                yield f"{name}: {state}, {package} needs {name}{requirement.specifier}", requirement


def _find_version(package: str) -> str | None:
    for name in (package, *_IN_PLACE_OF.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
