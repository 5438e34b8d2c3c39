"""The manifest: its published schema, and the meaning of its fields."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jsonschema
import onnx
import pytest
import torch
from pydantic import ValidationError

from optexport._utils.platform import processor_flags
from optexport.bundle import manifest
from optexport.bundle.manifest import Manifest
from optexport.config.load import validate_settings
from optexport.config.schema import FORMATS
from optexport.exporters.registry import default_flags, default_passes
from optexport.loading.loader import Loaded
from optexport.pipeline.portable_config import portable_config
from optexport.transformations.registry import PRESET
from tests._helpers import exports


@pytest.fixture
def document() -> dict[str, Any]:
    """Returns the manifest of a real bundle, as stored on disk."""
    content: dict[str, Any] = json.loads((exports.exported().output / "manifest.json").read_bytes())
    return content


def test_published_schema_matches_the_models() -> None:
    published = json.loads(manifest.SCHEMA.read_text(encoding="utf-8"))
    assert published == manifest.json_schema()
    jsonschema.Draft202012Validator.check_schema(published)


def test_real_manifest_follows_the_schema(document: dict[str, Any]) -> None:
    jsonschema.validate(document, json.loads(manifest.SCHEMA.read_text(encoding="utf-8")))


SPOILED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a key more": lambda d: d.update(more=1),
    "a key more, further in": lambda d: d["model"].update(more=1),
    "a key less": lambda d: d.pop("parity"),
    "a key less, further in": lambda d: d["inputs"][0].pop("dtype"),
    "another version": lambda d: d.update(manifest_version=3),
    "a size in words": lambda d: d["files"][0].update(size="large"),
    "an invalid format": lambda d: d["artifacts"][0].update(format="../onnx"),
    "a shape of fractions": lambda d: d["inputs"][0].update(shape=[1.5]),
    "no list of places": lambda d: d["parity"].update(targets={}),
}


@pytest.mark.parametrize("name", SPOILED)
def test_invalid_manifest_is_refused_by_schema_and_program(document: dict[str, Any], name: str) -> None:
    spoiled = copy.deepcopy(document)
    SPOILED[name](spoiled)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoiled, manifest.json_schema())
    with pytest.raises(ValidationError):
        Manifest.model_validate(spoiled)


def test_format_that_is_not_installed_is_refused(document: dict[str, Any]) -> None:
    document["artifacts"][0]["format"] = "tflite"
    with pytest.raises(ValidationError, match="the format 'tflite' is not installed here"):
        Manifest.model_validate(document)


def test_digest_covers_the_document_without_it(document: dict[str, Any]) -> None:
    digest = document.pop("digest")
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_inputs_outputs_and_dimensions_are_described(document: dict[str, Any]) -> None:
    assert document["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": ["batch", "sequence", 8]},
        {"name": "mask", "dtype": "int64", "shape": ["batch", "sequence"]},
    ]
    assert document["outputs"] == [
        {"name": "hidden", "dtype": "float32", "shape": ["batch", "sequence", 8]},
        {"name": "longest", "dtype": "int64", "shape": []},
    ]
    assert document["dims"] == {
        "batch": {"min": 1, "max": 32, "multiple_of": 1},
        "sequence": {"min": 2, "max": 64, "multiple_of": 1},
    }
    assert document["fixed_axes"] == []


def test_every_file_is_listed_with_size_and_digest(document: dict[str, Any]) -> None:
    folder = exports.exported().output
    listed = {record["path"]: record for record in document["files"]}
    there = {path.name for path in folder.iterdir()} - {"manifest.json"} - exports.UNEQUAL
    assert set(listed) == there
    for name, record in listed.items():
        content = (folder / name).read_bytes()
        assert record["size"] == len(content)
        assert record["sha256"] == hashlib.sha256(content).hexdigest()


def test_artifacts_are_the_models_by_format(document: dict[str, Any]) -> None:
    paths = {"torchscript": "model.torchscript.pt", "onnx": "model.onnx", "pt2": "model.pt2"}
    common = {"device": "cpu", "fixed_shape": None, "precision": None}
    assert document["artifacts"] == [
        {"format": name, "path": path, "passes": default_passes(name, processor_flags()), **common}
        for name, path in paths.items()
    ]


def test_flags_of_the_processor_explain_the_passes(document: dict[str, Any]) -> None:
    flags = document["processor_flags"]
    assert flags == sorted(default_flags(FORMATS) & processor_flags())
    assert document["config"]["export"]["passes"] == {name: default_passes(name, flags) for name in FORMATS}


def test_model_is_identified_by_class_and_weights(document: dict[str, Any]) -> None:
    assert document["model"]["class_name"] == "tests._helpers.exports.Block"
    assert document["model"]["weights_sha256"] == Loaded(exports.block()).weights_sha256


def test_transformations_list_changes_and_skips(document: dict[str, Any]) -> None:
    rules = {t["rule"]: t for t in document["transformations"]}
    assert tuple(rules) == PRESET
    (merged,) = rules["merge-linears"]["changes"]
    assert len(merged["replaced"]) == 3
    after = (exports.exported().output / "graph_after.txt").read_text()
    assert f"%{merged['nodes'][0]} " in after
    assert rules["merge-linears"]["nodes_after"] == rules["merge-linears"]["nodes_before"] + 1
    assert document["nodes_after"] == document["nodes_before"] + 1
    assert rules["merge-linears"]["reversible"]
    assert not rules["fuse-batch-norm"]["reversible"]


def test_parity_lists_all_targets_and_three_untraced_sizes(document: dict[str, Any]) -> None:
    proof = document["parity"]
    targets = ["original", "graph", "torchscript", "onnx", "onnx-optimized", "pt2"]
    assert [target["target"] for target in proof["targets"]] == targets
    assert proof["fallback"] is None
    assert len([case for case in proof["cases"] if case not in ("traced", "data")]) >= 3
    for target in proof["targets"]:
        hidden, longest = target["outputs"]
        assert hidden["max_abs"] <= proof["bounds"]["hidden"]["limit"]
        assert hidden["worst_case"] in proof["cases"]
        assert longest["max_abs"] == 0
        assert longest["floor_ratio"] is None or longest["floor_ratio"] == 0


def test_versions_are_the_installed_ones(document: dict[str, Any]) -> None:
    assert document["versions"]["torch"] == torch.__version__
    assert document["versions"]["onnx"] == onnx.__version__


def test_manifest_is_read_without_torch() -> None:
    code = "import sys, optexport.bundle.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_passwords_in_model_arguments_are_not_in_the_manifest() -> None:
    document = {
        "model": {
            "source": "python:a:b",
            "arguments": {"uri": "postgresql://me:secret@host/db", "more": [{"uri": "https://me:secret@host"}], "n": 1},
        },
        "tracking": {"uri": "http://me:secret@mlflow:5000"},
    }
    portable = portable_config(validate_settings(document, "mine.toml"))
    assert "secret" not in json.dumps(portable)
    assert portable["model"]["arguments"]["uri"] == "postgresql://***@host/db"
    assert portable["model"]["arguments"]["n"] == 1
