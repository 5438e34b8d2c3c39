"""Key pairs, and bundles signed with them."""

from __future__ import annotations

import shutil
from pathlib import Path

from click.testing import Result
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from optexport.bundle import digest_json
from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli


def pair(folder: Path, name: str = "key", curve: ec.EllipticCurve | None = None) -> tuple[Path, Path]:
    """Writes a private and a public key, and returns their paths."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub.pem"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


def call(command: str, bundle: Path, key: Path | None = None, *options: str) -> Result:
    return CliRunner().invoke(cli, [command, str(bundle), *([] if key is None else ["--key", str(key)]), *options])


def generation(folder: Path) -> Path:
    """Returns a folder with two parts, as for a generative model. Each part is a real bundle."""
    parts = {}
    for name in ("encoder", "decoder"):
        shutil.copytree(exports.exported().output, folder / name)
        parts[name] = exports.exported().manifest.digest or digest_json.read(folder / name / "manifest.json")["digest"]
    digest_json.write(folder / "generation.json", {"version": 1, "parts": parts, "start": 0, "eos": [1], "pad": 0})
    return folder
