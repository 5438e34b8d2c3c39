"""Tests of the registry of formats, and the laws of every built-in format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optexport.errors import ConfigError
from optexport.exporters import Format, FormatPass, registry
from optexport.exporters.registry import BUILT_IN, get_format
from optexport.testing import check_format, format_models


class Small(Format):
    name = "small"
    file_name = "model.small"
    runtime = "nothing"

    def write(self, graph: Any, path: Path, passes: Sequence[str]) -> str | None:
        raise NotImplementedError

    def open(self, path: Path, outputs: Sequence[str], device: str) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("small", "'small' is not a subclass of optexport.exporters.Format"),
        (Small(), "is not a subclass of optexport.exporters.Format"),
        (type("Taken", (Small,), {"name": "onnx"}), "Taken.name is the name of a built-in format"),
    ],
    ids=["text", "object", "taken"],
)
def test_check_format_refuses_what_is_no_format(wrong: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_format(wrong)


def test_unknown_format_is_refused_with_the_most_similar_name() -> None:
    with pytest.raises(ConfigError, match="unknown format") as caught:
        get_format("openvimo")
    assert caught.value.hint == 'Did you mean "openvino"? Or install the package that defines it.'


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_format_is_valid(name: str) -> None:
    assert registry.find_problem(type(get_format(name)), name) is None
    assert get_format(name).file_name in get_format(name).list_files(get_format(name).file_name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "Small"}, "in lower-case letters and digits"),
        ({"name": "other"}, "must be the name of the entry point"),
        ({"file_name": "folder/model.small"}, "must have its own suffix"),
        ({"file_name": "model"}, "must have its own suffix"),
        ({"file_name": "model.json"}, "must have its own suffix"),
        ({"file_name": "model.onnx"}, "must have its own suffix"),
        ({"runtime": None}, "must set runtime"),
        ({"runtime": ""}, "must set runtime"),
    ],
)
def test_invalid_class_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert registry.find_problem(Small, "small") is None
    problem = registry.find_problem(type("Changed", (Small,), change), "small")
    assert problem is not None
    assert reason in problem


def test_class_without_methods_is_refused() -> None:
    problem = registry.find_problem(type("Empty", (Format,), {"name": "small"}), "small")
    assert problem == "Empty must define open and write"
    assert registry.find_problem(dict, "small") == "<class 'dict'> is not a subclass of optexport.exporters.Format"


def test_registered_format_is_known_within_the_block() -> None:
    with registry.registered(Small):
        assert "small" in registry.list_formats()
        assert registry.find_format_of_file("a.small") == "small"
    assert "small" not in registry.list_formats()
    assert registry.find_format_of_file("a.small") is None


def test_default_passes_depend_on_flags_and_opset() -> None:
    class Passes(Small):
        passes = (
            FormatPass("always", "", is_default=True),
            FormatPass("never", ""),
            FormatPass("new", "", is_default=True, default_flag="avx9", min_opset=30),
        )

    assert Passes().default_passes(()) == ["always"]
    assert Passes().default_passes({"avx9"}, 30) == ["always", "new"]
    assert Passes().default_passes({"avx9"}, 29) == ["always"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_format_keeps_the_laws(name: str) -> None:
    check_format(type(get_format(name)))


def test_openvino_keeps_the_laws_for_a_small_model() -> None:
    check_format(type(get_format("openvino")), {"numbers": format_models()["numbers"]})
