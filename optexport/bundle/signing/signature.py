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
_AGAIN = "Get it again; or, where it is yours and right, sign it again: optexport sign BUNDLE --key KEY"
# Properties of a signature over all files, without links, as `model_signing` records them.
_WHOLE = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}


class _Hashing(hashing.Config):
    """Hashes all files of a folder except the signature, and stores the SHA-256 by path."""

    found: dict[str, str] | None = None

    def hash(self, model_path: hashing.PathLike, *, files_to_hash: Iterable[hashing.PathLike] | None = None) -> Any:
        """Hashes files. The library calls this method after it has verified the signature itself.

        Args:
            files_to_hash: The signed files, including missing ones; None for all files in the folder.
        """
        try:
            there = None if files_to_hash is None else [p for p in files_to_hash if Path(os.fsdecode(p)).is_file()]
            manifest = super().hash(model_path, files_to_hash=there)
        except OSError as error:
            raise unreadable(error, error.filename or SIGNATURE) from error
        self.found = {each.identifier: each.digest.digest_hex for each in manifest.resource_descriptors()}
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
    installed = sbom.make(next(iter(bundles.values())))
    files = {name: digests.sha256(folder / name) for name in _files(folder) - {*SIGNED}}
    files[SBOM] = hashlib.sha256(installed.encode()).hexdigest()
    told = statement.make(folder, bundles, files)
    try:
        for name in SIGNED:  # first, because a signature must not outlive the signed files
            (folder / name).unlink(missing_ok=True)
        (folder / SBOM).write_bytes(installed.encode())
        (folder / STATEMENT).write_bytes(told.encode())
        config = signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(_hashing())
        config.sign(folder, folder / SIGNATURE)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ConfigError(f"it cannot be written to: {error}", location=str(folder)) from error


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
    there = _files(folder)
    signed, found = _verified(folder, key, fingerprint)
    told = dict.fromkeys(there - signed.keys() - {SIGNATURE}, "added")
    told |= dict.fromkeys(signed.keys() - there, "removed")
    told |= {name: "changed" for name in signed.keys() & there if found.get(name) != signed[name]}
    if told:
        raise _not_signed(folder, told)
    bundles = read_bundles(folder)
    statement.check(folder, bundles, {name: digest for name, digest in signed.items() if name != STATEMENT})
    return bundles


def _files(folder: Path) -> set[str]:
    """Returns the relative paths of all files in a folder; rejects links and special files."""
    names = set()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError("it is a link or no file, which no bundle holds", location=str(path), hint="Remove it.")
        if path.is_file():
            names.add(name)
    return names


def _verified(folder: Path, key: Path, fingerprint: str) -> tuple[dict[str, str], dict[str, str]]:
    """Verifies the signature and returns the SHA-256 by path, as signed and as found."""
    payload, made_with = _read(folder / SIGNATURE)
    if made_with != fingerprint:
        raise BundleError(f"another key than that of {key} made it", location=str(folder / SIGNATURE), hint=_AGAIN)
    hashed = _hashing()
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(hashed)
        config.set_ignore_unsigned_files(True)  # `check` reports them by name without hashing them
        config.verify(folder, folder / SIGNATURE)
    except OptexportError:
        raise
    except Exception as error:  # the library, pydantic and cryptography each raise their own errors
        # If files were hashed, the signature is valid and only files differ. `check` then reports them by name.
        if hashed.found is None:
            raise BundleError(
                f"it is not the key's: {first_line(error)}", location=str(folder / SIGNATURE), hint=_AGAIN
            ) from error
    assert hashed.found is not None
    predicate = json.loads(payload).get("predicate", {})
    if predicate.get("serialization") != _WHOLE:  # another tool may have signed only some files with this key
        raise BundleError("it is not of the whole folder", location=str(folder / SIGNATURE), hint=_AGAIN)
    return {resource["name"]: resource["digest"] for resource in predicate["resources"]}, hashed.found


def _read(path: Path) -> tuple[bytes, str]:
    """Reads the payload and the key fingerprint of a signature without verifying them.

    The signature covers the payload only. The rest must equal what the library writes, or a changed byte there would go
    unnoticed.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST} bytes")
        content = path.read_bytes()
        document = json.loads(content)
        envelope = document["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"])
        made_with = document["verificationMaterial"]["publicKey"]["hint"]
        (one,) = envelope["signatures"]
        written = {
            "mediaType": document["mediaType"],
            "verificationMaterial": {"publicKey": {"hint": str(made_with)}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": envelope["payloadType"],
                "signatures": [{"sig": base64.b64encode(base64.b64decode(one["sig"])).decode(), "keyid": ""}],
            },
        }
        whole = content == json.dumps(written, separators=(",", ":")).encode()
    except FileNotFoundError as error:
        raise BundleError("it is missing: nobody signed this", location=str(path), hint=_AGAIN) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise BundleError(f"it cannot be read: {first_line(error)}", location=str(path), hint=_AGAIN) from error
    if not whole:
        raise BundleError("it was changed since it was written", location=str(path), hint=_AGAIN)
    return payload, str(made_with)


def _not_signed(folder: Path, told: Mapping[str, str]) -> BundleError:
    """Returns the error that lists files which differ from the signed ones."""
    lines = [f"\n  {on_one_line(name)} was {what}" for name, what in sorted(told.items())]
    more = f"\n  and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else ""
    rewritten = {Path(name).name for name in told} <= {REPORT, MEASUREMENTS} and set(told.values()) == {"changed"}
    return BundleError(
        f"it is not what was signed{''.join(lines[:_SHOWN])}{more}",
        location=str(folder),
        hint=f"optexport report writes report.html and its digest anew. {_AGAIN}" if rewritten else _AGAIN,
    )
