"""Keys that cannot sign or verify: errors with location, cause and hint, and no files written."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
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
    elliptic, koblitz = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256K1())
    problems = {
        public: "expected a private key, found a public key",
        tmp_path / "absent.pem": "the file does not exist",
        tmp_path: "the path is not a regular file",
        tmp_path / "pipe.pem": "the path is not a regular file",
        long: "the file cannot be read: File name too long",
        bundle / "bundle.sig": "the private key is inside the folder to sign",
        tmp_path / "noise.pem": "the file is not a PEM file",
        tmp_path / "torn.pem": "the file has no private key",
        written(tmp_path / "locked.pem", elliptic, b"secret"): "the key is protected by a password",
        written(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048)): "the key is not an elliptic-curve key",
        written(tmp_path / "ed.pem", ed25519.Ed25519PrivateKey.generate()): "the key is not an elliptic-curve key",
        written(tmp_path / "koblitz.pem", koblitz): "unsupported curve (expected one of",
    }
    for key, cause in problems.items():
        error = message(signed.call("sign", bundle, key), 2)
        assert error.startswith(f"--key {key}: "), error
        assert cause in error
        assert "openssl" in error or "Move the key to another folder." in error or key == public
    assert sorted(path.name for path in bundle.iterdir()) == sorted([*exports.FILES, "bundle.sig"])
    assert (bundle / "bundle.sig").read_bytes() == private.read_bytes()


def test_unusable_public_key_is_refused(tmp_path: Path) -> None:
    private, _ = signed.pair(tmp_path)
    error = message(signed.call("verify", exports.exported().output, private), 2)
    assert f"--key {private}: expected a public key, found a private key\nHint: Extract" in error
    (tmp_path / "torn.pem").write_text("-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n")
    with pytest.raises(ConfigError, match="the file has no public key"):
        keys.fingerprint(tmp_path / "torn.pem")
    with pytest.raises(ConfigError, match="the file does not exist"):
        keys.fingerprint(tmp_path / "absent.pem")


def certificate(path: Path) -> Path:
    """Writes a certificate with an elliptic-curve key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_hint_about_a_wrong_public_key_leads_to_the_right_one(tmp_path: Path) -> None:
    rsa_key = rsa.generate_private_key(65537, 2048).public_key()
    (tmp_path / "rsa.pem").write_bytes(
        rsa_key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / "empty.pem").touch()
    for name, cause in {"rsa.pem": "the key is not an elliptic-curve key", "empty.pem": "the file is empty"}.items():
        with pytest.raises(ConfigError, match=cause) as caught:
            keys.fingerprint(tmp_path / name)
        assert caught.value.hint == (
            "Give the public.pem of the one who signed the bundle: an elliptic-curve key in a PEM file."
        )
    private, public = signed.pair(tmp_path)
    for path, found in ((private, "a private key"), (certificate(tmp_path / "cert.pem"), "a certificate")):
        with pytest.raises(ConfigError, match=f"expected a public key, found {found}") as caught:
            keys.fingerprint(path)
        command = str(caught.value.hint).removeprefix("Extract the public key: ")
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
        assert keys.fingerprint(tmp_path / "public.pem")
    with pytest.raises(ConfigError, match="expected a private key, found a public key") as caught:
        keys.check_private(public, tmp_path / "bundle")
    assert caught.value.hint == "Give the private key of the same pair, which signs; the public key only checks."


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
