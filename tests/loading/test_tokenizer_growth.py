"""No tokenizer makes texts longer without bounds, and those of known models are taken."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from optexport.loading import tokenizer_growth

REGEX = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
# As tokenizers made of a sentencepiece model have it.
LLAMA = {
    "normalizer": {
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            REGEX,
        ]
    },
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}, {"Sequence": {}}], "pair": []},
    "decoder": {"decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}]},
}
# As those have it that write marks of punctuation in one way.
PUNCTUATION = {"normalizer": {"normalizers": [{"pattern": {"Regex": r"\p{Pd}[\s,]?"}, "content": "-"}] * 40}}
DOUBLED = {"pattern": {"String": "a"}, "content": "aa"}


def _charsmap(*replacements: str) -> dict[str, str]:
    """As sentencepiece writes it, of an empty table."""
    text = "\0".join((*replacements, "")).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + text).decode()}


# The longest of Unicode's compatible forms has 18 letters.
T5 = {"normalizer": {"normalizers": [_charsmap("a", "\u0635" * 18), REGEX]}}
BOMBS: dict[str, dict[str, Any]] = {
    "replacing": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLED] * 10}},
    "replacing in a sequence of sequences": {"normalizer": {"normalizers": [{"normalizers": [DOUBLED] * 2}] * 5}},
    "replacing nothing": {"normalizer": {"normalizers": [{"pattern": {"Regex": "x*"}, "content": "x"}] * 10}},
    "prepending": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "charsmaps": {"normalizer": {"normalizers": [_charsmap("b", "a" * 40)] * 2}},
    "bytes of bytes": {"pre_tokenizer": {"pretokenizers": [{"type": "ByteLevel"}] * 5}},
    "a template of one text": {"post_processor": {"single": [{"Sequence": {"id": "A"}}] * 1001, "pair": []}},
    "both ways": {"normalizer": {"normalizers": [DOUBLED] * 6}, "decoder": {"decoders": [DOUBLED] * 6}},
}


def _check(folder: Path, settings: object) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer_growth.check(folder, {})


@pytest.mark.parametrize("settings", [LLAMA, PUNCTUATION, T5, {}, [], {"normalizer": None}], ids=lambda s: str(s)[:20])
def test_what_tokenizers_do_is_taken(tmp_path: Path, settings: object) -> None:
    _check(tmp_path, settings)


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_makes_a_text_more_than_a_thousand_times_as_long_is_refused(tmp_path: Path, bomb: str) -> None:
    with pytest.raises(ValueError, match="times as long"):
        _check(tmp_path, BOMBS[bomb])


def test_a_number_that_python_does_not_read_hides_nothing(tmp_path: Path) -> None:
    bomb = json.dumps({**BOMBS["replacing"], "version": 7}).replace("7", "7" * 5000)
    (tmp_path / "tokenizer.json").write_text(bomb)
    with pytest.raises(ValueError, match="times as long"):
        tokenizer_growth.check(tmp_path, {})


def test_a_file_of_something_else_need_be_no_json(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{'of': 'a user'}")
    tokenizer_growth.check(tmp_path, {})
