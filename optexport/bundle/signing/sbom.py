"""The installed packages as a CycloneDX software bill of materials (SBOM)."""

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
    """Checks that the installed versions are those in the manifest.

    Raises:
        ConfigError: Some versions differ; the message lists all of them.
    """
    installed = {name: _version(name) for name in manifest.versions}
    if differing := [name for name in installed if installed[name] != manifest.versions[name]]:
        raise ConfigError(
            "the bundle was exported with other versions of packages, so an SBOM of this environment would be wrong",
            location="manifest.json: versions",
            details="\n".join(
                f"{name}: exported with {manifest.versions[name]}, now {installed[name]}" for name in differing
            ),
            hint="Sign the bundle in the environment that exported it.",
        )


def make(manifest: Manifest) -> str:
    """Returns an SBOM of this environment: packages, SPDX licenses and dependencies."""
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
    packages: dict[str, importlib.metadata.Distribution] = {}
    for package in filter(_has_metadata, importlib.metadata.distributions()):
        packages.setdefault(canonicalize_name(package.name), package)  # Python imports the first of two with one name
    components = {
        name: _component(name, package.version, _license(package)) for name, package in sorted(packages.items())
    }
    # optexport may run from a folder without being installed.
    optexport = components["optexport"] = _component("optexport", __version__, "Apache-2.0")
    bom = Bom(components=[python, *components.values()])
    bom.metadata.component = model
    bom.register_dependency(model, [optexport, python])
    for name, package in packages.items():
        needed = set(_required_names(package.requires or ())) & components.keys()
        bom.register_dependency(components[name], [components[requirement] for requirement in needed])
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


def _has_metadata(package: importlib.metadata.Distribution) -> bool:
    """Returns False for the leftover folder of an incomplete uninstall."""
    try:
        return "Name" in package.metadata and "Version" in package.metadata
    except FileNotFoundError:  # raised by importlib_metadata, which replaces Python's own finder once it is imported
        return False


def _license(package: importlib.metadata.Distribution) -> str | None:
    """Returns the SPDX license expression of a package, or None if it states none."""
    return next(iter(package.metadata.get_all("License-Expression") or ()), None)


def _required_names(requirements: Iterable[str]) -> Iterator[str]:
    """Yields the names of the packages required here, without extras."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # old packages may contain such requirements
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
