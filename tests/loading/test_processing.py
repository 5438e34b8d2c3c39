"""Tests of processing inside the files, which must not change the answers of a bundle."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils import _pytree as pytree
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    pipeline,
)
from transformers.modeling_outputs import ImageClassifierOutput

from optexport.config.load import load_config
from optexport.config.schema import ProcessingConfig
from optexport.errors import ConfigError, OptexportError, ParityError
from optexport.inference.bundle import Bundle
from optexport.loading.loader import Loaded, Pretrained
from optexport.loading.processing import Classes, add_processing, get_processing, image_scale
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests._helpers import folders
from tests._helpers.folders import TEXTS
from tests._helpers.inputs import TINY
from tests.inference import bundles

# Resizes, crops, and scales each channel differently.
CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 18},
    "crop_size": {"height": 16, "width": 16},
}
IMAGES = "[inputs.dynamic]\nbatch = [1, 4]"


def save_images(folder: Path, processor: dict[str, Any] = CLIP) -> Path:
    folders.save(bundles.model("image-classification"), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def export(source: Path, *lines: str, **options: Any) -> Result:
    return folders.export(source, more="\n".join(["[processing]", *lines, ""]), **options)


def answers(output: Path, inputs: list[str], file_format: str | None = None) -> list[dict[str, Any]]:
    bundle = Bundle.load(output, file_format)
    return bundle.predict(inputs)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    paths = [folder / f"{index}.png" for index in range(3)]
    for path, size in zip(paths, ((20, 24), (31, 17), (16, 16)), strict=True):
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Result]]:
    """Returns a cached function: an image classifier, and its export to a format with scaling and ranked labels."""

    @functools.cache
    def classify(file_format: str) -> tuple[Path, Result]:
        source = save_images(tmp_path_factory.mktemp("processing") / "vit")
        lines = ("normalize = true", 'outputs = "top_k"', "k = 2")
        return source, export(source, *lines, inputs=IMAGES, formats=f'["{file_format}"]')

    return classify


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["onnx", "torchscript", "pt2"])
def test_file_with_scaling_and_ranking_agrees_with_the_pipeline(
    file_format: str, classified: Callable[[str], tuple[Path, Result]], images: list[Path]
) -> None:
    source, result = classified(file_format)
    processor = AutoImageProcessor.from_pretrained(source, backend="pil")
    classifier: Any = pipeline("image-classification", model=str(source), image_processor=processor, device="cpu")
    for path, answer in zip(images, answers(result.output, list(map(str, images)), file_format), strict=True):
        expected = classifier(str(path), top_k=2)
        assert [label["label"] for label in answer["labels"]] == [label["label"] for label in expected]
        scores = [label["score"] for label in answer["labels"]]
        assert scores == pytest.approx([label["score"] for label in expected], abs=1e-6)


@pytest.mark.slow
def test_file_with_scaling_takes_uint8_images(
    classified: Callable[[str], tuple[Path, Result]], images: list[Path]
) -> None:
    _, result = classified("onnx")
    (spec,) = result.manifest.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("pixel_values", "uint8", ["batch", 3, 16, 16])
    assert [(spec.name, spec.dtype, spec.shape) for spec in result.manifest.outputs] == [
        ("labels", "int64", ["batch", 2]),
        ("probabilities", "float32", ["batch", 2]),
    ]
    bundle = Bundle.load(result.output)
    pixels = bundle.preprocess(images=images)["pixel_values"]
    assert pixels.dtype == np.uint8
    assert pixels.max() > 200
    # The processor of the bundle alone gives the inputs of the files too.
    processor = AutoImageProcessor.from_pretrained(result.output / "preprocessor", backend="pil")
    pictures = [Image.open(path) for path in images]
    np.testing.assert_array_equal(processor(images=pictures, return_tensors="np")["pixel_values"], pixels)
    with pytest.raises(ConfigError, match="expected dtype uint8, found float32"):
        bundle(pixel_values=pixels.astype(np.float32))


def multi_label() -> nn.Module:
    moods = {"problem_type": "multi_label_classification", "id2label": {0: "good", 1: "bad", 2: "neither"}}
    return BertForSequenceClassification(BertConfig(**TINY, **moods))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "make", "outputs", "options"),
    [
        ("text-classification", multi_label, "probabilities", {"top_k": None}),
        ("text-classification", None, "argmax", {"top_k": 1}),
    ],
)
def test_text_labels_agree_with_the_pipeline(
    task: str, make: Callable[[], Any] | None, outputs: str, options: dict[str, Any], tmp_path: Path
) -> None:
    source = folders.save((make or (lambda: bundles.model(task)))(), tmp_path / "bert")
    output = export(source, f'outputs = "{outputs}"', formats='["pt2"]').output
    classifier: Any = pipeline(task, model=str(source), tokenizer=AutoTokenizer.from_pretrained(source), device="cpu")
    expected = classifier(list(TEXTS), truncation=True, max_length=16, **options)
    for answer, labels in zip(answers(output, list(TEXTS)), expected, strict=True):
        assert [label["label"] for label in answer["labels"]] == [label["label"] for label in labels]
        scores = [label["score"] for label in answer["labels"]]
        assert scores == pytest.approx([label["score"] for label in labels], abs=1e-6)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("task", ["token-classification", "fill-mask"])
def test_answers_for_each_token_equal_those_from_logits(task: str, tmp_path: Path) -> None:
    source = folders.save(bundles.model(task), tmp_path / task)
    output = export(source, 'outputs = "probabilities"', formats='["pt2"]').output
    assert [spec.name for spec in Bundle.load(output).manifest.outputs] == ["probabilities"]
    texts = ["the [MASK] sat on a mat"]
    actual, expected = (pytree.tree_leaves(answers(bundle, texts)) for bundle in (output, bundles.bundle(task)))
    assert len(actual) == len(expected) > 4
    for value, expected_value in zip(actual, expected, strict=True):
        is_number = isinstance(expected_value, float)
        assert value == (pytest.approx(expected_value, abs=1e-6) if is_number else expected_value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "line", "message"),
    [
        (
            "text-classification",
            "normalize = true",
            "takes no images: it has no input pixel_values\nHint: Remove processing.normalize.",
        ),
        ("fill-mask", 'outputs = "top_k"', "labels need logits of shape [batch, classes], found 3 axes"),
        (
            "text-classification",
            'outputs = "top_k"',
            "processing.k: expected at most 3, the number of classes, found 5",
        ),
        (
            lambda: BertModel(BertConfig(**TINY)),
            'outputs = "softmax"',
            "has no output logits (found last_hidden_state, pooler",
        ),
        (
            lambda: BertForSequenceClassification(BertConfig(**TINY, problem_type="regression")),
            'outputs = "probabilities"',
            "processing.outputs: the model is a regression model",
        ),
    ],
)
def test_unsupported_processing_is_refused(
    make: str | Callable[[], Any], line: str, message: str, tmp_path: Path
) -> None:
    source = folders.save(make() if callable(make) else bundles.model(make), tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        export(source, line)
    assert str(caught.value.location).startswith(f"{tmp_path / 'model.toml'}: processing.")
    assert message in str(caught.value)
    assert not (tmp_path / "model-bundle").exists()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (None, "the image processor of the model cannot be loaded"),
        ({**CLIP, "do_rescale": False, "do_normalize": False}, "neither rescales nor normalizes images"),
        ({"image_processor_type": "EfficientNetImageProcessor"}, "without a scale, the images are float32"),
        # This processor pads with zeros after normalizing.
        ({"image_processor_type": "SamImageProcessor"}, "the results are not a scale of the unscaled images"),
        # The same, but only for batches of images of two sizes.
        ({"image_processor_type": "DetrImageProcessor"}, "the results are not a scale of the unscaled images"),
    ],
)
def test_unsupported_image_processor_is_refused(processor: dict[str, Any] | None, message: str, tmp_path: Path) -> None:
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    with pytest.raises(ConfigError, match="processing.normalize: ") as caught:
        image_scale(Pretrained(str(tmp_path), {}), "processing.normalize")
    assert message in str(caught.value)
    assert caught.value.hint is not None


def test_images_that_are_scaled_already_are_refused(tmp_path: Path) -> None:
    source = save_images(tmp_path / "vit")
    np.savez(
        tmp_path / "images.npz", pixel_values=np.linspace(0, 1, 2 * 3 * 16 * 16, dtype="float32").reshape(2, 3, 16, 16)
    )
    inputs = f"data = '{tmp_path / 'images.npz'}'"
    with pytest.raises(
        ConfigError, match="inputs: pixel_values: processing.normalize needs images in uint8, found float32"
    ):
        export(source, "normalize = true", inputs=inputs)


def test_processing_of_a_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").touch()
    config = tmp_path / "config.toml"
    config.write_text('[model]\nsource = "model.pt2"\n[processing]\noutputs = "softmax"\n', encoding="utf-8")
    with pytest.raises(
        ConfigError, match="processing.outputs: processing cannot be added to a .pt2 or TorchScript file"
    ):
        load_config(config)


def test_original_model_and_its_names_are_not_changed(tmp_path: Path) -> None:
    source = save_images(tmp_path / "vit")
    model = bundles.model("image-classification").eval()
    before = set(model.state_dict())
    config = ProcessingConfig(normalize=True, outputs="sigmoid")
    processed = add_processing(Loaded(model, pretrained=Pretrained(str(source), {})), config).model
    assert set(model.state_dict()) == before
    assert not get_processing(model).scales
    assert set(processed.state_dict()) == before | {"image_shift", "image_factor"}
    assert isinstance(processed, type(model))
    assert type(processed).__qualname__ == type(model).__qualname__
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    assert list(processed(pixels)) == ["probabilities"]  # by position too
    assert isinstance(model(pixels.float()), ImageClassifierOutput)


def test_probabilities_are_computed_over_the_class_axis() -> None:
    logits = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(Classes("softmax").of(logits)["probabilities"].sum(1), torch.ones(2, 4, 5))
    torch.testing.assert_close(Classes("softmax").of(logits[0])["probabilities"].sum(-1), torch.ones(3, 4))
    torch.testing.assert_close(Classes("sigmoid").of(logits)["probabilities"], logits.sigmoid())
    for invalid in (logits[0, 0, 0], logits[:, :1]):
        with pytest.raises(ConfigError, match="softmax of a single class is always 1"):
            Classes("softmax").of(invalid)
    # Two probabilities are 1 in float32, and the larger logit must still be the first label.
    outputs = Classes("sigmoid", 2).of(torch.tensor([[40.0, -1.0, 50.0]]))
    assert outputs["labels"].tolist() == [[2, 0]]
    assert outputs["probabilities"].tolist() == [[1.0, 1.0]]


TIES = """import torch

class Ties(torch.nn.Module):
    def forward(self, x):
        return torch.stack([x.sum(-1) * 3.0, (x * 3.0).sum(-1)], -1)
"""


@pytest.mark.slow
def test_labels_decided_by_rounding_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "ties_to_decide.py").write_text(TIES, encoding="utf-8")
    config = tmp_path / "config.toml"
    config.write_text(
        '[model]\nsource = "python:ties_to_decide:Ties"\n[processing]\noutputs = "argmax"\n'
        '[inputs.tensors.x]\nshape = [400, 50]\n[parity]\neffort = "quick"\n[export]\nformats = ["onnx"]\n'
        "[tracking]\nenabled = false\n",
        encoding="utf-8",
    )
    with pytest.raises(OptexportError) as caught:
        run(config)
    assert isinstance(caught.value, ParityError)
    assert "so they depend on rounding" in str(caught.value)
    assert not (tmp_path / "build" / "ties_to_decide-Ties").exists()
