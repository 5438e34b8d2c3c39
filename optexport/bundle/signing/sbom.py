"""What was installed where a bundle was made, as a CycloneDX document."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator

from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from optexport._version import __version__
from optexport.bundle.manifest import Manifest
from optexport.errors import ConfigError

SCHEMA = SchemaVersion.V1_6


def check_environment(manifest: Manifest) -> None:
    """Checks that what is installed here made the bundle, as far as its manifest tells.

    Raises:
        ConfigError: A version is another one; all are named.
    """
    here = {name: _version(name) for name in manifest.versions}
    if differing := [name for name in here if here[name] != manifest.versions[name]]:
        told = "".join(f"\n  {name}: {manifest.versions[name]} then, {here[name]} here" for name in differing)
        raise ConfigError(
            f"it was made with other versions, which no SBOM of this environment tells{told}",
            location="manifest.json: versions",
            hint="Sign it in the environment that made it.",
        )


def make(manifest: Manifest) -> str:
    """The packages of this environment, with their licences where they say them in SPDX, and what needs what."""
    model = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=manifest.model.source,
        version=manifest.model.weights_sha256,
        bom_ref="model",
    )
    python = Component(
        type=ComponentType.PLATFORM,
        name="python",
        version=platform.python_version(),
        bom_ref="python",
        purl=PackageURL("generic", name="python", version=platform.python_version()),
    )
    found: dict[str, importlib.metadata.Distribution] = {}
    for package in filter(_whole, importlib.metadata.distributions()):
        found.setdefault(canonicalize_name(package.name), package)  # of two by one name Python imports the first
    known = {name: _component(name, package.version, _licence(package)) for name, package in sorted(found.items())}
    # It may run from a folder, of which nothing is installed.
    own = known["optexport"] = _component("optexport", __version__, "Apache-2.0")
    bom = Bom(components=[python, *known.values()])
    bom.metadata.component = model
    bom.register_dependency(model, [own, python])
    for name, package in found.items():
        needed = set(_needed(package.requires or ())) & known.keys()
        bom.register_dependency(known[name], [known[each] for each in needed])
    return f"{make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=2)}\n"


def _component(name: str, version: str, expression: str | None) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"{name}@{version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=[LicenseExpression(expression)] if expression else (),
    )


def _whole(package: importlib.metadata.Distribution) -> bool:
    """Whether it is more than the folder that a removal which broke off has left."""
    try:
        return "Name" in package.metadata and "Version" in package.metadata
    except FileNotFoundError:  # so says importlib_metadata, which stands in for Python's own once it is imported
        return False


def _licence(package: importlib.metadata.Distribution) -> str | None:
    """The licence of a package as an expression of SPDX; None where its authors do not say it so."""
    return next(iter(package.metadata.get_all("License-Expression") or ()), None)


def _needed(requirements: Iterable[str]) -> Iterator[str]:
    """The names of the packages that one needs here, without its extras."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # as old packages may write them
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _version(name: str) -> str:
    if name == "optexport":
        return __version__
    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
