"""Tests that exported generative models give the tokens of ``model.generate``."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from optexport import export_generation, verify
from optexport.bundle import digest_json
from optexport.errors import BundleError, ConfigError
from optexport.generation import export, tokens
from optexport.generation.result import GenerationResult
from optexport.generation.runtime import Generator
from tests.generation import models

# Removed when the tests end.
_PLACE = tempfile.TemporaryDirectory(prefix="optexport-tests-")

# Lengths, batch sizes and paddings are not the exported ones.
_HELD_OUT = [[7], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49], [12, 60, 3], [9, 9, 9, 9]]


@functools.cache
def exported() -> GenerationResult:
    """Returns the result of `export_generation`. Tests share it and must not change it."""
    return export_generation(models.make("gpt2"), models.prompts("gpt2"), Path(_PLACE.name) / "gpt2", effort="quick")


@functools.cache
def generators(file_format: str) -> Generator:
    return Generator.load(exported().output, file_format)


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
@pytest.mark.parametrize("rows", [1, 4])
def test_files_continue_new_prompts_as_generate_does(file_format: str, rows: int) -> None:
    model, result = models.make("gpt2"), exported()
    prompt = models.left_padded(_HELD_OUT[:rows])
    inputs = {name: tensor.numpy() for name, tensor in prompt.items()}
    actual = Generator.load(result.output, file_format).generate(**inputs, max_new_tokens=64, eos_token_id=())
    assert actual[:, :-64].tolist() == prompt["input_ids"].tolist()
    assert actual[:, -64:].tolist() == tokens.likeliest_tokens(model, prompt, 64).tolist()


@pytest.mark.slow
def test_finished_row_is_padded_as_generate_does() -> None:
    model, result, prompt = models.make("gpt2"), exported(), models.left_padded(_HELD_OUT)
    free = tokens.likeliest_tokens(model, prompt, 12)
    eos = int(free[1, 4])
    own = model.generate(**prompt, do_sample=False, max_new_tokens=12, eos_token_id=eos)
    inputs = {name: tensor.numpy() for name, tensor in prompt.items()}
    actual = Generator.load(result.output).generate(**inputs, max_new_tokens=12, eos_token_id=eos)
    assert actual.tolist() == own.tolist()
    assert eos in actual[1, 10:15].tolist()


def test_summary_names_the_ignored_generation_settings(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((exported().output / "generation.json").read_bytes())
    assert (exported().left_out, document["left_out"]) == ((), [])
    replace(exported(), left_out=("repetition_penalty", "num_beams")).show(Console())
    assert replace(exported(), left_out=("num_beams",)).as_json()["left_out"] == ["num_beams"]
    text = capsys.readouterr().out
    assert "Tokens compared with greedy model.generate" in exported().summary()
    assert "Tokens" in exported()._repr_html_()
    assert repr(exported()).startswith("GenerationResult(decoder, ")
    assert "ignored settings of the model's generation_config: repetition_penalty, num_beams" in text


def test_document_names_ignored_settings_and_tokens() -> None:
    model = models.make("gpt2")
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [7, 8], None
    document = export._document(model, {}, [], None)
    assert (document["left_out"], document["eos"], document["pad"]) == (["repetition_penalty"], [7, 8], None)


def test_one_decoder_file_is_checked_on_all_tokens() -> None:
    result = exported()
    assert sorted(path.name for path in result.output.iterdir()) == ["decoder", "generation.json"]
    dims = result.parts["decoder"].manifest.dims
    assert (dims["past_sequence"].min, dims["sequence"].min, dims["batch"].min) == (0, 1, 1)
    assert [(comparison.format, comparison.rows, comparison.tokens) for comparison in result.tokens] == [
        (name, rows, 64) for name in ("torchscript", "onnx", "pt2") for rows in (3, 1, 1)
    ]
    assert all(comparison.compared == 64 * comparison.rows or comparison.ties for comparison in result.tokens)


def test_each_part_is_a_bundle_that_verifies() -> None:
    assert verify(exported().output / "decoder").passed


def test_export_replaces_only_an_earlier_export(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="is not a bundle"):
        export_generation(models.make("gpt2"), models.prompts("gpt2"), tmp_path / "mine")
    shutil.copytree(exported().output, tmp_path / "old")
    (tmp_path / "old" / "decoder" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="notes.txt"):
        export_generation(models.make("gpt2"), models.prompts("gpt2"), tmp_path / "old")
    assert (tmp_path / "old" / "decoder" / "notes.txt").read_text() == "kept"


def test_negative_tokens_mean_none() -> None:
    model = models.make("gpt2")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = -1, -1
    document = export._document(model, {}, [], None)
    assert (document["eos"], document["pad"]) == ([], None)


def test_prompt_without_a_mask_has_no_padding() -> None:
    ids = torch.tensor([[3, 4, 5]])
    assert export._with_mask({"input_ids": ids})["attention_mask"].tolist() == [[1, 1, 1]]
    assert list(export._with_mask({"input_features": ids})) == ["input_features"]


def test_metrics_without_lower_precision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics apply to a decoder in lower precision only"):
        export_generation(models.make("gpt2"), models.prompts("gpt2"), tmp_path / "out", metrics={"cosine": 0.9})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change",
    [
        {"eos": None},
        {"eos": 3},
        {"pad": -5},
        {"start": "x"},
        {"recompute_length": 3.5},
        {"version": 2},
        {"eos": [1.5]},
    ],
    ids=str,
)
def test_invalid_document_is_refused_without_a_traceback(change: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported().output, tmp_path / "changed"))
    document = json.loads((folder / "generation.json").read_bytes())
    del document["digest"]
    for forged in (
        document | change,
        {key: value for key, value in document.items() if key not in {*change} - {"recompute_length"}},
    ):
        digest_json.write(folder / "generation.json", forged)
        if forged != document:
            with pytest.raises(BundleError, match="the document does not match its schema"):
                Generator.load(folder)


def test_a_changed_part_and_a_part_of_another_export_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(exported().output, folder)
    document = folder / "generation.json"
    text = document.read_text()
    document.write_text(text.replace('"pad": 0', '"pad": 3'))
    with pytest.raises(BundleError, match="own digest"):
        Generator.load(folder)
    document.write_text(text)
    with (folder / "decoder" / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match="the file was changed after"):
        Generator.load(folder)
    (folder / "notes.md").touch()
    with pytest.raises(BundleError, match=r"notes\.md: the path is not part of the export"):
        Generator.load(folder)


def test_invalid_generate_calls_are_refused(tmp_path: Path) -> None:
    generator = Generator.load(exported().output)
    ids = np.array([[5, 6, 0]])
    with pytest.raises(ConfigError, match="a row has padding at its end"):
        generator.generate(ids, np.array([[1, 1, 0]]))
    with pytest.raises(ConfigError, match="at least 1"):
        generator.generate(ids, max_new_tokens=0)
    with pytest.raises(ConfigError, match="inputs are missing: input_ids, attention_mask"):
        generator.generate()
    with pytest.raises(ConfigError, match="no file was exported in the format openvino"):
        Generator.load(exported().output, "openvino")
    with pytest.raises(ConfigError, match=r"the folder has no generation\.json"):
        Generator.load(tmp_path)


@pytest.mark.sample(4)
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"input_ids": [[5.5, 6.0]]}, "input_ids: expected dtype int64, found float64"),
        ({"input_ids": [[5], [6, 7]]}, "the rows of an input have different lengths"),
        ({"input_ids": "a text"}, "input_ids: expected dtype int64, found <U6"),
        ({"input_ids": [5, 6]}, r"input_ids: expected shape \[batch, sequence\], found \[2\]"),
        ({"input_ids": np.ones((0, 3), np.int64)}, "input_ids: the input is empty"),
        ({"input_ids": [[5, -6]]}, "input_ids: token ids must not be negative"),
        ({"input_ids": [[5, 6000]]}, "the exported files fail on these inputs"),
        (
            {"input_ids": [[5]] * 2, "input_features": np.ones((1, 2, 3), np.float32)},
            "the model has no input of this name",
        ),
        ({"input_features": np.ones((1, 2, 3), np.float32)}, "input_features: the model has no input of this name"),
        ({"attention_mask": [[1]]}, "inputs are missing: input_ids"),
        ({"input_ids": [[5]], "max_new_tokens": 2.5}, "max_new_tokens: the number must be at least 1"),
        ({"input_ids": [[5]], "eos_token_id": "a"}, "eos_token_id: 'a' is not a token id"),
        ({"input_ids": [[5] * 250], "max_new_tokens": 20}, "at most as many tokens as the model has positions"),
    ],
)
def test_invalid_arguments_are_refused_in_every_format(inputs: dict[str, Any], text: str, file_format: str) -> None:
    with pytest.raises(ConfigError, match=text):
        generators(file_format).generate(**inputs)


@pytest.mark.slow
def test_model_with_few_positions_is_checked_at_smaller_sizes(tmp_path: Path) -> None:
    model = models.make("gpt2", n_positions=24)
    prompts = [models.left_padded([[*range(3, 15)]]), {k: v.int() for k, v in models.left_padded([[7]]).items()}]
    result = export_generation(model, prompts, tmp_path / "out", formats=["pt2"], effort="quick", new_tokens=8)
    assert any("index out of range" in text for text in result.parts["decoder"].manifest.parity.left_out)
    assert [comparison.compared for comparison in result.tokens] == [8, 8]


@pytest.mark.slow
def test_files_recompute_the_cache_when_generate_does(tmp_path: Path) -> None:
    """Phi-3 changes the rotary factors of all positions beyond its original context length."""
    model, prompt = models.phi3(turn=16), models.left_padded([[5, 6, 7], [8, 9]])
    result = export_generation(model, prompt, tmp_path / "out", formats=["pt2"], effort="quick", new_tokens=24)
    assert [comparison.compared for comparison in result.tokens] == [48, 24]
    generator = Generator.load(tmp_path / "out", "pt2")
    for rows in ([[7]], [[*range(3, 19)]], [[*range(3, 20)], [5]], [[*range(3, 40)]]):
        prompt = models.left_padded(rows)
        actual = generator.generate(**prompt, max_new_tokens=24, eos_token_id=())
        assert actual[:, -24:].tolist() == tokens.likeliest_tokens(model, prompt, 24).tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_continues_as_generate_does_in_every_format(family: str, tmp_path: Path) -> None:
    model = models.make(family)
    result = export_generation(model, models.prompts(family), tmp_path / family)
    assert {comparison.format for comparison in result.tokens} == {"torchscript", "onnx", "pt2"}
    assert all(comparison.tokens == 64 for comparison in result.tokens)
    assert all(comparison.compared == comparison.rows * 64 for comparison in result.tokens)
    if family in models.WITHOUT_ENCODER:
        prompt = models.left_padded(_HELD_OUT)
    elif family == "t5":
        prompt = models.left_padded(_HELD_OUT[:3])
    else:
        prompt = {"input_features": torch.linspace(-2, 2, 3 * 8 * 40).reshape(3, 8, 40).exp().sin()}
    inputs = {name: tensor.numpy() for name, tensor in prompt.items()}
    expected = tokens.likeliest_tokens(model, prompt, 64)
    for file_format in ("onnx", "torchscript", "pt2"):
        actual = Generator.load(result.output, file_format).generate(**inputs, max_new_tokens=64, eos_token_id=())
        assert actual[:, -64:].tolist() == expected.tolist()
