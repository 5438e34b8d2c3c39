"""Format passes that a config gets if it names none."""

from __future__ import annotations

from typing import Any

import pytest

from optexport._utils.platform import AMX, AVX2, AVX512, processor_flags
from optexport.config import derived
from optexport.config.derived import resolve_passes
from optexport.config.load import validate_settings
from optexport.config.schema import FORMATS, Config
from optexport.exporters.registry import default_passes, list_passes


def config(**tables: Any) -> Config:
    return validate_settings({"model": {"source": "./model"}, **tables}, "config.toml")


@pytest.fixture
def _new_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "processor_flags", lambda: frozenset({AMX, AVX2, AVX512, "sse"}))


def test_passes_depend_on_the_processor() -> None:
    everywhere = ["sum-residuals", "split-linears", "attention"]
    assert default_passes("onnx", ()) == default_passes("onnx", {AVX512}) == everywhere
    assert default_passes("onnx", {AMX}) == [*everywhere, "gemm"]
    assert default_passes("torchscript", {AMX}) == ["shared-masks"]
    assert default_passes("torchscript", {AVX2}) == ["shared-masks", "channels-last"]
    assert default_passes("torchscript", {AVX2, AVX512}) == ["shared-masks", "onednn-linear", "channels-last"]
    assert default_passes("torchscript", {AMX, AVX2, AVX512}) == ["shared-masks", "channels-last"]
    assert default_passes("pt2", {AMX, AVX2, AVX512}) == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_default_is_a_pass_of_its_format(name: str) -> None:
    assert set(default_passes(name, {AMX, AVX2, AVX512})) <= set(list_passes(name))


def test_attention_needs_its_opset() -> None:
    assert "attention" in default_passes("onnx", (), 23)
    assert "attention" not in default_passes("onnx", (), 22)


def test_files_in_lower_precision_have_few_default_passes() -> None:
    assert default_passes("torchscript", {AMX, AVX512}, precision="bfloat16") == ["shared-masks", "onednn-linear"]
    assert default_passes("torchscript", {AVX512}, precision="float16") == []
    assert default_passes("onnx", {AMX}, precision="int8") == []


@pytest.mark.usefixtures("_new_processor")
def test_config_names_the_passes_of_every_format_once_resolved() -> None:
    resolved = resolve_passes(config()).export.passes
    assert resolved == {name: default_passes(name, {AMX, AVX2, AVX512}) for name in FORMATS}


@pytest.mark.usefixtures("_new_processor")
def test_passes_of_the_config_replace_the_defaults_of_their_format() -> None:
    resolved = resolve_passes(config(export={"passes": {"onnx": []}})).export.passes
    assert resolved == {"onnx": [], "torchscript": ["shared-masks", "channels-last"], "pt2": []}


@pytest.mark.usefixtures("_new_processor")
def test_resolved_config_does_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_passes(config())
    monkeypatch.setattr(derived, "processor_flags", frozenset)
    assert resolve_passes(resolved) == resolved


@pytest.mark.usefixtures("_new_processor")
def test_lower_precision_and_other_devices_have_no_default_passes() -> None:
    gates = {"metrics": {"cosine": 0.9}}
    resolved = resolve_passes(config(precision={"onnx": "int8"}, parity=gates)).export.passes
    assert resolved["onnx"] == []
    assert resolved["torchscript"] == ["shared-masks", "channels-last"]
    assert resolve_passes(config(model={"source": "./model", "device": "cuda"})).export.passes == {}


def test_flags_of_this_processor_are_read() -> None:
    assert all(flag and flag == flag.lower() for flag in processor_flags())
