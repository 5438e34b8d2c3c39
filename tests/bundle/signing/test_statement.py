"""Contents of provenance statements and SBOMs: inputs, code, outputs and installed packages."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import shutil
import sys
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

import optexport
from optexport.bundle.signing import sbom
from optexport.bundle.signing.folder_signature import check, sign
from optexport.errors import ConfigError
from optexport.pipeline import lockfile, reproduce
from tests._helpers import exports, signed
from tests._helpers.cli import CliRunner, cli

_MODULE = """
import torch
def load():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)
"""
_CONFIG = """
[model]
source = "python:stated:load"
[inputs]
tensors.input.shape = ["batch", 4]
[export]
formats = ["pt2"]
output = "bundle"
[parity]
effort = "quick"
[tracking]
enabled = false
"""
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a config, its lock and its signed bundle."""
    folder = tmp_path_factory.mktemp("stated")
    (folder / "stated.py").write_text(_MODULE)
    (folder / "mine.toml").write_text(_CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GITHUB_SHA", _COMMIT)
        for options in (["lock"], ["run", "--locked"]):
            sys.modules.pop("stated", None)
            done = CliRunner().invoke(cli, [*options, str(folder / "mine.toml")])
            assert done.exit_code == 0, done.output
    sign(folder / "bundle", signed.pair(folder)[0])
    return folder


@pytest.fixture
def statement(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "bundle" / "provenance.json").read_bytes())
    return document


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_statement_follows_in_toto_and_slsa(statement: dict[str, Any]) -> None:
    parsed = json_format.ParseDict(statement, StatementMessage())
    Statement.copy_from_pb(parsed).validate()
    assert (statement["_type"], statement["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    provenance = json_format.ParseDict(statement["predicate"], Provenance())
    # Fields that SLSA requires.
    assert provenance.build_definition.build_type
    assert provenance.build_definition.external_parameters.fields
    assert provenance.run_details.builder.id
    for uri in (provenance.build_definition.build_type, provenance.run_details.builder.id):
        assert urllib.parse.urlparse(uri).scheme == "urn"


def test_subjects_are_all_files_except_statement_and_signature(folder: Path, statement: dict[str, Any]) -> None:
    files = {path for path in (folder / "bundle").rglob("*") if path.name not in ("provenance.json", "bundle.sig")}
    stated = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert stated == {path.relative_to(folder / "bundle").as_posix(): digest(path) for path in files}
    assert {"manifest.json", "model.pt2", "sbom.cdx.json", "report.html"} <= stated.keys()


def test_statement_names_inputs_and_code(folder: Path, statement: dict[str, Any]) -> None:
    manifest = json.loads((folder / "bundle" / "manifest.json").read_bytes())
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"config": manifest["config"]}
    by_name = {dependency["name"]: dependency for dependency in definition["resolvedDependencies"]}
    assert by_name["model"]["digest"] == {"weightsSha256": manifest["model"]["weights_sha256"]}
    assert by_name["model"]["annotations"]["source"] == "python:stated:load"
    assert by_name["config"]["digest"] == {"sha256": digest(folder / "mine.toml")}
    assert by_name["lock"]["digest"] == {"sha256": digest(lockfile.lock_path(folder / "mine.toml"))}
    assert by_name["repository"]["digest"] == {"gitCommit": _COMMIT}
    assert by_name["onnx"]["uri"] == f"pkg:pypi/onnx@{importlib.metadata.version('onnx')}"
    builder = statement["predicate"]["runDetails"]["builder"]
    assert builder["version"]["optexport"] == optexport.__version__
    measured = json.loads((folder / "bundle" / "measurements.json").read_bytes())
    assert statement["predicate"]["runDetails"]["metadata"]["finishedOn"] == measured["date"]


def test_sbom_is_valid_and_names_installed_packages(folder: Path) -> None:
    text = (folder / "bundle" / "sbom.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    by_name = {component["name"]: component for component in document["components"]}
    for name in ("torch", "onnx", "onnxruntime", "safetensors", "transformers"):
        assert by_name[name]["version"] == importlib.metadata.version(name)
        assert by_name[name]["purl"].startswith(f"pkg:pypi/{name}@")
    assert by_name["optexport"]["version"] == optexport.__version__
    assert by_name["python"]["version"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert document["metadata"]["component"]["name"] == "python:stated:load"
    needed = {entry["ref"]: entry.get("dependsOn", []) for entry in document["dependencies"]}
    assert by_name["numpy"]["bom-ref"] in needed[by_name["onnx"]["bom-ref"]]
    assert str(folder) not in text


def test_remains_of_a_broken_uninstall_are_not_in_the_sbom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "~orch-2.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\nRequires-Dist: none at all\nRequires-Dist: numpy\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(
        "importlib_metadata"
    )  # as mlflow does; from then on it replaces the finders of importlib.metadata
    document = json.loads(sbom.make(exports.exported().manifest))
    assert {"odd", "torch"} <= {component["name"] for component in document["components"]}
    (odd,) = (entry for entry in document["dependencies"] if entry["ref"] == "odd@1.0")
    assert odd["dependsOn"] == [f"numpy@{importlib.metadata.version('numpy')}"]


def test_sbom_with_other_versions_than_the_bundle_is_refused(folder: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    exports.edit_json(bundle / "manifest.json", lambda manifest: manifest["versions"].update(onnx="1.0", absent="2.0"))
    assert signed.call("report", bundle).exit_code == 0
    with pytest.raises(ConfigError) as caught:
        sign(bundle, signed.pair(tmp_path)[0])
    error = str(caught.value)
    assert f"\n  onnx: exported with 1.0, now {importlib.metadata.version('onnx')}" in error
    assert "\n  absent: exported with 2.0, now absent" in error
    assert error.endswith("\nHint: Sign the bundle in the environment that exported it.")
    assert not (bundle / "bundle.sig").exists()


def test_signed_bundle_can_be_reproduced(folder: Path) -> None:
    assert reproduce.reproduce(folder / "bundle", folder) == []
    check(folder / "bundle", folder / "key.pub.pem")
