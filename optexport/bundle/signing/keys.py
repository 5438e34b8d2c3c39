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
_MEND = (
    "A pair is made by: openssl ecparam -name prime256v1 -genkey -noout -out private.pem; "
    "openssl ec -in private.pem -pubout -out public.pem"
)


def check_private(path: Path, folder: Path) -> None:
    """Checks that a file contains a usable private key and is not in the signed folder.

    Raises:
        ConfigError: The file contains no usable private key, or is in the folder.
    """
    content = _read(path)
    try:
        key = serialization.load_pem_private_key(content, None)
    except TypeError as error:
        raise _refused(
            path, "it is protected by a password", f"Take it off: openssl pkey -in {path} -out private.pem"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        public = b"-----BEGIN PUBLIC KEY-----" in content
        cause = "it holds a public key, and a private one signs" if public else "it holds no private key in PEM"
        raise _refused(path, cause) from error
    _check_curve(path, key)
    if path.resolve().is_relative_to(folder.resolve()):
        raise _refused(path, "it lies in the folder that it is to sign, and would go where that goes", "Move it away.")


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a public key, in hexadecimal, as signatures refer to it.

    Raises:
        ConfigError: The file contains no public key, or one of another kind.
    """
    content = _read(path)
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        private = b"PRIVATE KEY-----" in content
        cause = "it holds a private key, and a public one checks" if private else "it holds no public key in PEM"
        hint = f"openssl ec -in {path} -pubout -out public.pem" if private else None
        raise _refused(path, cause, hint) from error
    _check_curve(path, key)
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _read(path: Path) -> bytes:
    try:
        if not path.exists():
            raise _refused(path, "there is no such file")
        if not path.is_file():  # the file is read twice, which a pipe does not allow
            raise _refused(path, "it is no file")
        with path.open("rb") as file:
            content = file.read(_LONGEST)
    except OSError as error:
        raise _refused(path, f"it cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise _refused(path, "it is no PEM file")
    return content


def _check_curve(path: Path, key: object) -> None:
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
        raise _refused(path, "it is of another kind than an elliptic curve's")
    if key.curve.name not in _CURVES:
        raise _refused(path, f"its curve is {key.curve.name}, and known are {', '.join(_CURVES)}")


def _refused(path: Path, cause: str, hint: str | None = None) -> ConfigError:
    return ConfigError(cause, location=f"--key {path}", hint=hint or _MEND)
