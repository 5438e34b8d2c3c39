"""Folders of one bundle, or of the parts of a generative model. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from optexport._utils import atomic_dir
from optexport.bundle import digest_json, digests
from optexport.bundle.layout import GENERATION, MANIFEST, SIGNED
from optexport.bundle.manifest import Manifest
from optexport.errors import BundleError, ConfigError

PARTS = ("encoder", "decoder")
_Token = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]


class _Tokens(BaseModel):
    """Token ids in ``generation.json`` that control generation."""

    version: Literal[1]
    start: _Token | None
    recompute_length: _Token | None = None
    eos: list[_Token]
    pad: _Token | None


def read_bundles(folder: Path) -> dict[Path, Manifest]:
    """Reads the manifest of each bundle in a folder, by path, and checks all files.

    The folder is a bundle, or a generative model with one bundle per part.

    Raises:
        ConfigError: The folder is neither of them.
        BundleError: A file is missing, added or changed.
    """
    atomic_dir.recover(folder)
    if (folder / MANIFEST).is_file() or not (folder / GENERATION).is_file():
        return {folder: digests.read_manifest(folder)}
    return {folder / name: manifest for name, manifest in read_generation(folder)[1].items()}


def outermost(bundle: Path) -> Path:
    """Returns the folder that is written and replaced together with a bundle.

    That is the folder of the generative model if the bundle is a part of one, and otherwise the bundle.
    """
    parent = bundle.resolve().parent
    return parent if (parent / GENERATION).is_file() else bundle


def read_generation(folder: Path) -> tuple[dict[str, Any], dict[str, Manifest]]:
    """Reads ``generation.json`` and the manifest of each part, and checks all files.

    Raises:
        BundleError: A file is missing, added or changed.
    """
    document = digest_json.read(folder / GENERATION)
    parts = document.get("parts")
    if not isinstance(parts, dict) or "decoder" not in parts or not parts.keys() <= set(PARTS):
        raise BundleError("the document does not name the parts of a model", location=str(folder / GENERATION))
    digest_json.validated(_Tokens, document, folder / GENERATION)
    for path in sorted(folder.iterdir()):
        if path.name not in {GENERATION, *parts, *SIGNED}:
            raise BundleError("the path is not part of the export", location=str(path), hint="Remove it.")
        if path.is_symlink() or path.is_dir() != (path.name in parts):
            kind = "folder" if path.name in parts else "file"
            raise BundleError(f"expected a {kind} that is not a link", location=str(path), hint="Remove it.")
    manifests = {name: _read_part(folder / name) for name in parts}
    for name, digest in parts.items():
        if manifests[name].digest != digest:
            raise BundleError("the part belongs to another export", location=str(folder / name))
    return document, manifests


def _read_part(folder: Path) -> Manifest:
    try:
        return digests.read_manifest(folder)
    except ConfigError as error:
        raise BundleError(error.message, location=str(folder)) from error
