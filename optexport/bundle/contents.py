"""Documents of a bundle: manifest, measurements and stored reference."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport.bundle import digest_json
from optexport.bundle.layout import MANIFEST, MEASUREMENTS, check_output_path
from optexport.bundle.layout import REFERENCE as REFERENCE
from optexport.bundle.manifest import Manifest
from optexport.errors import BundleError, ConfigError, unreadable

if TYPE_CHECKING:
    import torch


def check_output(output: Path) -> None:
    """Checks that a bundle can be written to a path, before any work starts.

    Raises:
        ConfigError: The path contains something else, or is not writable.
    """
    check_output_path(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"the output cannot be written: {error}", location=f"export.output: {output}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, after all other files except the measurements."""
    digest_json.write(folder / MANIFEST, manifest.model_dump(mode="json", exclude={"digest"}))


def write_measurements(folder: Path, measurements: Mapping[str, Any]) -> None:
    """Writes the values that differ between equal runs, with the digest of the manifest."""
    digest_json.write(
        folder / MEASUREMENTS, {**measurements, "manifest": digest_json.read(folder / MANIFEST)["digest"]}
    )


def read_reference_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a stored reference, with keys ``<case>.<part>.<name>``.

    Raises:
        BundleError: The file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise unreadable(error, path) from error


def read_traced_inputs(path: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Reads the inputs of the trace, which are the inputs of the first stored case.

    Raises:
        BundleError: The file is damaged or lacks an input.
    """
    tensors = read_reference_tensors(path)
    try:
        return {name: tensors[f"0.inputs.{name}"] for name in names}
    except KeyError as error:
        raise BundleError(f"the file lacks the traced input {error}", location=str(path)) from error
