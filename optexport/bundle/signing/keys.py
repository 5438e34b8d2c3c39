"""Elliptic-curve keys for signing and checking: PEM files without a password."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from optexport.errors import ConfigError

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
# Larger than any key, so that a model's file, named by mistake, is not read in full.
_LONGEST = 1 << 20
_SIGNERS_HINT = "Give the public.pem of the one who signed the bundle: an elliptic-curve key in a PEM file."
_HINT = (
    "Create a pair of keys: openssl ecparam -name prime256v1 -genkey -noout -out private.pem; "
    "openssl ec -in private.pem -pubout -out public.pem"
)


def check_private(path: Path, folder: Path) -> None:
    """Checks that a file contains a usable private key and is not in the signed folder.

    Raises:
        ConfigError: The file contains no usable private key, or is in the folder.
    """
    content = _read(path, _HINT)
    try:
        key = serialization.load_pem_private_key(content, None)
    except TypeError as error:
        hint = f"Remove the password: openssl pkey -in {path} -out private.pem"
        raise _error(path, "the key is protected by a password", hint) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        is_public = b"-----BEGIN PUBLIC KEY-----" in content
        message = "expected a private key, found a public key" if is_public else "the file has no private key"
        hint = "Give the private key of the same pair, which signs; the public key only checks." if is_public else _HINT
        raise _error(path, message, hint) from error
    _check_curve(path, key, _HINT)
    if path.resolve().is_relative_to(folder.resolve()):
        message = "the private key is inside the folder to sign, so it would be published with the bundle"
        raise _error(path, message, "Move the key to another folder.")


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a public key, in hexadecimal, as signatures refer to it.

    Raises:
        ConfigError: The file contains no public key, or one of another kind.
    """
    content = _read(path, _SIGNERS_HINT)
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        message, hint = "the file has no public key", _SIGNERS_HINT
        if b"PRIVATE KEY-----" in content:
            message = "expected a public key, found a private key"
            hint = f"Extract the public key: openssl pkey -in {path} -pubout -out public.pem"
        elif b"-----BEGIN CERTIFICATE-----" in content:
            message = "expected a public key, found a certificate"
            hint = f"Extract the public key: openssl x509 -in {path} -noout -pubkey -out public.pem"
        raise _error(path, message, hint) from error
    _check_curve(path, key, _SIGNERS_HINT)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _read(path: Path, hint: str) -> bytes:
    if "-----BEGIN" in str(path):  # never shown: it may be a private key
        path_hint = "Write the key to a file that only you can read, and give the path of the file."
        raise ConfigError("this is a key itself, not the path of a file with one", location="`key`", hint=path_hint)
    try:
        if not path.exists():
            raise _error(path, "the file does not exist", hint)
        if not path.is_file():  # the file is read twice, which a pipe does not allow
            raise _error(path, "the path is not a regular file", hint)
        with path.open("rb") as file:
            content = file.read(_LONGEST)
    except OSError as error:
        raise _error(path, f"the file cannot be read: {error.strerror}", hint) from error
    if b"-----BEGIN " not in content:
        raise _error(path, "the file is not a PEM file" if content else "the file is empty", hint)
    return content


def _check_curve(path: Path, key: object, hint: str) -> None:
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        raise _error(path, "the key is not an elliptic-curve key", hint)
    if key.curve.name not in _CURVES:
        raise _error(path, f"unsupported curve (expected one of {', '.join(_CURVES)}, found {key.curve.name})", hint)


def _error(path: Path, message: str, hint: str) -> ConfigError:
    return ConfigError(message, location=f"`key={path}`", hint=hint)
