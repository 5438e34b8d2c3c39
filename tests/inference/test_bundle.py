"""Tests of running a bundle without its source."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer, BertForSequenceClassification, ViTForImageClassification

from optexport import Bundle, export, verify
from optexport.bundle import layout
from optexport.cli.predict import read_file
from optexport.errors import BundleError, ConfigError, ExportError
from tests._helpers import exports
from tests._helpers.folders import TEXTS
from tests._helpers.graphs import Program
from tests.inference import bundles

FORMATS = ("onnx", "torchscript", "pt2")


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the bundle of a classifier in another folder."""
    place = tmp_path_factory.mktemp("elsewhere") / "bundle"
    shutil.copytree(bundles.bundle("text-classification"), place)
    return place


def inputs(**changed: Any) -> dict[str, Any]:
    ids = np.array([[2, 5, 6, 3], [2, 9, 11, 3]])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)} | changed


def refusal(bundle: Bundle, **arrays: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        bundle(**arrays)
    return str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("file_format", FORMATS)
def test_texts_give_the_logits_of_the_model_and_its_tokenizer(moved: Path, file_format: str) -> None:
    source = bundles.source("text-classification")
    tokenizer = AutoTokenizer.from_pretrained(source)
    encoded = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        expected = BertForSequenceClassification.from_pretrained(source)(**encoded).logits
    bundle = Bundle.load(moved, file_format)
    assert bundle.format == file_format
    logits = bundle(**bundle.preprocess(TEXTS))["logits"]
    np.testing.assert_allclose(logits, expected.numpy(), atol=1e-6)


def test_a_text_that_is_cut_is_reported(moved: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = Bundle.load(moved)
    assert bundle.preprocess(TEXTS[0])["input_ids"].shape[1] < 16
    assert caplog.messages == []
    assert bundle.preprocess(" ".join([TEXTS[0]] * 20))["input_ids"].shape[1] == 16
    (message,) = caplog.messages
    assert message.endswith("tokens and is cut to 16, the longest that was checked.")


@pytest.mark.parametrize("file_format", FORMATS)
def test_padding_changes_no_row(moved: Path, file_format: str) -> None:
    bundle = Bundle.load(moved, file_format)
    together = bundle(**bundle.preprocess(TEXTS))["logits"]
    alone = [bundle(**bundle.preprocess(text))["logits"][0] for text in TEXTS]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-6)


@pytest.mark.parametrize("file_format", FORMATS)
def test_arrays_and_tensors_of_fewer_bits_give_the_same(moved: Path, file_format: str) -> None:
    bundle = Bundle.load(moved, file_format)
    expected = bundle(**inputs())["logits"]
    arrays = inputs(
        input_ids=torch.tensor([[2, 5, 6, 3], [2, 9, 11, 3]], dtype=torch.int32), attention_mask=np.ones((2, 4), bool)
    )
    np.testing.assert_array_equal(bundle(**arrays)["logits"], expected)


class Half(nn.Module):
    """Takes numbers in bfloat16, computes in float32, and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x.float())
        return y, y.bfloat16()


@pytest.mark.slow
def test_inputs_in_bfloat16_are_tensors_or_rounded_arrays(tmp_path: Path) -> None:
    model = Half().eval()
    dynamic = {"x": {0: "batch"}}
    export(model, {"x": torch.randn(5, 4).bfloat16()}, tmp_path / "bundle", effort="quick", dynamic=dynamic)
    x = torch.randn(2, 4)
    expected, rounded = model(x.bfloat16())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"x": x[0].tolist()}))
    for name in FORMATS:
        bundle = Bundle.load(tmp_path / "bundle", format=name)
        for value in (x.bfloat16(), x.numpy()):
            outputs = bundle(x=value)
            np.testing.assert_allclose(outputs["output_0"], expected.detach().numpy(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(outputs["output_1"], rounded.float().detach().numpy(), rtol=1e-2)
        (query,) = read_file(bundle, tmp_path / "rows.jsonl")
        assert query.arrays is not None
        np.testing.assert_allclose(bundle(**query.arrays)["output_0"], expected[:1].detach().numpy(), atol=1e-6)
    assert all(target.passed for target in verify(tmp_path / "bundle").targets)


def test_an_onnx_file_is_run_without_torch_or_transformers(moved: Path) -> None:
    script = f"""
import sys
import numpy as np
from optexport import Bundle
bundle = Bundle.load({str(moved)!r})
ids = np.array([[2, 5, 3]])
print(bundle(input_ids=ids, attention_mask=ids * 0 + 1, token_type_ids=ids * 0)["logits"].shape)
print([name for name in ("torch", "transformers", "mlflow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "(1, 3)\n[]\n"


def test_invalid_inputs_are_refused_by_name(moved: Path) -> None:
    bundle = Bundle.load(moved)
    expected = "Pass input_ids [batch, sequence] int64; "
    assert 'input_idx: unknown input\nHint: Did you mean "input_ids"?' in refusal(bundle, input_idx=np.ones((1, 2)))
    assert "inputs: missing token_type_ids, attention_mask\nHint: " + expected in refusal(
        bundle, input_ids=np.ones((1, 2), int)
    )
    assert "input_ids: expected dtype int64, found float32" in refusal(
        bundle, **inputs(input_ids=np.ones((2, 4), np.float32))
    )
    assert "input_ids: expected dtype int64, found uint64" in refusal(
        bundle, **inputs(input_ids=np.ones((2, 4), np.uint64))
    )
    assert "input_ids: expected shape [batch, sequence], found [4]" in refusal(
        bundle, **inputs(input_ids=np.ones(4, int))
    )
    assert "attention_mask: sequence: expected size 4 as in input_ids, found 3\nHint: " + expected in refusal(
        bundle, **inputs(attention_mask=np.ones((2, 3), int))
    )
    assert "input_ids: expected a numpy array or a tensor, found list" in refusal(bundle, **inputs(input_ids=[[1, 2]]))
    assert "input_ids: token ids must not be negative" in refusal(bundle, **inputs(input_ids=np.full((2, 4), -1)))
    assert "model.onnx: the file cannot run on these inputs: " in refusal(
        bundle, **inputs(input_ids=np.full((2, 4), 10**6))
    )


@pytest.mark.slow
@pytest.mark.parametrize("file_format", FORMATS)
def test_lack_of_memory_is_not_reported_as_wrong_inputs(file_format: str, tmp_path: Path) -> None:
    pairs = Program(lambda m, x: x @ x.T).eval()
    exports.quick(pairs, {"x": torch.randn(3, 1)}, tmp_path / "b", dynamic=exports.BATCH, formats=[file_format])
    bundle = Bundle.load(tmp_path / "b", file_format)
    with pytest.raises(ExportError, match="there is not enough memory to run the file on these inputs"):
        bundle(x=np.ones((10**7, 1), np.float32))  # the result needs 400 TB, more than the address space


def test_a_changed_tokenizer_or_file_is_refused(moved: Path, tmp_path: Path) -> None:
    for name in ("preprocessor/tokenizer.json", "model.onnx"):
        copied = tmp_path / name.replace("/", "-")
        shutil.copytree(moved, copied)
        content = bytearray((copied / name).read_bytes())
        content[-10] ^= 1
        (copied / name).write_bytes(content)
        with pytest.raises(BundleError, match="the file was changed after the bundle was written"):
            Bundle.load(copied)


def test_extra_file_or_folder_next_to_the_tokenizer_is_refused(moved: Path, tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(moved, copied)
    (copied / "preprocessor" / "more").mkdir()
    with pytest.raises(BundleError, match="preprocessor/more: the manifest does not list this folder"):
        Bundle.load(copied)
    (copied / "preprocessor" / "more").rmdir()
    (copied / "preprocessor" / "tokenizer.py").write_text("")
    with pytest.raises(BundleError, match=r"preprocessor/tokenizer\.py: the manifest does not list this file"):
        Bundle.load(copied)


@pytest.mark.slow
def test_a_moved_bundle_verifies(moved: Path) -> None:
    assert verify(moved).passed


def test_bundle_is_replaceable_unless_it_holds_user_files(moved: Path, tmp_path: Path) -> None:
    copied = tmp_path / "bundle"
    shutil.copytree(moved, copied)
    layout.check_replaceable(copied)
    (copied / "preprocessor" / "notes.md").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"the folder has files that are not part of its bundle: preprocessor/notes\.md"
    ):
        layout.check_replaceable(copied)


def test_tokenizer_folder_has_the_permissions_of_the_bundle() -> None:
    bundle = bundles.bundle("text-classification")
    assert (bundle / "preprocessor").stat().st_mode == bundle.stat().st_mode
    assert (bundle / "preprocessor" / "tokenizer.json").stat().st_mode == (bundle / "manifest.json").stat().st_mode


@pytest.mark.slow
def test_missing_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the bundle has no onnx file\nHint: Use one of the formats pt2\."):
        Bundle.load(bundles.bundle("fill-mask"), "onnx")
    with pytest.raises(ConfigError, match=r"the folder is not a bundle \(manifest\.json is missing\)"):
        Bundle.load(tmp_path)


@pytest.mark.slow
def test_model_without_a_tokenizer_names_its_inputs() -> None:
    bundle = Bundle.load(exports.exported().output)
    assert bundle.application.preprocessors == []
    with pytest.raises(ConfigError) as caught:
        bundle.preprocess("a text")
    assert "the bundle has no tokenizer (the source had none, or the bundle is a part of a generative model)" in str(
        caught.value
    )
    assert "Pass x [batch, sequence, 8] float32; mask [batch, sequence] int64." in str(caught.value)
    outputs = bundle(**exports.batch())
    for name, array in exports.run(exports.exported(), **exports.batch()).items():
        np.testing.assert_allclose(outputs[name], array.numpy(), atol=1e-5)


@pytest.mark.slow
def test_images_give_the_logits_of_the_model_and_its_processor(tmp_path: Path) -> None:
    source = bundles.source("image-classification")
    pixels = np.random.default_rng(0).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")
    batch = processor(images=[Image.fromarray(pixels)] * 3, return_tensors="pt")
    with torch.no_grad():
        expected = ViTForImageClassification.from_pretrained(source)(**batch).logits.numpy()
    bundle = Bundle.load(bundles.bundle("image-classification"))
    logits = bundle(**bundle.preprocess(images=[tmp_path / "image.png", Image.fromarray(pixels), pixels]))["logits"]
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"broken\.png: the file cannot be read as an image"):
        bundle.preprocess(images=tmp_path / "broken.png")
    transparent = np.concatenate([pixels, pixels[..., :1]], axis=-1)
    assert np.array_equal(
        bundle.preprocess(images=transparent)["pixel_values"], bundle.preprocess(images=pixels)["pixel_values"]
    )
    grey = bundle.preprocess(images=[pixels[..., 0], Image.fromarray(pixels[..., 0])])["pixel_values"]
    assert np.array_equal(grey[0], grey[1])
    for image, problem in [
        (pixels / 255, "images: expected dtype uint8, found float64"),
        (torch.tensor(pixels), "images: expected a path, a PIL image or a numpy array, found Tensor"),
        ([], "images: expected one or more images"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            bundle.preprocess(images=image)


def test_invalid_texts_are_refused(moved: Path) -> None:
    bundle = Bundle.load(moved)
    for texts in (3, [3], [], [["a"]]):
        with pytest.raises(ConfigError, match="texts: expected one or more texts"):
            bundle.preprocess(texts)  # type: ignore[arg-type]


@pytest.mark.slow
def test_texts_of_several_lengths_are_refused_without_a_mask(tmp_path: Path) -> None:
    shutil.copytree(bundles.bundle("fill-mask"), tmp_path / "bundle")

    def drop_mask(manifest: dict[str, Any]) -> None:
        manifest["inputs"] = [one for one in manifest["inputs"] if one["name"] != "attention_mask"]

    exports.edit_json(tmp_path / "bundle" / "manifest.json", drop_mask)
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.preprocess(["the cat", "a dog"])["input_ids"].shape == (2, 4)
    with pytest.raises(
        ConfigError, match="the texts have 4, 5 tokens and need padding to 5, but the model has no attention mask"
    ) as caught:
        bundle.preprocess(["the cat", "the cat sat"])
    assert caught.value.hint == "Pass one text at a time."


@pytest.mark.slow
def test_a_text_below_a_fixed_length_is_refused_without_a_padding_token(tmp_path: Path) -> None:
    shutil.copytree(bundles.bundle("fill-mask"), tmp_path / "bundle")

    def fix_length(manifest: dict[str, Any]) -> None:
        for one in manifest["inputs"]:
            one["shape"][1] = 8

    exports.edit_json(tmp_path / "bundle" / "manifest.json", fix_length)
    bundle = Bundle.load(tmp_path / "bundle")
    bundle.tokenizer.pad_token = None
    with pytest.raises(
        ConfigError, match="the texts have 4 tokens and need padding to 8, but the tokenizer has no padding token"
    ) as caught:
        bundle.preprocess("the cat")
    assert caught.value.hint is None
