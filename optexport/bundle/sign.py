"""Signs bundles, and checks signatures on request. The extra ``trust`` is needed only when that is done."""

from __future__ import annotations

import os

from optexport._utils.paths import as_path


def sign(bundle: str | os.PathLike[str], key: str | os.PathLike[str]) -> None:
    """Signs a bundle and records how it was built, like ``optexport sign``.

    Writes ``provenance.json``, ``sbom.cdx.json`` and ``bundle.sig``, and replaces earlier ones. The digests of the
    bundle are checked first; its models are not run.

    Args:
        bundle: The bundle, or the folder of a generative model that has all parts.
        key: The private key, a PEM file without a password.

    Raises:
        ConfigError: The extra ``trust`` is missing, the key is unusable or in the folder, the folder is not a bundle or
            not writable, or the installed versions differ from the bundle's.
        BundleError: A file of the bundle is missing, added or changed.
    """
    from optexport.bundle.signing import folder_signature

    folder_signature.sign(as_path(bundle, "bundle"), as_path(key, "key"))


def check_signature(bundle: os.PathLike[str], key: str | os.PathLike[str] | None) -> None:
    """Checks the signature of a bundle, if a public key is given.

    Raises:
        ConfigError: The extra ``trust`` is missing, the key is unusable, or the folder is not a bundle.
        BundleError: The signature is missing or by another key, or a file is missing, added or changed.
    """
    if key is None:
        return
    from optexport.bundle.signing import folder_signature

    folder_signature.check(as_path(bundle, "bundle"), as_path(key, "key"))
