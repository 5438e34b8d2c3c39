"""Tests of saving tokenizers and processors as data, without code and local paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from optexport.config.inputs import InputsConfig
from optexport.errors import BundleError, ConfigError
from optexport.inputs import preparation
from optexport.loading import preprocessors
from optexport.loading.loader import Pretrained
from tests._helpers.inputs import bert, give_backtracking, save_processors

TEXT_AND_IMAGE = ("input_ids", "attention_mask", "pixel_values")


@pytest.fixture
def beside(tmp_path: Path) -> Pretrained:
    return save_processors(tmp_path / "source")


def written(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_only_the_needed_processors_are_written(beside: Pretrained, tmp_path: Path) -> None:
    saved = preprocessors.save(beside, ("input_ids",), tmp_path / "one")
    assert saved == preprocessors.Saved(("tokenizer",))
    assert set(written(tmp_path / "one")) == {"preprocessor/tokenizer.json", "preprocessor/tokenizer_config.json"}
    assert preprocessors.save(beside, TEXT_AND_IMAGE, tmp_path / "two").kinds == ("tokenizer", "image_processor")
    assert "preprocessor/preprocessor_config.json" in written(tmp_path / "two")
    assert preprocessors.save(beside, ("x",), tmp_path / "three") == preprocessors.Saved()
    assert preprocessors.save(None, TEXT_AND_IMAGE, tmp_path / "three") == preprocessors.Saved()
    assert not (tmp_path / "three").exists()


def test_a_source_without_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), "nobody/has-this"):
        assert preprocessors.save(Pretrained(name, {}), TEXT_AND_IMAGE, tmp_path) == preprocessors.Saved()


def test_earlier_use_of_a_tokenizer_does_not_change_its_files(beside: Pretrained, tmp_path: Path) -> None:
    used = AutoTokenizer.from_pretrained(beside.name)
    used(["the cat", "a"], padding="max_length", truncation=True, max_length=7)
    preprocessors.save(beside, TEXT_AND_IMAGE, tmp_path / "one")
    preprocessors.save(Pretrained(beside.name, {}, used), TEXT_AND_IMAGE, tmp_path / "two")
    assert written(tmp_path / "one") == written(tmp_path / "two")


def test_no_path_of_the_source_is_written(beside: Pretrained, tmp_path: Path) -> None:
    config = Path(beside.name) / "tokenizer_config.json"
    settings = {"name_or_path": str(tmp_path), "vocab_file": str(tmp_path / "vocab.txt"), "tokenizer_file": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    preprocessors.save(beside, TEXT_AND_IMAGE, tmp_path / "bundle")
    for name, content in written(tmp_path / "bundle").items():
        assert str(tmp_path).encode() not in content, name


def test_saved_processors_give_the_same_ids_and_pixels(beside: Pretrained, tmp_path: Path) -> None:
    preprocessors.save(beside, TEXT_AND_IMAGE, tmp_path, longest=5)
    tokenizer = preprocessors.load(tmp_path, "tokenizer")
    texts = ["The cat sat on a mat", "zebra"]
    assert tokenizer(texts).input_ids == AutoTokenizer.from_pretrained(beside.name)(texts).input_ids
    assert tokenizer.model_max_length == 5
    assert preprocessors.load(tmp_path, "image_processor").size == {"height": 16, "width": 16}


def test_tokenizer_with_custom_code_is_omitted_with_a_reason(beside: Pretrained, tmp_path: Path) -> None:
    config = Path(beside.name) / "tokenizer_config.json"
    (Path(beside.name) / "own.py").write_text(
        "from transformers import BertTokenizerFast\nclass Own(BertTokenizerFast):\n    pass\n"
    )
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    trusted = Pretrained(beside.name, {"trust_remote_code": True, "local_files_only": True})
    saved = preprocessors.save(trusted, ("input_ids",), tmp_path / "bundle")
    assert saved.kinds == ()
    assert saved.missing == ("tokenizer: Own is custom code, which is not saved in a bundle",)
    assert not (tmp_path / "bundle").exists()


def test_code_named_by_the_tokenizer_of_a_bundle_is_not_run(beside: Pretrained, tmp_path: Path) -> None:
    preprocessors.save(beside, ("input_ids",), tmp_path)
    folder = tmp_path / preprocessors.FOLDER
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BundleError, match="preprocessor: transformers cannot load the tokenizer"):
        preprocessors.load(tmp_path, "tokenizer")
    assert not (tmp_path / "ran").exists()


def test_unloadable_tokenizer_is_omitted_with_a_reason(beside: Pretrained, tmp_path: Path) -> None:
    (Path(beside.name) / "tokenizer.json").write_text("{}")
    saved = preprocessors.save(beside, ("input_ids",), tmp_path / "bundle")
    assert saved.kinds == ()
    assert saved.missing[0].startswith("tokenizer: ")


def linked(source: Path, aim: Path) -> Pretrained:
    """Moves the files of a folder and leaves links to them. Returns the folder as a source."""
    files = list(source.iterdir())
    aim.mkdir(parents=True)
    for path in files:
        path.rename(aim / path.name)
        path.symlink_to(aim / path.name)
    return Pretrained(str(source), {"local_files_only": True})


def test_link_out_of_the_model_folder_is_not_followed(beside: Pretrained, tmp_path: Path) -> None:
    saved = preprocessors.save(linked(Path(beside.name), tmp_path / "elsewhere"), ("input_ids",), tmp_path / "bundle")
    assert saved.kinds == ()
    assert "is a link out of the model's folder" in saved.missing[0]
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(("source", "aim"), [("m/snapshots/1", "m/blobs"), ("m", "m/..data")], ids=["hub", "mounted"])
def test_links_of_the_hub_cache_and_of_volumes_are_followed(tmp_path: Path, source: str, aim: str) -> None:
    (tmp_path / source).mkdir(parents=True)
    save_processors(tmp_path / source)
    beside = linked(tmp_path / source, tmp_path / aim)
    assert preprocessors.save(beside, ("input_ids",), tmp_path / "bundle").kinds == ("tokenizer",)


def test_tokenizer_pattern_that_takes_too_long_is_an_error(beside: Pretrained, tmp_path: Path) -> None:
    give_backtracking(Path(beside.name))
    with pytest.raises(ConfigError, match=r"the model's tokenizer rejects the texts: Onig: .*retry-limit") as refused:
        preparation.prepare(InputsConfig(texts=["x" * 40]), tmp_path, bert(), beside, 0)
    assert "Give token ids as data instead." in str(refused.value)
