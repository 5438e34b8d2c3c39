"""The packages that are installed, as their metadata tells them: none of them is imported for it."""

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
# Other packages with the same modules.
_IN_PLACE_OF = {"onnxruntime": [f"onnxruntime-{kind}" for kind in ("gpu", "openvino", "directml", "qnn", "training")]}


def versions() -> dict[str, str]:
    """The versions of everything that has a say in the files; those that are not installed are left out."""
    found = {name: _version(name) for name in _PACKAGES}
    here = {name: version for name, version in found.items() if version is not None}
    return {"optexport": __version__, "python": platform.python_version(), **here}


def changed(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """A line for each version that is another than it was."""
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            yield f"{name} was {was.get(name, 'absent')}, and is {now.get(name, 'absent')} now"


def check(was: Mapping[str, str] | None = None) -> None:
    """Checks that what this package and transformers need is installed, in versions that they take.

    transformers refuses others while it is imported, as an error of Python; and older ones of other packages fail in
    the middle of the work, with errors that name a file or an argument.

    Args:
        was: The versions that a bundle was made with; those that are others now are then told too.

    Raises:
        ConfigError: Something is not; all that is not is named.
    """
    unmet = list(_unmet())
    if unmet:
        lines = [*(each for each, _ in unmet), *([] if was is None else changed(was, versions()))]
        told = "".join(f"\n  {line}" for line in lines)
        # Each once, as two may need one: the mend is read by people.
        wanted = {requirement.name: requirement.specifier for _, requirement in unmet}
        for _, requirement in unmet:
            wanted[requirement.name] &= requirement.specifier
        needed = " ".join(f"'{name}{specifier}'" for name, specifier in wanted.items())
        raise ConfigError(f"the installed packages do not go together{told}", hint=f"pip install {needed}")


def _unmet() -> Iterator[tuple[str, Requirement]]:
    """What is wrong, and what is needed instead."""
    from packaging.requirements import Requirement  # a hundredth of a second that --help need not wait for

    for package in ("optexport", "transformers"):
        try:
            needed = map(Requirement, metadata.requires(package) or ())
        except metadata.PackageNotFoundError:  # run from a checkout; or what needs it says so
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
