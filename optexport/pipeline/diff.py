"""Compares two bundles, and on request the values inside their ONNX files."""

from __future__ import annotations

import os
from pathlib import Path

from optexport._utils.paths import as_path
from optexport.bench.artifact import find_bundle
from optexport.diagnosis import onnx_layers
from optexport.errors import ConfigError
from optexport.report import bundle_comparison
from optexport.report.difference import Difference


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, layers: bool = False) -> Difference:
    """Compares two bundles, like ``optexport diff``.

    Args:
        a: The folder of one bundle, or a file in it.
        b: The folder of the other, or a file in it.
        layers: Also run both ONNX files on the inputs of A, and compare their values layer by layer.

    Returns:
        The verdict and tables of differences; ``summary()`` is the text of the command.

    Raises:
        ConfigError: A folder is not a bundle, or has no ONNX file to compare layers of.
        BundleError: A bundle is damaged.
    """
    folders = (_bundle_of(as_path(path, name)) for path, name in ((a, "a"), (b, "b")))
    side_a, side_b = (bundle_comparison.read_side(folder) for folder in folders)
    result = bundle_comparison.compare(side_a, side_b)
    if layers:
        values = onnx_layers.compare_layers(side_a.folder, side_a.manifest, side_b.folder, side_b.manifest)
        result = bundle_comparison.with_layers(result, values.rows, values.matches, values.values)
    return result


def _bundle_of(path: Path) -> Path:
    if not path.is_file():
        return path
    folder = find_bundle(path)
    if folder is None:
        hint = "Give bundles, because a comparison needs their inputs; optexport export writes one."
        raise ConfigError("the file is not in a bundle", location=str(path), hint=hint)
    return folder
