"""What is known of the rules without torch is what the rules themselves say."""

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
    module, _, name = info.location.partition(":")
    return getattr(importlib.import_module(module), name)


def built_in_rules() -> set[type]:
    """Every rule that some file of the package defines."""
    modules = [
        importlib.import_module(f"optexport.transformations.{found.name}") for found in pkgutil.iter_modules(folder)
    ]
    return {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Rule) and value not in (Rule, ReversibleRule)
    }


def test_every_built_in_rule_is_listed_and_every_listed_rule_is_there() -> None:
    assert {rule_class(info) for info in RULES.values()} == built_in_rules()
    assert len({info.location for info in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("name", RULES)
def test_the_traits_listed_are_those_of_the_class(name: str) -> None:
    info, cls = RULES[name], rule_class(RULES[name])
    assert issubclass(cls, ReversibleTransformation) is info.reversible
    assert cls().preserves_computation is info.preserves_computation
    assert info.summary


@pytest.mark.parametrize("name", RULES)
def test_the_options_listed_are_the_fields_of_the_class(name: str) -> None:
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
def test_a_rule_is_named_like_its_class(name: str) -> None:
    assert registry.canonical_name(rule_class(RULES[name]).__name__) == name


def test_the_preset_holds_only_what_preserves_the_computation() -> None:
    assert PRESET
    assert all(RULES[name].preserves_computation for name in PRESET)
    assert "fuse-bias-in-linear" not in PRESET


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_loaded_with_its_defaults_and_with_its_options(name: str, tmp_path: Path) -> None:
    cls = rule_class(RULES[name])
    assert registry.load(name, {}, tmp_path, "here") == cls()
    options = {key: not option.default for key, option in RULES[name].options.items() if option.type is bool}
    registry.check(name, options, "here")
    assert registry.load(name, options, tmp_path, "here") == cls(**options)


@given(st.sampled_from(list(RULES)), st.sampled_from(["-", "_", ""]), st.sampled_from([str.upper, str.title, str]))
def test_a_rule_is_known_however_it_is_spelled(name: str, hyphen: str, case: Any) -> None:
    assert registry.canonical_name(case(name.replace("-", hyphen))) == name


@given(st.text(), st.dictionaries(st.text(max_size=5), st.booleans() | st.integers() | st.text(max_size=5), max_size=2))
def test_any_name_with_any_options_is_accepted_or_explained(name: str, options: dict[str, Any]) -> None:
    for used in (name, f"python:{name}", "merge-linears", "change-true-div-to-mul-by-inverse"):
        known = RULES.get(registry.canonical_name(used) or "")
        try:
            registry.check(used, options, "here")
        except ConfigError as error:
            said = str(error)
        else:
            said = "here." if used.startswith("python:") or (known and set(options) <= set(known.options)) else ""
        assert said.startswith("here.")


@given(st.text(max_size=8), st.lists(st.text(max_size=8), max_size=4))
def test_a_hint_names_a_known_word(word: str, known: list[str]) -> None:
    hint = did_you_mean(word, known)
    assert hint
    if word and word in known:
        assert hint == f'Did you mean "{word}"?'


def plugin(tmp_path: Path, text: str) -> str:
    """A module of its own name for each test, since modules are imported once."""
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


def test_a_plugin_lies_beside_the_config_and_takes_its_options(tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    before = list(sys.path)
    loaded = registry.load(f"python:{name}:Mine", {"depth": 5}, tmp_path, "here")
    assert isinstance(loaded, Transformation)
    assert vars(loaded)["depth"] == 5
    assert sys.path == before


def test_a_plugin_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    assert 'Did you mean "Mine"?' in refusal(f"{name}:Mien", tmp_path)
    assert refusal(f"{name}:Nope", tmp_path).endswith("Known are: MergeLinears, Mine.")
    assert refusal(f"{name}:Half", tmp_path) == "here: Half must define match and rewrite"
    assert "depht" in refusal(f"{name}:Mine", tmp_path, depht=5)
    assert "no Transformation" in refusal(f"{name}:dataclass", tmp_path)
    told = refusal("not_there:Mine", tmp_path)
    assert "not_there cannot be imported" in told
    assert told.endswith("Install it, or put not_there.py beside the config.")


@pytest.mark.parametrize("value", ["number", "made"])
def test_a_plugin_that_is_no_class_is_explained(value: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, PLUGIN)
    assert "here: " in refusal(f"{name}:{value}", tmp_path)


@pytest.mark.parametrize(
    "text",
    ["raise ValueError('x')", "import sys; sys.exit()", "def broken(:", "import not_there", "raise SystemExit('x')"],
)
def test_a_module_that_does_not_import_is_explained(text: str, tmp_path: Path) -> None:
    name = plugin(tmp_path, text)
    before = list(sys.path)
    told = refusal(f"{name}:Mine", tmp_path)
    assert f"{name} cannot be imported" in told
    assert "beside the config" not in told  # where it lies
    assert told.endswith("Install not_there." if "not_there" in text else f"where python -c 'import {name}' fails.")
    assert sys.path == before


def test_a_module_may_change_the_path_that_it_was_found_on(tmp_path: Path) -> None:
    name = plugin(tmp_path, f"import sys\nsys.path.remove({str(tmp_path)!r})\n{PLUGIN}")
    before = list(sys.path)
    assert isinstance(registry.load(f"python:{name}:Mine", {}, tmp_path, "here"), Transformation)
    assert sys.path == before


def test_modules_of_one_name_beside_two_configs_are_told_apart(tmp_path: Path) -> None:
    """Two runs in one process must not export the same model twice."""
    for place in ("first", "second"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "module_of_one_name.py").write_text(f"place = {place!r}\n", encoding="utf-8")
    for place in ("first", "second", "first"):
        assert registry.import_from("module_of_one_name:place", tmp_path / place, "here") == place
    with pytest.raises(ConfigError, match="module_of_one_name cannot be imported"):
        registry.import_from("module_of_one_name:place", tmp_path, "here")
    assert isinstance(registry.load("merge-linears", {}, tmp_path, "here"), MergeLinears)


def test_a_plugin_whose_making_fails_is_explained(tmp_path: Path) -> None:
    text = "    def __init__(self, depth=1):\n        raise ValueError('too deep')\n"
    rule = plugin(tmp_path, f"from optexport.transformations import RemoveNoOps\n\nclass Mine(RemoveNoOps):\n{text}")
    assert "too deep" in refusal(f"{rule}:Mine", tmp_path)


def test_a_class_of_something_else_is_not_made(tmp_path: Path) -> None:
    name = plugin(tmp_path, "class Mine:\n    def __init__(self):\n        raise ValueError('it was called')\n")
    told = refusal(f"{name}:Mine", tmp_path)
    assert "a class of no Transformation, and is not called" in told
    assert "Name a subclass of Transformation" in told


def test_a_built_in_rule_goes_by_its_class_too(tmp_path: Path) -> None:
    assert registry.load("MergeLinears", {}, tmp_path, "here") == MergeLinears()


@pytest.mark.parametrize("task", AUTO_CLASSES)
def test_the_class_of_every_task_is_in_transformers(task: str) -> None:
    cls = getattr(transformers, AUTO_CLASSES[task])
    assert callable(cls.from_pretrained)
