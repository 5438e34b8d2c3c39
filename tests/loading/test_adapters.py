"""Tests of adapters: merged models and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification, BertForSequenceClassification

from optexport.config.schema import ModelConfig
from optexport.errors import SourceError
from optexport.loading import loader
from tests._helpers import models

# peft itself uses this deprecated attribute of transformers.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny BERT without a head."""
    folder = tmp_path_factory.mktemp("adapters") / "base"
    models.model("bert").save_pretrained(folder)
    return folder


def adapted(base: Path, folder: Path, **options: Any) -> torch.nn.Module:
    """Returns a classifier with a random adapter, and saves the adapter to a folder."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(base)
    settings = {"r": 2, "target_modules": ["query", "value"], "modules_to_save": ["classifier"], **options}
    model_with_adapter = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for trained in (parameter for parameter in model_with_adapter.parameters() if parameter.requires_grad):
            trained.normal_(std=0.3)  # a new adapter has no effect
    model_with_adapter.save_pretrained(folder)
    return model_with_adapter.eval()


def load(base: Path, task: str = "text-classification", **options: Any) -> torch.nn.Module:
    return loader.load(ModelConfig(source=base.name, task=task, **options), base.parent).model


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}], ids=str)
def test_merged_model_gives_the_logits_of_the_adapted_model(
    options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    original = adapted(base, tmp_path / "adapter", **options)
    merged = load(base, adapter=str(tmp_path / "adapter"))
    assert type(merged) is BertForSequenceClassification
    assert not any("lora" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, original(IDS).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_head_without_weights_is_refused(base: Path, tmp_path: Path) -> None:
    adapted(base, tmp_path / "adapter", modules_to_save=None)
    with pytest.raises(SourceError, match=r"such as classifier\.\w+, and would be random"):
        load(base, adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
def test_missing_or_extra_adapter_weights_are_refused(base: Path, tmp_path: Path) -> None:
    adapted(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    missing = next(name for name in weights if "lora_B" in name)
    save_file({name: weight for name, weight in weights.items() if name != missing}, file)
    with pytest.raises(
        SourceError, match="1 weights do not match the model; for example, .*lora_B.* is missing in the adapter"
    ):
        load(base, adapter=str(tmp_path / "adapter"))
    save_file({**weights, "base_model.model.other.lora_B.weight": weights[missing].clone()}, file)
    with pytest.raises(SourceError, match="for example, other.lora_B.weight does not exist in"):
        load(base, adapter=str(tmp_path / "adapter"))


def test_adapter_config_that_imports_a_module_is_refused(base: Path, tmp_path: Path) -> None:
    """``--no-custom-code`` did not stop this import. The adapter may be in a subfolder of the model."""
    (tmp_path / "model" / "0_Transformer").mkdir(parents=True)
    shutil.copytree(base, tmp_path / "model", dirs_exist_ok=True)
    file = tmp_path / "model" / "0_Transformer" / "adapter_config.json"
    file.write_text(json.dumps({"peft_type": "LORA", "megatron_config": {"x": 1}, "megatron_core": "megatron.core"}))
    with pytest.raises(SourceError, match="the key megatron_config makes peft import a module"):
        load(tmp_path / "model", task="feature-extraction")


@pytest.mark.slow
def test_a_pickle_is_not_loaded(base: Path, tmp_path: Path) -> None:
    adapted(base, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(SourceError, match="pickled weights are not loaded"):
        load(base, adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
def test_adapter_that_cannot_be_merged_is_refused(base: Path, tmp_path: Path) -> None:
    settings = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3)
    peft.get_peft_model(AutoModel.from_pretrained(base), settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(SourceError, match="PROMPT_TUNING adapter cannot be merged"):
        load(base, "feature-extraction", adapter=str(tmp_path / "adapter"))


@pytest.mark.slow
def test_folder_without_a_valid_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the folder has no adapter_config.json"):
        load(base, adapter=str(tmp_path))
    adapted(base, tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["nowhere"]}))
    with pytest.raises(SourceError, match="peft could not load the adapter"):
        load(base, adapter=str(tmp_path / "adapter"))
