"""The registry describes the rules as they are, and loads plugins."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError, did_you_mean
from optexport.transformations import MergeLinears, ReversibleTransformation, Rule, Transformation, registry
from optexport.transformations import __path__ as folder
from optexport.transformations.registry import PRESET, RULES, RuleInfo
from optexport.transformations.rule import ReversibleRule


def rule_class(info: RuleInfo) -> Any:
    module, _, name = info.import_path.partition(":")
    return getattr(importlib.import_module(module), name)


def built_in_rules() -> set[type]:
    """Returns all rules that the files of the package define."""
    modules = [importlib.import_module(f"optexport.transformations.{m.name}") for m in pkgutil.iter_modules(folder)]
    return {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Rule) and value not in (Rule, ReversibleRule)
    }


def test_the_registry_lists_exactly_the_built_in_rules() -> None:
    assert {rule_class(info) for info in RULES.values()} == built_in_rules()
    assert len({info.import_path for info in RULES.values()}) == len(RULES)


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", RULES)
def test_listed_properties_match_the_class(name: str) -> None:
    info, cls = RULES[name], rule_class(RULES[name])
    assert issubclass(cls, ReversibleTransformation) is info.reversible
    assert cls().preserves_computation is info.preserves_computation
    assert info.summary


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", RULES)
def test_listed_options_match_the_fields_of_the_class(name: str) -> None:
    cls = rule_class(RULES[name])
    assert cls.__dataclass_params__.frozen
    types = get_type_hints(cls)
    fields = {
        field.name: (get_origin(types[field.name]) or types[field.name], field.default)
        for field in dataclasses.fields(cls)
    }
    assert {key: (option.type, option.default) for key, option in RULES[name].options.items()} == fields
    assert all(type(option.default) is option.type and option.summary for option in RULES[name].options.values())


@pytest.mark.parametrize("name", RULES)
def test_rule_name_matches_its_class(name: str) -> None:
    assert registry.canonical_name(rule_class(RULES[name]).__name__) == name


def test_the_preset_preserves_the_computation() -> None:
    assert PRESET
    assert all(RULES[name].preserves_computation for name in PRESET)
    assert "fuse-bias-in-linear" not in PRESET


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_loaded_with_defaults_and_with_options(name: str, tmp_path: Path) -> None:
    cls = rule_class(RULES[name])
    assert registry.load(name, {}, tmp_path, "here") == cls()
    options = {key: not option.default for key, option in RULES[name].options.items() if option.type is bool}
    registry.check(name, options, "here")
    assert registry.load(name, options, tmp_path, "here") == cls(**options)


@pytest.mark.slow
@given(st.sampled_from(list(RULES)), st.sampled_from(["-", "_", ""]), st.sampled_from([str.upper, str.title, str]))
def test_a_rule_is_found_in_any_spelling(name: str, hyphen: str, case: Any) -> None:
    assert registry.canonical_name(case(name.replace("-", hyphen))) == name


@given(st.text(), st.dictionaries(st.text(max_size=5), st.booleans() | st.integers() | st.text(max_size=5), max_size=2))
def test_any_name_and_options_are_accepted_or_explained(name: str, options: dict[str, Any]) -> None:
    for used in (name, f"python:{name}", "merge-linears", "change-true-div-to-mul-by-inverse"):
        info = RULES.get(registry.canonical_name(used) or "")
        try:
            registry.check(used, options, "here")
        except ConfigError as error:
            message = str(error)
        else:
            message = "here." if used.startswith("python:") or (info and set(options) <= set(info.options)) else ""
        assert message.startswith("here.")


@given(st.text(max_size=8), st.lists(st.text(max_size=8), max_size=4))
def test_a_hint_suggests_a_known_word(word: str, words: list[str]) -> None:
    hint = did_you_mean(word, words)
    assert hint
    if word and word in words:
        assert hint == f'Did you mean "{word}"?'


def plugin(tmp_path: Path, text: str) -> str:
    """Writes a module with a different name for each test, because modules are imported once."""
    name = f"plugin_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def refusal(name: str, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        registry.load(f"python:{name}", options, tmp_path, "here")
    assert caught.value.location == "here"
    return str(caught.value)


PLUGIN = """
from dataclasses import dataclass
from optexport.transformations import Match, MergeLinears, Rule, Transformation

class Half(Rule):
    pass

class Mine(Transformation):
    def __init__(self, depth=1):
        self.depth = depth

    def transform(self, graph_module):
        return graph_module

made = MergeLinears()
number = 3
"""


def test_a_plugin_is_loaded_from_the_folder_with_options(tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    before = list(sys.path)
    loaded = registry.load(f"python:{name}:Mine", {"depth": 5}, tmp_path, "here")
    assert isinstance(loaded, Transformation)
    assert vars(loaded)["depth"] == 5
    assert sys.path == before


def test_an_unusable_plugin_is_explained(tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    assert 'Did you mean "Mine"?' in refusal(f"{name}:Mien", tmp_path)
    assert refusal(f"{name}:Nope", tmp_path).endswith("Choose one of: MergeLinears, Mine.")
    assert refusal(f"{name}:Half", tmp_path) == "here: Half must define match and rewrite"
    assert "depht" in refusal(f"{name}:Mine", tmp_path, depht=5)
    assert "not a Transformation" in refusal(f"{name}:dataclass", tmp_path)
    message = refusal("not_there:Mine", tmp_path)
    assert "not_there cannot be imported" in message
    assert message.endswith("Install it, or put not_there.py into the folder of the config.")


def test_a_module_with_the_placeholder_of_init_is_explained(tmp_path: Path) -> None:
    name = plugin(tmp_path, "from MODULE import Model")
    assert refusal(f"{name}:Mine", tmp_path).endswith(
        f"Replace MODULE in {name}.py by the module of the model's class."
    )


@pytest.mark.parametrize("value", ["number", "made"])
def test_a_plugin_that_is_not_a_class_is_explained(value: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    assert "here: " in refusal(f"{name}:{value}", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["raise ValueError('x')", "import sys; sys.exit()", "def broken(:", "import not_there", "raise SystemExit('x')"],
)
def test_a_module_that_fails_to_import_is_explained(text: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, text)
    before = list(sys.path)
    message = refusal(f"{name}:Mine", tmp_path)
    assert f"{name} cannot be imported" in message
    assert "folder of the config" not in message  # it exists already
    assert message.endswith("Install not_there." if "not_there" in text else f"run python -c 'import {name}'.")
    assert sys.path == before


def test_a_module_may_change_the_import_path(tmp_path: Path) -> None:
    name = plugin(tmp_path, f"import sys\nsys.path.remove({str(tmp_path)!r})\n{PLUGIN}")
    before = list(sys.path)
    assert isinstance(registry.load(f"python:{name}:Mine", {}, tmp_path, "here"), Transformation)
    assert sys.path == before


def test_plugin_with_a_failing_constructor_is_explained(tmp_path: Path) -> None:
    text = "    def __init__(self, depth=1):\n        raise ValueError('too deep')\n"
    rule = plugin(tmp_path, f"from optexport.transformations import RemoveNoOps\n\nclass Mine(RemoveNoOps):\n{text}")
    assert "too deep" in refusal(f"{rule}:Mine", tmp_path)


def test_an_unrelated_class_is_not_called(tmp_path: Path) -> None:
    name = plugin(tmp_path, "class Mine:\n    def __init__(self):\n        raise ValueError('it was called')\n")
    message = refusal(f"{name}:Mine", tmp_path)
    assert "not a subclass of Transformation, so it is not called" in message
    assert "Name a subclass of Transformation" in message


def test_a_built_in_rule_is_found_by_its_class_name(tmp_path: Path) -> None:
    assert registry.load("MergeLinears", {}, tmp_path, "here") == MergeLinears()


@pytest.mark.sample(10)
@pytest.mark.parametrize("task", AUTO_CLASSES)
def test_the_class_of_every_task_exists_in_transformers(task: str) -> None:
    cls = getattr(transformers, AUTO_CLASSES[task])
    assert callable(cls.from_pretrained)
