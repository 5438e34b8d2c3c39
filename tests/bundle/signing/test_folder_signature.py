"""Signatures: a signed bundle passes unchanged, and any other byte, file, key or signature is refused."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_signing import hashing, signing

import optexport
from optexport._utils import atomic_dir
from optexport.bench.artifact import open_artifacts
from optexport.bundle import contents
from optexport.bundle.layout import SIGNATURE, check_replaceable
from optexport.bundle.signing.folder_signature import check, sign
from optexport.errors import BundleError, ConfigError
from tests._helpers import exports, signed
from tests._helpers.cli import message
from tests._helpers.tampering import tamper_onnx
from tests.tiers import examples

FILES = (*exports.FILES, "bundle.sig", "provenance.json", "sbom.cdx.json")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return signed.pair(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def signed_bundle(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    """Returns a signed bundle. Tests share it and must leave it unchanged."""
    folder = tmp_path_factory.mktemp("signed") / "bundle"
    shutil.copytree(exports.exported().output, folder)
    sign(folder, keys[0])
    return folder


@pytest.fixture
def copied(signed_bundle: Path, tmp_path: Path) -> Path:
    """Returns a copy of a signed bundle, in a folder with another name."""
    return Path(shutil.copytree(signed_bundle, tmp_path / "moved"))


def test_python_signs_and_checks_the_signature(copied: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    (copied / SIGNATURE).unlink()
    with pytest.raises(BundleError, match="the signature is missing"):
        optexport.verify(copied, key=keys[1])
    optexport.sign(str(copied), keys[0])
    verified = optexport.verify(copied, key=keys[1])
    assert verified.passed
    assert f"signed with the key of {keys[1]}" in verified.summary()
    other = signed.pair(tmp_path)[1]
    with pytest.raises(BundleError, match="was made with another key"):
        optexport.verify(copied, key=other)
    with pytest.raises(BundleError, match="was made with another key"):
        optexport.reproduce(copied, key=other)


@pytest.mark.parametrize("call", ["sign", "verify"])
def test_a_key_in_place_of_its_path_is_not_shown(call: str, copied: Path, keys: tuple[Path, Path]) -> None:
    """The error showed the whole private key, in the log of a CI job."""
    content = keys[0].read_text()
    with pytest.raises(ConfigError, match="this is a key itself, not the path of a file") as raised:
        optexport.sign(copied, content) if call == "sign" else optexport.verify(copied, key=content)
    assert content.splitlines()[1] not in str(raised.value)


def refused(bundle: Path, public: Path) -> str:
    with pytest.raises(BundleError) as caught:
        check(bundle, public)
    assert caught.value.exit_code == 4
    return str(caught.value)


# Accepted bundles


def test_signed_bundle_passes_with_and_without_its_key(copied: Path, keys: tuple[Path, Path]) -> None:
    assert sorted(path.name for path in copied.iterdir()) == sorted(FILES)
    done = signed.call("verify", copied, keys[1])
    assert (done.exit_code, done.stderr) == (0, "")
    expected = "files unchanged; stored outputs reproduced by torchscript, onnx, "
    assert done.stdout.startswith(f"{copied}: OK (signed with the key of {keys[1]}, {expected}")
    done = signed.call("verify", copied)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == "The signature was not checked. To check it: --key PUBLIC.pem"


def test_unsigned_bundle_passes_without_a_key_and_fails_with_one(keys: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = exports.exported().output
    done = signed.call("verify", bundle)
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1)
    assert "bundle.sig: the signature is missing" in message(signed.call("verify", bundle, keys[1]), 4)
    assert "the folder is not a bundle" in message(signed.call("verify", tmp_path, keys[1]), 2)
    assert "the folder does not exist" in message(signed.call("verify", tmp_path / "absent", keys[1]), 2)


def test_json_result_says_if_the_signature_was_checked(copied: Path, keys: tuple[Path, Path]) -> None:
    error = json.loads(signed.call("verify", copied, keys[1], "--json").stdout)
    assert (error["passed"], error["signature_checked"]) == (True, True)
    assert error["targets"]
    (copied / "bundle.sig").unlink()
    done = signed.call("verify", copied, keys[1], "--json")
    error = json.loads(done.stdout)
    assert (done.exit_code, error["exit_code"], error["passed"]) == (4, 4, False)


def test_wrong_outputs_fail_despite_a_valid_signature(copied: Path, keys: tuple[Path, Path]) -> None:
    tamper_onnx(copied / "model.onnx")
    exports.reseal(copied, "model.onnx")
    shutil.copy(exports.exported().output / "report.html", copied)
    assert signed.call("report", copied).exit_code == 0
    sign(copied, keys[0])
    assert "the files do not reproduce the stored outputs" in message(signed.call("verify", copied, keys[1]), 4)


def test_new_signature_is_valid_for_the_new_key_only(copied: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = signed.pair(tmp_path, "other")
    assert "bundle.sig: the signature was made with another key than " in refused(copied, public)
    done = signed.call("sign", copied, private)
    assert (done.exit_code, done.stderr) == (0, "")
    check(copied, public)
    assert "bundle.sig: the signature was made with another key than " in (error := refused(copied, keys[1]))
    assert "Hint: Give the public key of the one who signed the bundle." in error


def test_new_report_invalidates_the_signature_with_a_message(copied: Path, keys: tuple[Path, Path]) -> None:
    assert signed.call("report", copied).stdout == f"Wrote {copied / 'report.html'}\n"
    check(copied, keys[1])  # the bytes are the same
    exports.edit_json(copied / "measurements.json", lambda measured: measured.update(date="2026-01-01T00:00:00+00:00"))
    assert (
        "The signature of the bundle is invalid now, because the report changed."
        in signed.call("report", copied).stdout
    )
    error = refused(copied, keys[1])
    assert '\n  measurements.json was changed\n  report.html was changed\nHint: "optexport report" replaces ' in error
    sign(copied, keys[0])
    check(copied, keys[1])


@pytest.mark.slow
def test_other_commands_accept_a_signed_bundle(signed_bundle: Path) -> None:
    assert signed.call("diff", signed_bundle, None, str(exports.exported().output)).exit_code == 0
    bundle = optexport.Bundle.load(signed_bundle)
    assert bundle(**{name: tensor.numpy() for name, tensor in exports.batch().items()})["hidden"].shape == (2, 5, 8)
    assert len(open_artifacts(signed_bundle).artifacts) == 3


def test_later_run_replaces_a_signed_bundle_and_its_signature(copied: Path) -> None:
    contents.check_output(copied)
    with atomic_dir.drafting(copied, check_replaceable) as draft:
        (draft / "file").touch()
    assert [path.name for path in copied.iterdir()] == ["file"]


# Refused bundles


@settings(max_examples=examples(80))
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_flipped_bit_in_any_file_is_detected_and_named(
    signed_bundle: Path, keys: tuple[Path, Path], name: str, at: float, bit: int
) -> None:
    content = (signed_bundle / name).read_bytes()
    spoiled = bytearray(content)
    spoiled[int(at * len(content))] ^= 1 << bit
    (signed_bundle / name).write_bytes(spoiled)
    try:
        assert name in refused(signed_bundle, keys[1])
    finally:
        (signed_bundle / name).write_bytes(content)


def test_flipped_bit_fails_verify_with_exit_code_4(copied: Path, keys: tuple[Path, Path]) -> None:
    content = bytearray((copied / "model.pt2").read_bytes())
    content[len(content) // 2] ^= 1
    (copied / "model.pt2").write_bytes(content)
    error = message(signed.call("verify", copied, keys[1]), 4)
    assert error.startswith(f"{copied}: the files differ from the signed files\n  model.pt2 was changed\nHint: Copy ")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in FILES if name != "bundle.sig"])
def test_removed_file_is_named(copied: Path, keys: tuple[Path, Path], name: str) -> None:
    (copied / name).unlink()
    assert f"\n  {name} was removed" in refused(copied, keys[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("notes.md", "notes.md"),
        (".gitignore", ".gitignore"),
        (".git/config", ".git/config"),
        ("preprocessor/bundle.sig", "preprocessor/bundle.sig"),
        ("all is well\nError: no", "all is well\\nError: no"),
        (os.fsdecode(b"\xff"), r"\udcff"),
    ],
)
def test_added_file_is_named(copied: Path, keys: tuple[Path, Path], name: str, error: str) -> None:
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("mine")
    assert f"\n  {error} was added" in message(signed.call("verify", copied, keys[1]), 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("with_key", [True, False])
def test_added_folder_is_named_on_one_line(copied: Path, keys: tuple[Path, Path], with_key: bool) -> None:
    (copied / "all is well\nError: no").mkdir()
    error = message(signed.call("verify", copied, keys[1] if with_key else None), 4)
    assert error.startswith(f"{copied}/all is well\\nError: no: the manifest does not list this folder\n")


def test_added_file_is_not_read(copied: Path, keys: tuple[Path, Path]) -> None:
    with (copied / "more").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file takes no space on disk, but hours to read
    assert "\n  more was added" in refused(copied, keys[1])


@pytest.mark.parametrize("name", ["model.onnx", "bundle.sig", "more"])
def test_link_is_refused_even_to_a_signed_file(
    copied: Path, keys: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    if (copied / name).exists():
        (copied / name).rename(tmp_path / name)
    (copied / name).symlink_to(tmp_path / name)
    assert f"{name}: a bundle may contain only regular files and folders, not links" in refused(copied, keys[1])


def test_pipe_is_refused_without_waiting(copied: Path, keys: tuple[Path, Path]) -> None:
    (copied / "model.onnx").unlink()
    os.mkfifo(copied / "model.onnx")
    assert "model.onnx: a bundle may contain only regular files and folders, not links" in refused(copied, keys[1])


def test_signature_of_another_bundle_is_refused(copied: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    other_bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "other_bundle"))
    exports.edit_json(other_bundle / "measurements.json", lambda measured: measured.update(host="elsewhere"))
    assert signed.call("report", other_bundle).exit_code == 0
    sign(other_bundle, keys[0])
    shutil.copy(other_bundle / "bundle.sig", copied)
    lines = refused(copied, keys[1]).splitlines()
    assert lines[1:-1] == [
        f"  {name} was changed" for name in ("measurements.json", "provenance.json", "sbom.cdx.json")
    ]


def test_forged_manifest_and_statement_are_detected(copied: Path, keys: tuple[Path, Path]) -> None:
    tamper_onnx(copied / "model.onnx")
    exports.reseal(copied, "model.onnx")
    private, _ = signed.pair(copied.parent, "forger")
    signature_bytes = (copied / "bundle.sig").read_bytes()
    assert signed.call("report", copied).exit_code == 0
    sign(copied, private)  # with a valid statement, but an untrusted key
    assert "the signature was made with another key than" in refused(copied, keys[1])
    forged = json.loads((copied / "bundle.sig").read_bytes())
    forged["verificationMaterial"] = json.loads(signature_bytes)["verificationMaterial"]
    (copied / "bundle.sig").write_text(json.dumps(forged, separators=(",", ":")))
    assert "bundle.sig: the signature does not match the key" in refused(copied, keys[1])
    (copied / "bundle.sig").write_bytes(signature_bytes)
    error = refused(copied, keys[1])
    assert "manifest.json was changed" in error
    assert "model.onnx was changed" in error


def envelope(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        document = json.loads(path.read_bytes())
        change(document["dsseEnvelope"])
        path.write_text(json.dumps(document, separators=(",", ":")))

    return apply


OTHERWISE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "no JSON": lambda path: path.write_bytes(b"\xff{"),
    "another document": lambda path: path.write_bytes(b"{}"),
    "a list": lambda path: path.write_bytes(b"[]"),
    "larger than any": lambda path: os.truncate(path, (16 << 20) + 1),
    "nested without end": lambda path: path.write_bytes(b"[" * 100_000),
    "a blank more": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "a key twice": lambda path: path.write_bytes(path.read_bytes().replace(b"{", b'{"mediaType":"x",', 1)),
    "no signatures": envelope(lambda inner: inner.update(signatures=[])),
    "a second signature": envelope(lambda inner: inner.update(signatures=inner["signatures"] * 2)),
    "a name for the key": envelope(lambda inner: inner.update(signatures=[{**inner["signatures"][0], "keyid": "x"}])),
    "another kind of payload": envelope(lambda inner: inner.update(payloadType="text/plain")),
    "an empty payload": envelope(lambda inner: inner.update(payload=base64.b64encode(b"{}").decode())),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHERWISE)
def test_malformed_signature_is_refused(copied: Path, keys: tuple[Path, Path], name: str) -> None:
    OTHERWISE[name](copied / "bundle.sig")
    assert refused(copied, keys[1]).startswith(f"{copied}/bundle.sig: ")


def sign_by_hand(bundle: Path, private: Path, *ignored: str) -> None:
    """Signs a folder as the library does for other tools."""
    (bundle / "bundle.sig").unlink()
    hashed = hashing.Config().set_ignored_paths(paths=["bundle.sig", *ignored], ignore_git_paths=False)
    config = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(hashed)
    config.sign(bundle, bundle / "bundle.sig")


def test_signature_that_ignores_files_is_refused(copied: Path, keys: tuple[Path, Path]) -> None:
    sign_by_hand(copied, keys[0], "model.onnx")
    (copied / "model.onnx").write_bytes(b"anything")
    assert "bundle.sig: the signature does not cover all files of the folder" in refused(copied, keys[1])


STATEMENTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "of a file less": (lambda statement: statement["subject"].pop(), "other files than the folder contains"),
    "of a file twice": (
        lambda statement: statement["subject"].append(statement["subject"][0]),
        "other files than the folder contains",
    ),
    "of other bytes": (
        lambda statement: statement["subject"][0].update(digest={"sha256": "0" * 64}),
        "other files than the folder contains",
    ),
    "of another kind": (lambda statement: statement.update(predicateType="https://else/v1"), "predicate type is not"),
    "of another form": (lambda statement: statement["predicate"].update(more=1), "not a statement"),
    "of no model": (
        lambda statement: statement["predicate"]["buildDefinition"].update(resolvedDependencies=[]),
        "names another model",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STATEMENTS)
def test_signed_statement_about_other_content_is_refused(copied: Path, keys: tuple[Path, Path], name: str) -> None:
    change, problem = STATEMENTS[name]
    path = copied / "provenance.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    sign_by_hand(copied, keys[0])
    error = refused(copied, keys[1])
    assert error.startswith(f"{copied}/provenance.json: ")
    assert problem in error


def test_damaged_bundle_is_not_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    (bundle / "graph_after.txt").write_text("graph():")
    assert "graph_after.txt: the file was changed" in message(signed.call("sign", bundle, keys[0]), 4)
    assert not (bundle / "bundle.sig").exists()
    assert "the folder does not exist" in message(signed.call("sign", tmp_path / "absent", keys[0]), 2)
    assert "the folder is not a bundle" in message(signed.call("sign", tmp_path, keys[0]), 2)


def test_bundle_with_a_key_in_it_is_not_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    shutil.copy(keys[0], bundle / "key.pem")
    assert "key.pem: the manifest does not list this file" in message(signed.call("sign", bundle, keys[0]), 4)


def test_invalid_measurements_are_named_and_not_signed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    exports.edit_json(bundle / "measurements.json", lambda measured: measured.update(date="yesterday"))
    shutil.copy(exports.exported().output / "report.html", bundle)
    with pytest.raises(BundleError, match=r"measurements\.json: the measurements lack fields of a statement"):
        sign(bundle, keys[0])


# Root can write everywhere unless it drops its capabilities.
_AS_ANYBODY = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


@pytest.mark.slow
@pytest.mark.skipif(bool(_AS_ANYBODY) and shutil.which("setpriv") is None, reason="root needs setpriv to be refused")
def test_read_only_bundle_is_reported_and_stays_signed(copied: Path, keys: tuple[Path, Path]) -> None:
    copied.chmod(0o555)
    done = subprocess.run(
        [*_AS_ANYBODY, sys.executable, "-m", "optexport", "sign", copied, "--key", keys[0]],
        capture_output=True,
        text=True,
    )
    copied.chmod(0o755)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"Error: {copied}: the folder is not writable: ")
    check(copied, keys[1])


@pytest.mark.slow
@pytest.mark.skipif(bool(_AS_ANYBODY) and shutil.which("setpriv") is None, reason="root needs setpriv to be refused")
def test_unreadable_file_is_not_reported_as_a_wrong_signature(copied: Path, keys: tuple[Path, Path]) -> None:
    sign(copied, keys[0])
    (copied / "model.onnx").chmod(0)
    done = subprocess.run(
        [*_AS_ANYBODY, sys.executable, "-m", "optexport", "verify", copied, "--key", keys[1]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"Error: {copied / 'model.onnx'}: this user has no permission to read the file\n")


def test_missing_signing_packages_give_an_install_hint(
    copied: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("optexport.bundle.signing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "model_signing", None)  # type: ignore[arg-type]
    for command, key in zip(("sign", "verify"), keys, strict=True):
        error = message(signed.call(command, copied, key), 2)
        assert error.startswith('signing: the extra "trust" is not installed (model_signing is missing)\nHint: ')
        assert error.endswith("pip install -c constraints.txt -e '.[trust]'\n")
