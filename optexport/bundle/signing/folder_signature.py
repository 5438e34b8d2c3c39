"""Signatures over all files of a folder: signing and checking."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_signing import hashing, signing, verifying

from optexport.bundle import digests
from optexport.bundle.layout import GENERATION, MANIFEST, MEASUREMENTS, REPORT, SBOM, SIGNATURE, SIGNED, STATEMENT
from optexport.bundle.manifest import Manifest
from optexport.bundle.parts import read_bundles
from optexport.bundle.signing import keys, sbom, statement
from optexport.errors import BundleError, ConfigError, OptexportError, first_line, on_one_line, unreadable

_SHOWN = 5
# In bytes: the size for 50,000 files. Before the check the file is untrusted, so its size is limited.
_LARGEST = 16 << 20
_SIGN_HINT = "Copy the bundle again. If the files are yours and correct, sign them: optexport sign BUNDLE --key KEY"
# Properties of a signature over all files, without links, as `model_signing` records them.
_EXPECTED_SERIALIZATION = {
    "method": "files",
    "hash_type": "sha256",
    "allow_symlinks": False,
    "ignore_paths": [SIGNATURE],
}


class _Hashing(hashing.Config):
    """Hashes all files of a folder except the signature, and stores the SHA-256 by path."""

    digests: dict[str, str] | None = None

    def hash(self, model_path: hashing.PathLike, *, files_to_hash: Iterable[hashing.PathLike] | None = None) -> Any:
        """Hashes files. The library calls this method after it has verified the signature itself.

        Args:
            files_to_hash: The signed files, including missing ones; None for all files in the folder.
        """
        try:
            existing = None if files_to_hash is None else [p for p in files_to_hash if Path(os.fsdecode(p)).is_file()]
            manifest = super().hash(model_path, files_to_hash=existing)
        except OSError as error:
            raise unreadable(error, error.filename or SIGNATURE) from error
        self.digests = {file.identifier: file.digest.digest_hex for file in manifest.resource_descriptors()}
        return manifest


def _hashing() -> _Hashing:
    empty = _Hashing()  # type: ignore[no-untyped-call]  # the library's constructor has no types
    return empty.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def sign(folder: Path, key: Path) -> None:
    """Writes the SBOM, the statement and the signature, and replaces earlier ones.

    The digests of the bundle are checked first; its models are not run. A generative model gets one signature for the
    files of all its parts.

    Args:
        folder: A bundle, or a folder of parts.
        key: The path of the private key.

    Raises:
        ConfigError: The key is unusable or in the folder, the folder is not a bundle or not writable, or the installed
            versions differ from the bundle's.
        BundleError: A file of the bundle is missing, added or changed.
    """
    folder = folder.resolve()
    keys.check_private(key, folder)
    bundles = read_bundles(folder)
    for manifest in bundles.values():
        sbom.check_environment(manifest)
    packages = sbom.make(next(iter(bundles.values())))
    files = {name: digests.sha256(folder / name) for name in _files(folder) - {*SIGNED}}
    files[SBOM] = hashlib.sha256(packages.encode()).hexdigest()
    statement_text = statement.make(folder, bundles, files)
    try:
        for name in SIGNED:  # first, because a signature must not outlive the signed files
            (folder / name).unlink(missing_ok=True)
        (folder / SBOM).write_bytes(packages.encode())
        (folder / STATEMENT).write_bytes(statement_text.encode())
        config = signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(_hashing())
        config.sign(folder, folder / SIGNATURE)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ConfigError(f"the folder is not writable: {error}", location=str(folder)) from error


def check(folder: Path, key: Path) -> dict[Path, Manifest]:
    """Checks the signature of a folder, its files and its statement.

    Args:
        folder: A bundle, or a folder of parts.
        key: The path of the public key.

    Returns:
        The manifest of the bundle, or of each part of a generative model, by folder.

    Raises:
        ConfigError: The key is unusable, or the folder is not a bundle.
        BundleError: The signature is missing or by another key, or a file is missing, added or changed.
    """
    folder = folder.resolve()
    fingerprint = keys.fingerprint(key)
    if not (folder / SIGNATURE).exists() and not any((folder / name).exists() for name in (MANIFEST, GENERATION)):
        read_bundles(folder)  # raises the error for a folder without a bundle
    existing = _files(folder)
    signed, actual = _verify(folder, key, fingerprint)
    changes = dict.fromkeys(existing - signed.keys() - {SIGNATURE}, "added")
    changes |= dict.fromkeys(signed.keys() - existing, "removed")
    changes |= {name: "changed" for name in signed.keys() & existing if actual.get(name) != signed[name]}
    if changes:
        raise _changes_error(folder, changes)
    bundles = read_bundles(folder)
    statement.check(folder, bundles, {name: digest for name, digest in signed.items() if name != STATEMENT})
    return bundles


def _files(folder: Path) -> set[str]:
    """Returns the relative paths of all files in a folder; rejects links and special files."""
    names = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(
                "a bundle may contain only regular files and folders, not links", location=str(path), hint="Remove it."
            )
        if path.is_file():
            names.add(name)
    return names


def _verify(folder: Path, key: Path, fingerprint: str) -> tuple[dict[str, str], dict[str, str]]:
    """Verifies the signature and returns the SHA-256 by path, as signed and as in the folder."""
    payload, signing_key = _read(folder / SIGNATURE)
    if signing_key != fingerprint:
        raise BundleError(
            f"the signature was made with another key than {key}",
            location=str(folder / SIGNATURE),
            hint="Give the public key of the one who signed the bundle. If its files are yours, sign it again.",
        )
    hash_config = _hashing()
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(hash_config)
        config.set_ignore_unsigned_files(True)  # `check` reports them by name without hashing them
        config.verify(folder, folder / SIGNATURE)
    except OptexportError:
        raise
    except Exception as error:  # the library, pydantic and cryptography each raise their own errors
        # If files were hashed, the signature is valid and only files differ. `check` then reports them by name.
        if hash_config.digests is None:
            raise BundleError(
                f"the signature does not match the key: {first_line(error)}",
                location=str(folder / SIGNATURE),
                hint=_SIGN_HINT,
            ) from error
    assert hash_config.digests is not None
    predicate = json.loads(payload).get("predicate", {})
    # Another tool may have signed only some files with this key.
    if predicate.get("serialization") != _EXPECTED_SERIALIZATION:
        raise BundleError(
            "the signature does not cover all files of the folder", location=str(folder / SIGNATURE), hint=_SIGN_HINT
        )
    return {resource["name"]: resource["digest"] for resource in predicate["resources"]}, hash_config.digests


def _read(path: Path) -> tuple[bytes, str]:
    """Reads the payload and the key fingerprint of a signature without verifying them.

    The signature covers the payload only. The rest must equal what the library writes, or a changed byte there would go
    unnoticed.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"the file is larger than {_LARGEST} bytes")
        content = path.read_bytes()
        document = json.loads(content)
        envelope = document["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"])
        signing_key = document["verificationMaterial"]["publicKey"]["hint"]
        (entry,) = envelope["signatures"]
        written = {
            "mediaType": document["mediaType"],
            "verificationMaterial": {"publicKey": {"hint": str(signing_key)}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": envelope["payloadType"],
                "signatures": [{"sig": base64.b64encode(base64.b64decode(entry["sig"])).decode(), "keyid": ""}],
            },
        }
        is_intact = content == json.dumps(written, separators=(",", ":")).encode()
    except FileNotFoundError as error:
        raise BundleError("the signature is missing", location=str(path), hint=_SIGN_HINT) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        message = f"the signature cannot be read: {first_line(error)}"
        raise BundleError(message, location=str(path), hint=_SIGN_HINT) from error
    if not is_intact:
        raise BundleError("the signature was changed after it was written", location=str(path), hint=_SIGN_HINT)
    return payload, str(signing_key)


def _changes_error(folder: Path, changes: Mapping[str, str]) -> BundleError:
    """Returns the error that lists files which differ from the signed ones."""
    lines = [f"{on_one_line(name)} was {change}" for name, change in sorted(changes.items())]
    more = [f"and {len(lines) - _SHOWN} more"] if lines[_SHOWN:] else []
    names, kinds = {Path(name).name for name in changes}, set(changes.values())
    is_new_report = names <= {REPORT, MEASUREMENTS} and kinds == {"changed"}
    return BundleError(
        "the files differ from the signed files",
        location=str(folder),
        details="\n".join([*lines[:_SHOWN], *more]),
        hint=f'"optexport report" replaces report.html and its digest. {_SIGN_HINT}' if is_new_report else _SIGN_HINT,
    )
