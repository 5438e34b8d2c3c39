"""Keys that cannot sign or verify: errors with location, cause and hint, and no files written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from optexport.bundle.signing import keys
from optexport.errors import ConfigError
from tests._helpers import exports, signed
from tests._helpers.cli import message

Private = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


def written(path: Path, key: Private, password: bytes | None = None) -> Path:
    """Writes a private key as OpenSSL does, and returns its path."""
    lock = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
    return path


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_key_pair_on_each_curve_is_accepted(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = signed.pair(tmp_path, curve=curve)
    keys.check_private(private, tmp_path / "bundle")
    assert len(keys.fingerprint(public)) == 64


def test_unusable_private_key_is_refused_and_bundle_is_unchanged(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    private, public = signed.pair(tmp_path)
    (tmp_path / "noise.pem").write_bytes(b"\x00\xff" * 40)
    (tmp_path / "torn.pem").write_bytes(private.read_bytes()[:60])
    os.mkfifo(tmp_path / "pipe.pem")
    shutil.copy(private, bundle / "bundle.sig")  # signing would overwrite it
    long = tmp_path / ("k" * 300)
    elliptic = ec.generate_private_key(ec.SECP256R1())
    refused = {
        public: "it holds a public key, and a private one signs",
        tmp_path / "absent.pem": "there is no such file",
        tmp_path: "it is no file",
        tmp_path / "pipe.pem": "it is no file",
        long: "it cannot be read: File name too long",
        bundle / "bundle.sig": "it lies in the folder that it is to sign",
        tmp_path / "noise.pem": "it is no PEM file",
        tmp_path / "torn.pem": "it holds no private key in PEM",
        written(tmp_path / "locked.pem", elliptic, b"secret"): "it is protected by a password",
        written(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048)): "it is of another kind",
        written(tmp_path / "ed.pem", ed25519.Ed25519PrivateKey.generate()): "it is of another kind",
        written(tmp_path / "koblitz.pem", ec.generate_private_key(ec.SECP256K1())): "its curve is secp256k1, and known",
    }
    for key, cause in refused.items():
        told = message(signed.call("sign", bundle, key), 2)
        assert told.startswith(f"--key {key}: "), told
        assert cause in told
        assert "openssl" in told or "Move it away" in told
    assert sorted(path.name for path in bundle.iterdir()) == sorted([*exports.FILES, "bundle.sig"])
    assert (bundle / "bundle.sig").read_bytes() == private.read_bytes()


def test_unusable_public_key_is_refused(tmp_path: Path) -> None:
    private, _ = signed.pair(tmp_path)
    told = message(signed.call("verify", exports.exported().output, private), 2)
    assert f"--key {private}: it holds a private key, and a public one checks\nHint: openssl ec -in" in told
    (tmp_path / "torn.pem").write_text("-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n")
    with pytest.raises(ConfigError, match="it holds no public key in PEM"):
        keys.fingerprint(tmp_path / "torn.pem")
    with pytest.raises(ConfigError, match="there is no such file"):
        keys.fingerprint(tmp_path / "absent.pem")


def test_signing_key_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    monkeypatch.delenv("OPTEXPORT_SIGNING_KEY", raising=False)
    done = signed.call("sign", bundle)
    assert done.exit_code == 2
    assert "OPTEXPORT_SIGNING_KEY" in done.stderr
    private, public = signed.pair(tmp_path)
    monkeypatch.setenv("OPTEXPORT_SIGNING_KEY", str(private))
    assert signed.call("sign", bundle).exit_code == 0
    assert signed.call("verify", bundle, public).exit_code == 0
