"""Tests that `optexport predict` reads sounds and agrees with transformers."""

from __future__ import annotations

import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    pipeline,
)

from optexport.cli.main import cli
from optexport.errors import ConfigError
from optexport.inference import sounds
from optexport.inference.bundle import Bundle
from tests._helpers import folders
from tests._helpers.models import randomise

RATE = 1000
SIZES = "dynamic.batch = [1, 2]\ndynamic.samples = [200, 2000]"
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"aeinst"]
WAV2VEC2: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": len(LETTERS),
    "classifier_proj_size": 8,
    "id2label": {0: "bark", 1: "meow", 2: "silence"},
}


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Saves an audio model with its feature extractor and tokenizer. Returns the folder."""
    randomise(model)
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(sampling_rate=RATE).save_pretrained(folder)
    (folder / "letters.json").write_text(json.dumps({letter: index for index, letter in enumerate(LETTERS)}))
    Wav2Vec2CTCTokenizer(str(folder / "letters.json")).save_pretrained(folder)
    return folder


def write_wav(path: Path, samples: npt.NDArray[Any], *, rate: int = RATE, channels: int = 1) -> Path:
    """Writes integers [samples, channels] as WAV. Single bytes are unsigned."""
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, samples.itemsize, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, generator = tmp_path_factory.mktemp("sounds"), np.random.default_rng(0)
    noises = (generator.integers(-(2**15), 2**15, size, dtype=np.int16) for size in (800, 950))
    return [write_wav(folder / f"{index}.wav", noise) for index, noise in enumerate(noises)]


def predicted(output: Path, paths: Sequence[Path]) -> list[dict[str, Any]]:
    done = CliRunner().invoke(cli, ["predict", str(output), *map(str, paths), "--json"])
    assert done.exit_code == 0, done.output
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


def reference(task: str, source: Path, **options: Any) -> Any:
    extractor = AutoFeatureExtractor.from_pretrained(source)
    return pipeline(task, model=str(source), feature_extractor=extractor, device="cpu", **options)


@pytest.mark.slow
def test_labels_of_a_sound_equal_those_of_the_pipeline(tmp_path: Path, spoken: list[Path]) -> None:
    source = save(Wav2Vec2ForSequenceClassification(Wav2Vec2Config(**WAV2VEC2)), tmp_path / "wav2vec2")
    output = folders.export(source, task="audio-classification", inputs=SIZES).output
    classifier = reference("audio-classification", source)
    for path, result in zip(spoken, predicted(output, spoken), strict=True):
        expected = classifier({"raw": sounds.read(path, RATE), "sampling_rate": RATE}, top_k=3)
        assert [entry["label"] for entry in result["labels"]] == [entry["label"] for entry in expected]
        scores = [entry["score"] for entry in result["labels"]]
        assert scores == pytest.approx([entry["score"] for entry in expected], abs=1e-5)
    absent = CliRunner().invoke(cli, ["predict", str(output), "a text"])
    assert absent.exit_code == 2
    assert "a text: the file does not exist (the model takes sound files)" in absent.stderr
    bundle = Bundle.load(output)
    with pytest.raises(
        ConfigError,
        match=r"sounds: the sounds have different lengths \(800, 950 samples\)\nHint: Pass one sound at a time",
    ):
        bundle.preprocess(sounds=spoken)
    alike = [np.zeros(300, np.float32), np.ones(300)]
    assert bundle.preprocess(sounds=alike)["input_values"].shape == (2, 300)


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["", '[processing]\noutputs = "probabilities"\n'])
def test_transcript_equals_the_one_of_the_pipeline(lines: str, tmp_path: Path, spoken: list[Path]) -> None:
    source = save(Wav2Vec2ForCTC(Wav2Vec2Config(**WAV2VEC2)), tmp_path / "wav2vec2")
    output = folders.export(source, inputs=SIZES, more=lines).output
    assert Bundle.load(output).application.task == "automatic-speech-recognition"
    writer = reference(
        "automatic-speech-recognition", source, tokenizer=AutoTokenizer.from_pretrained(source), decoder=None
    )
    for path, result in zip(spoken, predicted(output, spoken), strict=True):
        expected = writer({"raw": sounds.read(path, RATE), "sampling_rate": RATE})["text"]
        assert len(expected) > 4
        assert result["transcript"] == expected
    stdout = CliRunner().invoke(cli, ["predict", str(output), str(spoken[0])]).stdout
    assert stdout == f"{spoken[0]}\n  {predicted(output, spoken[:1])[0]['transcript']}\n"


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_are_read(width: int, tmp_path: Path) -> None:
    samples = np.array([[-1.0, 0.5], [0.25, -0.25], [0.75, 0.25]])
    integers = (samples * 2 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    content = b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in integers.flatten())
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((2, width, RATE, 0, "NONE", ""))
        file.writeframes(content)
    np.testing.assert_array_equal(sounds.read(tmp_path / "sound.wav", RATE), samples.mean(-1).astype(np.float32))


def test_invalid_sounds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    fast = write_wav(tmp_path / "other.wav", np.zeros(8, np.int16), rate=44100)
    empty = write_wav(tmp_path / "empty.wav", np.zeros(0, np.int16))
    cut = write_wav(tmp_path / "cut.wav", np.ones(8, np.int16))
    cut.write_bytes(cut.read_bytes()[:-3])
    assert sounds.read(cut, RATE).shape == (6,)
    wide = write_wav(tmp_path / "wide.wav", np.ones(8, np.int32))
    content = bytearray(wide.read_bytes())
    content[34:36] = (64).to_bytes(2, "little")
    wide.write_bytes(content)
    for sound, problem in (
        (tmp_path / "text.wav", "the file cannot be read as WAV with integer samples"),
        (tmp_path / "absent.wav", "the file cannot be read as WAV with integer samples"),
        (fast, "the file has 44100 samples per second, but the model needs 1000"),
        (empty, "the file has no samples"),
        (wide, "expected samples of at most 32 bits, found 64"),
        (np.zeros((2, 3)), r"expected floating point numbers .*found float64 \[2, 3\]"),
        (np.zeros(3, np.int16), r"expected floating point numbers .*found int16 \[3\]"),
        (3, "expected a path or a numpy array, found int"),
    ):
        with pytest.raises(ConfigError, match=problem):
            sounds.read(sound, RATE)
