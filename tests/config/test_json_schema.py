"""The JSON schema of configs agrees with the `check` command."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from optexport.config.json_schema import config_schema
from optexport.config.load import validate_settings
from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError
from optexport.transformations import registry
from optexport.transformations.registry import RULES
from tests._helpers.cli import CliRunner, cli

ROOT = Path(__file__).parents[2]
SCHEMA = config_schema()
MODEL: dict[str, Any] = {"model": {"source": "org/name"}}


def is_valid(config: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(config)


def test_schema_command_prints_the_schema() -> None:
    done = CliRunner().invoke(cli, ["schema"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("examples/**/*.toml"), *ROOT.glob("pipelines/*.toml")]), ids=lambda path: path.name
)
def test_configs_of_the_repository_follow_the_schema(path: Path) -> None:
    assert is_valid(tomllib.loads(path.read_text(encoding="utf-8")))


GOOD: list[dict[str, Any]] = [
    {},
    {"inputs": {"tensors": {"x": {"shape": ["batch", 3], "low": 0.0}}, "dynamic": {"batch": [1, 8]}}},
    {"inputs": {"dynamic": {"height": {"min": 64, "max": 1024, "multiple_of": 8}, "batch": {"max": 4}}}},
    {"inputs": {"constants": {"a": True, "b": 1, "c": 0.5, "d": "x", "e": [[1, 2], [3, 4]], "f": []}}},
    {"parity": {"metrics": {"cosine": 0.99, "top_k_agreement": {"min": 1, "k": 3}}}},
    {"gate": {"max_size_mb": 20, "min_speedup": {"onnx": 1.1}}},
    {"processing": {"normalize": True, "outputs": "top_k", "k": 3}},
    {"transformations": [{"use": "merge-linears", "min_matches": 1, "formats": ["onnx"]}]},
    {"transformations": [{"use": "MergeLinears"}, {"use": "keep-outputs", "outputs": ["a"]}]},
    {"transformations": [{"use": "python:mine:Rule", "anything": 1}]},
    {"export": {"layout": "triton", "allow_fixed_shape": True}},
    {"export": {"passes": {"onnx": ["gemm"]}, "opset": 20}, "tune": {}, "bench": {"shapes": [{"batch": 1}]}},
]
BAD: list[dict[str, Any]] = [
    {"model": {"source": ""}},
    {"model": {}},
    {"modle": {}},
    {"inputs": {"texts": []}},
    {"processing": {"outputs": "max"}},
    {"inputs": {"tensors": {"x": {"shape": [1.5]}}}},
    {"inputs": {"dynamic": {"batch": [1]}}},
    {"inputs": {"dynamic": {"batch": {"min": 1}}}},
    {"inputs": {"dynamic": {"batch": {"max": 8, "multiple_of": 0}}}},
    {"inputs": {"constants": {"a": {"b": 1}}}},
    {"parity": {"noise_multiple": 0.5}},
    {"parity": {"effort": "lots"}},
    {"parity": {"metrics": {"cosine": "high"}}},
    {"gate": {"max_size_mb": 0}},
    {"export": {"formats": ["ONNX"]}},
    {"export": {"formats": []}},
    {"export": {"layout": "flat"}},
    {"export": {"allow_fixed_shape": "yes"}},
    {"export": {"passes": {"onnx": ["gemmm"]}}},
    {"model": {"source": "org/name", "task": "feature-extractoin"}},
    {"transformations": [{"use": "merge-linears", "outputs": ["a"]}]},
    {"transformations": [{"use": "replace-activation", "new": "tanh"}]},
    {"transformations": [{"options": 1}]},
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("tables", GOOD, ids=str)
def test_schema_accepts_configs_that_check_accepts(tables: dict[str, Any]) -> None:
    validate_settings(MODEL | tables, "config.toml")
    assert is_valid(MODEL | tables)


@pytest.mark.sample(4)
@pytest.mark.parametrize("tables", BAD, ids=str)
def test_check_refuses_configs_that_the_schema_refuses(tables: dict[str, Any], tmp_path: Path) -> None:
    assert not is_valid(MODEL | tables)
    with pytest.raises(ConfigError):
        config = validate_settings(MODEL | tables, "config.toml")
        for rule in config.rules():
            registry.check(rule.use, rule.options, "config.toml")


def test_every_key_of_every_table_has_a_description() -> None:
    tables = {"the file": SCHEMA, **SCHEMA["$defs"]}
    without = [
        f"{name}.{key}"
        for name, table in tables.items()
        for key, document in table["properties"].items()
        if not document.get("description", "").endswith(".")
    ]
    assert without == []
    assert all("Attributes" not in table["description"] for table in tables.values())


def test_schema_lists_known_values_and_allows_plugin_rules() -> None:
    tables = SCHEMA["$defs"]
    assert tables["ModelConfig"]["properties"]["task"]["anyOf"][0] == {"enum": list(AUTO_CLASSES)}
    assert {"enum": list(RULES)} in tables["TransformationConfig"]["properties"]["use"]["anyOf"]
    named = tables["ExportConfig"]["properties"]["passes"]["properties"]
    assert "sum-residuals" in named["onnx"]["items"]["enum"]
    assert is_valid(MODEL | {"transformations": [{"use": "rule-of-a-package", "anything": 1}]})


def test_schema_names_every_rule_and_option() -> None:
    named = {
        rule["properties"]["use"]["const"]: set(rule["properties"]) - {"use", "min_matches", "formats"}
        for rule in SCHEMA["$defs"]["TransformationConfig"]["anyOf"]
        if "const" in rule["properties"]["use"]
    }
    assert named == {name: set(info.options) for name, info in RULES.items()}
