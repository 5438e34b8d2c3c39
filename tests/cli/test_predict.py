"""``optexport predict`` returns the results of the task, from a bundle only."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.pipelines import FillMaskPipeline, TextClassificationPipeline, TokenClassificationPipeline

from optexport import export
from optexport.cli.main import cli
from optexport.errors import ConfigError
from optexport.inference.answers import as_text
from optexport.inference.bundle import Bundle
from tests._helpers import exports, folders
from tests._helpers.folders import TEXTS
from tests._helpers.inputs import give_backtracking
from tests.inference import bundles


def called(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["predict", *map(str, arguments)])


def predicted(*arguments: Any) -> dict[str, Any]:
    done = called(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def reference(task: str, **options: Any) -> Any:
    source = bundles.source(task)
    return pipeline(task, model=str(source), tokenizer=AutoTokenizer.from_pretrained(source), device="cpu", **options)


@pytest.mark.slow
def test_text_classification_matches_the_transformers_pipeline(tmp_path: Path) -> None:
    shutil.copytree(bundles.bundle("text-classification"), tmp_path / "bundle")
    classifier: TextClassificationPipeline = reference("text-classification")
    document = predicted(tmp_path / "bundle", *TEXTS)
    assert document["task"] == "text-classification"
    assert [result["input"] for result in document["results"]] == list(TEXTS)
    for result, expected in zip(
        document["results"], classifier(list(TEXTS), top_k=None, truncation=True, max_length=16), strict=True
    ):
        assert [lines["label"] for lines in result["labels"]] == [lines["label"] for lines in expected]
        scores = [lines["score"] for lines in result["labels"]]
        assert scores == pytest.approx([lines["score"] for lines in expected], abs=1e-5)
    best = document["results"][0]["labels"][0]
    lines = called(tmp_path / "bundle", TEXTS[0]).stdout.splitlines()
    assert lines[0] == TEXTS[0]
    assert lines[1].split() == [best["label"], f"{best['score']:.4f}"]
    assert len(lines) == 4


@pytest.mark.slow
def test_fill_mask_matches_the_transformers_pipeline() -> None:
    filler: FillMaskPipeline = reference("fill-mask")
    text = "the [MASK] sat on the mat"
    (masks,) = predicted(bundles.bundle("fill-mask"), text)["results"][0]["masks"]
    expected = filler(text)
    assert [fill["token"] for fill in masks] == [fill["token_str"] for fill in expected]
    assert [fill["text"] for fill in masks] == [fill["sequence"] for fill in expected]
    assert [fill["score"] for fill in masks] == pytest.approx([fill["score"] for fill in expected], abs=1e-5)
    assert "the text has no [MASK] to fill" in called(bundles.bundle("fill-mask"), "the cat").stdout


@pytest.mark.slow
def test_token_classification_matches_the_transformers_pipeline() -> None:
    labeller: TokenClassificationPipeline = reference("token-classification", ignore_labels=[])
    document = predicted(bundles.bundle("token-classification"), *TEXTS[:2])
    for result, expected in zip(document["results"], labeller(list(TEXTS[:2])), strict=True):
        assert [token["token"] for token in result["tokens"]] == [token["word"] for token in expected]
        assert [token["label"] for token in result["tokens"]] == [token["entity"] for token in expected]


@pytest.mark.slow
def test_next_token_matches_greedy_search() -> None:
    source = bundles.source("text-generation")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    results = predicted(bundles.bundle("text-generation"), *TEXTS)["results"]
    for text, result in zip(TEXTS, results, strict=True):
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=16)
        best = int(model(**encoded).logits[0, -1].argmax())
        assert result["next"][0]["token"] == tokenizer.decode([best])


@pytest.mark.slow
def test_python_gives_the_answers_of_the_command(tmp_path: Path) -> None:
    output = bundles.bundle("text-classification")
    expected = [
        {name: answer[name] for name in answer if name != "input"} for answer in predicted(output, *TEXTS)["results"]
    ]
    bundle = Bundle.load(output)
    assert bundle.predict(list(TEXTS)) == expected
    assert bundle.predict(TEXTS[0]) == expected[:1]
    with pytest.raises(ConfigError, match="expected a text, found int"):
        bundle.predict([TEXTS[0], 3])

    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    image, path = Image.fromarray(pixels), tmp_path / "image.png"
    image.save(path)
    first, *others = Bundle.load(bundles.bundle("image-classification")).predict([path, str(path), image, pixels])
    assert {label["label"] for label in first["labels"]} == {"cat", "dog"}
    assert others == [first] * 3


@pytest.mark.slow
def test_image_is_classified(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    document = predicted(bundles.bundle("image-classification"), tmp_path / "image.png", tmp_path / "image.png")
    first, second = document["results"]
    assert {label["label"] for label in first["labels"]} == {"cat", "dog"}
    assert sum(label["score"] for label in first["labels"]) == pytest.approx(1)
    assert first == second
    absent = called(bundles.bundle("image-classification"), "a text")
    assert absent.exit_code == 2
    assert "a text: the file does not exist (the model takes image files)" in absent.stderr


@pytest.mark.slow
def test_sentences_are_embedded_and_compared(tmp_path: Path) -> None:
    output, expected = bundles.sentences()
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    document = predicted(output, "--data", tmp_path / "texts.jsonl")
    vectors = np.array([result["outputs"]["sentence_embedding"] for result in document["results"]])
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(document["similarity"], expected @ expected.T, atol=1e-5)
    lines = called(output, *TEXTS[:2]).stdout.splitlines()
    assert lines[1].startswith(f"  sentence_embedding [6] {vectors[0, 0]:.4g} ")
    assert lines[4:] == ["cosine similarity", *lines[5:7]]
    assert float(lines[5].split()[1]) == pytest.approx(document["similarity"][0][1], abs=1e-3)


@pytest.mark.slow
def test_named_inputs_are_read_from_a_file(tmp_path: Path) -> None:
    batch = exports.batch()
    rows = [{"x": batch["x"][row].tolist(), "mask": batch["mask"][row].tolist()} for row in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = predicted(exports.exported().output, "--data", tmp_path / "rows.jsonl")
    expected = exports.run(exports.exported(), **batch)["hidden"].numpy()
    hidden = np.array([result["outputs"]["hidden"] for result in document["results"]])
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    for value in ('"a"', "1e39", "[[1e39]]", "1" + 400 * "0"):  # 1e39 overflows float32
        (tmp_path / "rows.jsonl").write_text(f'{{"x": {value}, "mask": [1]}}')
        result = called(exports.exported().output, "--data", tmp_path / "rows.jsonl")
        assert result.exit_code == 2
        assert 'line 1, "x": the value is not a list of float32 numbers' in result.stderr


def test_named_arrays_are_read_from_a_file(tmp_path: Path) -> None:
    batch = {name: tensor.numpy() for name, tensor in exports.batch().items()}
    path, output = tmp_path / "rows.npz", exports.exported().output
    np.savez(path, **batch)
    results = predicted(output, "--data", path)["results"]
    expected = exports.run(exports.exported(), **exports.batch())["hidden"].numpy()
    np.testing.assert_allclose([result["outputs"]["hidden"] for result in results], expected, atol=1e-5)
    assert [result["input"] for result in results] == [f"row {number + 1}" for number in range(len(expected))]
    mistakes = {
        "the inputs need the same number of rows (found x 2, mask 1)": batch | {"mask": batch["mask"][:1]},
        '"masks": the model has no input of this name\nHint: Did you mean "mask"?': {
            "x": batch["x"],
            "masks": batch["x"],
        },
        "row 1, x: expected dtype float32, found float64": batch | {"x": batch["x"].astype("float64")},
        "row 1, inputs: missing mask": {"x": batch["x"]},
        "Hint: Add the first axis: mask[np.newaxis]": batch | {"mask": batch["mask"][0]},
        "(found none)": {},
    }
    for error, arrays in mistakes.items():
        np.savez(path, **arrays)
        result = called(output, "--data", path)
        assert (result.exit_code, f"--data {path}" in result.stderr) == (2, True)
        assert error in result.stderr
    np.savez_compressed(path, **batch)
    damaged = bytearray(path.read_bytes())
    damaged[60:90] = bytes(30)
    for content in (b"no archive", bytes(damaged)):
        path.write_bytes(content)
        result = called(output, "--data", path)
        assert (result.exit_code, "cannot read the file" in result.stderr) == (2, True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "text")
    assert "x is not an array" in called(output, "--data", path).stderr


def test_array_without_a_name_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.ones(3))
    result = called(exports.exported().output, "--data", tmp_path / "rows.npy")
    assert result.exit_code == 2
    assert "Hint: Save with numpy.savez('rows.npz', x=array, mask=array)" in result.stderr


def test_name_of_a_file_is_no_text(tmp_path: Path) -> None:
    """Its name was classified."""
    bundle, path = bundles.bundle("text-classification"), tmp_path / "a.txt"
    missing = called(bundle, path)
    assert (missing.exit_code, f"{path}: the file does not exist" in missing.stderr) == (2, True)
    path.touch()
    existing = called(bundle, "a text", path)
    assert (existing.exit_code, f"{path}: the model takes texts, not files" in existing.stderr) == (2, True)


def test_up_to_16_numbers_of_an_output_are_shown() -> None:
    for size, shown in ((10, 10), (16, 16), (17, 4)):
        (line,) = as_text({"outputs": {"logits": [0.5] * size}})
        assert (line.count("0.5"), line.endswith(" ...")) == (shown, size > shown)


def test_file_of_arrays_may_repeat_constants_of_the_file(weighing: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.ones((2, 2), np.float32), times=[[2, 3], [2, 3]])
    assert len(predicted(weighing, "--data", tmp_path / "rows.npz")["results"]) == 2
    np.savez(tmp_path / "rows.npz", x=np.ones((2, 2), np.float32), times=[[2, 4], [2, 3]])
    assert "the file was exported for the value" in called(weighing, "--data", tmp_path / "rows.npz").stderr


def test_invalid_call_gives_one_message_and_an_exit_code(weighing: Path, tmp_path: Path) -> None:
    bundle = bundles.bundle("text-classification")
    assert called(bundle).exit_code == 2
    assert "no onnx file" in called(weighing, "--data", __file__, "--format", "onnx").stderr
    assert called(tmp_path, "a text").exit_code == 2
    result = called(exports.exported().output, "a text", "--json")
    assert result.exit_code == 2
    assert (
        "the bundle has no tokenizer or processor that makes x, mask from texts or files"
        in json.loads(result.stdout)["error"]
    )
    shutil.copytree(bundle, tmp_path / "bundle")
    (tmp_path / "bundle" / "preprocessor" / "tokenizer.json").write_text("{}")
    changed = called(tmp_path / "bundle", "a text")
    assert changed.exit_code == 4
    assert "preprocessor/tokenizer.json: the file was changed after the bundle was written" in changed.stderr


@pytest.mark.slow
def test_prediction_does_not_depend_on_padding(tmp_path: Path) -> None:
    source = folders.save(bundles.model("text-generation"), tmp_path / "left", padding_side="left")
    output = folders.export(source, formats='["pt2"]').output
    alone = [predicted(output, text)["results"][0] for text in TEXTS]
    assert [pytest.approx(one["next"][0]["score"]) for one in alone] == [
        one["next"][0]["score"] for one in predicted(output, *TEXTS)["results"]
    ]
    bundle = Bundle.load(output)
    assert bundle.tokenizer.padding_side == "left"
    together = bundle(**bundle.preprocess(TEXTS))["logits"]
    for text, logits in zip(TEXTS, together, strict=True):
        own = bundle(**bundle.preprocess(text))["logits"][0]
        np.testing.assert_allclose(logits[: len(own)], own, atol=1e-5)


@pytest.mark.slow
def test_token_model_without_a_tokenizer_returns_its_outputs(tmp_path: Path) -> None:
    model = folders.randomise(bundles.model("text-generation"))
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 5, 10]]), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    output = exports.quick(model, inputs, tmp_path / "bundle").output
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}\n')
    document = predicted(output, "--data", tmp_path / "rows.jsonl")
    assert document["task"] == "text-generation"
    assert np.array(document["results"][0]["outputs"]["logits"]).shape == (4, 14)


@pytest.mark.slow
def test_fully_masked_row_gets_a_prediction(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6], "token_type_ids": [0, 0], "attention_mask": [0, 0]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    document = predicted(bundles.bundle("text-generation"), "--data", tmp_path / "rows.jsonl")
    assert len(document["results"][0]["next"]) == 5


IDS = '{"input_ids": [5, 6], "token_type_ids": [0, 0], "attention_mask": [1, 1]}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "error"),
    [
        (IDS.replace("[5,", "[5.5,"), 'line 2, "input_ids": the value is not a list of int64 numbers'),
        (IDS.replace("[5,", "[9223372036854775813,"), 'line 2, "input_ids": the value is not a list of int64 numbers'),
        (IDS.replace("[5,", "[null,"), 'line 2, "input_ids": the value is not a list of int64 numbers'),
        (IDS.replace("[5,", '["5",'), 'line 2, "input_ids": the value is not a list of int64 numbers'),
        (IDS.replace("token_type", "tokentype"), 'line 2, "tokentype_ids": the model has no input of this name'),
        (IDS.replace("[5, 6]", "[5]"), "line 2, token_type_ids: sequence: expected size 1 as in input_ids, found 2"),
        ('{"text": "a", "label": 1}', 'line 2, "text": a line with "text" cannot have other keys'),
        ('{"input_ids": [5, 6]}', "line 2, inputs: missing token_type_ids"),
        (IDS.replace("5", "5000"), "line 2, model.pt2: the file cannot run on these inputs"),
    ],
)
def test_invalid_line_is_named(line: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"{IDS}\n{line}\n")
    result = called(bundles.bundle("fill-mask"), "--data", tmp_path / "rows.jsonl")
    assert result.exit_code == 2
    assert f"--data {tmp_path / 'rows.jsonl'}, {error}" in result.stderr


class Bytes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 255


@pytest.mark.slow
def test_values_out_of_range_are_refused(tmp_path: Path) -> None:
    """The value 300 wrapped around to 44 in a uint8 input."""
    inputs = {"x": torch.tensor([[0, 255]], dtype=torch.uint8)}
    export(Bytes().eval(), inputs, tmp_path / "bundle", formats=["pt2"], effort="quick")
    for row, code in (("[0, 255]", 0), ("[0, 300]", 2), ("[-1, 0]", 2)):
        (tmp_path / "rows.jsonl").write_text(f'{{"x": {row}}}\n')
        result = called(tmp_path / "bundle", "--data", tmp_path / "rows.jsonl")
        assert result.exit_code == code, result.output
        assert code == 0 or 'line 1, "x": the value is not a list of uint8 numbers' in result.stderr


class Weighing(nn.Module):
    """A module that reads the values of an input, which become constants."""

    def forward(self, x: torch.Tensor, times: torch.Tensor, factor: float = 1.0, mode: str = "plus") -> torch.Tensor:
        for _ in range(int(times[0, 0])):
            x = x * factor
        return x + 1 if mode == "plus" else x - 1


@pytest.fixture(scope="module")
def weighing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = {"x": torch.ones(3, 2), "times": torch.tensor([[2, 3], [2, 3]]), "factor": 0.1, "mode": "minus"}
    output = tmp_path_factory.mktemp("weighing") / "bundle"
    result = export(Weighing().eval(), inputs, output, formats=["torchscript"], effort="quick")
    assert result.manifest.constants == {"factor": 0.1, "mode": "minus", "times": [[2, 3], [2, 3]]}
    return output


@pytest.mark.parametrize("line", ['{"x": [1, 2], "factor": 0.1, "mode": "minus"}', '{"x": [1, 2], "times": [2, 3]}'])
def test_line_may_repeat_constants_of_the_file(line: str, weighing: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(line)
    (answer,) = predicted(weighing, "--data", tmp_path / "rows.jsonl")["results"]
    assert answer["outputs"]["output"] == pytest.approx([-0.99, -0.98])


@pytest.mark.parametrize("constant", ['"factor": 0.2', '"mode": "plus"', '"times": [2, 4]', '"times": [[2], 3]'])
def test_line_with_other_constants_than_the_file_is_refused(constant: str, weighing: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"x": [1, 2], {constant}}}')
    result = called(weighing, "--data", tmp_path / "rows.jsonl")
    assert result.exit_code == 2
    assert f"line 1, {constant.partition(':')[0]}: the file was exported for the value" in result.stderr


def test_constants_are_accepted_with_any_number_type(weighing: Path) -> None:
    bundle, x = Bundle.load(weighing), np.ones((1, 2), np.float32)
    times = torch.tensor([[2, 3], [2, 3]])
    for kind in (times.bfloat16(), times.float().requires_grad_(), times.numpy().astype(np.int32), times.tolist()):
        assert bundle(x=x, times=kind, factor=np.float32(0.1))["output"].shape == (1, 2)
    for wrong in (times + 1, times[0], times.to_sparse(), [[2, 3], [2]], None, "2"):
        with pytest.raises(ConfigError, match=r"times: the file was exported for the value \[\[2, 3\], \[2, 3\]\]"):
            bundle(x=x, times=wrong)


def test_unpaired_surrogate_is_refused(tmp_path: Path) -> None:
    bundle = bundles.bundle("text-classification")
    for arguments in (("a \udcff",), ("--data", tmp_path / "texts.jsonl")):
        (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
        result = called(bundle, *arguments)
        assert result.exit_code == 2
        assert "texts: the tokenizer rejects the texts" in result.stderr
    assert "line 2, texts" in result.stderr


@pytest.mark.slow
def test_text_that_the_tokenizer_rejects_gives_one_message(tmp_path: Path) -> None:
    source = shutil.copytree(bundles.source("text-classification"), tmp_path / "source")
    give_backtracking(source)
    exported = folders.export(source, formats='["pt2"]')
    assert called(exported.output, "a far cat").exit_code == 0
    result = called(exported.output, "x" * 40)
    assert result.exit_code == 2
    assert "texts: the tokenizer rejects the texts: Onig: " in result.stderr
