"""Tests of data files and images as inputs."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel

from optexport.config.inputs import InputsConfig
from optexport.inputs import user_data
from optexport.inputs.data_lines import stack_records
from optexport.inputs.preparation import prepare
from optexport.loading.loader import Pretrained
from tests._helpers.inputs import TINY, Maker, Rows, bert, shapes
from tests.tiers import examples


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


# JSON lines


def test_lines_of_text_are_texts(maker: Maker) -> None:
    from_lines = maker(data=maker.lines({"text": "the cat"}, {"text": "a dog ran"}))
    assert torch.equal(from_lines.example["input_ids"], maker(texts=["the cat", "a dog ran"]).example["input_ids"])


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"], ids=ascii)
def test_unicode_separators_inside_a_line_do_not_end_it(separator: str, maker: Maker) -> None:
    assert maker(data=maker.lines({"text": f"the{separator}cat"}, {"text": "a dog"})).user_batches


def test_byte_order_mark_and_windows_line_ends_are_accepted(maker: Maker) -> None:
    (maker.folder / "lines.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "the cat"}\r\n\r\n{"text": "a dog"}\r\n')
    assert maker(data="lines.jsonl").user_batches[0]["input_ids"].shape[0] == 2


@pytest.mark.parametrize("lines", [([1, 2], [0.5, 0.7, 0.3]), ([0.5, 0.7, 0.3], [1, 2]), ([1, 2], [0.5, 0.7])])
def test_integers_and_floats_in_one_column_become_floats(lines: tuple[list[float], list[float]]) -> None:
    """All rows had the dtype of the first row, so 0.7 became 0. Shorter rows are padded."""
    batch = stack_records({number: {"x": line} for number, line in enumerate(lines)}, nn.Identity(), "lines.jsonl")
    assert batch["x"].dtype == torch.float32
    for row, line in zip(batch["x"], lines, strict=True):
        assert torch.equal(row[: len(line)], torch.tensor(line, dtype=torch.float32))
        assert not row[len(line) :].any()


def test_error_about_lines_of_text_names_the_config_key(maker: Maker) -> None:
    assert maker.refusal(data=maker.lines({"text": "zebra"})).startswith("inputs.data: lines.jsonl")
    message = maker.refusal_without_processors(data=maker.lines({"text": "the cat"}))
    assert message.startswith("inputs.data: lines.jsonl")


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (['{"x": [1.0]}', "", '{"x": "one"}'], 'line 3, "x": the value is neither a number'),
        (['{"x": [true, false]}', '{"x": [3, 7, 5]}'], 'line 2, "x": some lines have numbers, others true or false'),
        (['{"x": [1.0], "y": [[1], [2, 3]]}'], 'line 1, "y": the value is neither a number'),
        (['{"x": [1.0]}', '{"x": null}'], 'line 2, "x": the value is neither a number'),
        (['{"x": [1.0]}', '{"x": []}'], 'line 2, "x": the list is empty'),
        (
            ['{"x": [[1.0]]}', '{"x": [[1.0, 2.0]]}'],
            'line 2, "x": wrong shape (expected [1, 1] as in line 1, found [1, 2])',
        ),
        (['{"x": [1.0]}', '{"x": [1.0]}', '{"y": [1.0]}'], "line 3: the keys differ from the keys of other lines"),
        (["3"], "line 1: the line is not a JSON object"),
        ([""], "the file is empty"),
        (['{"x": [1.0]}', '{"x": [1.0'], "line 2 is not JSON: Expecting ',' delimiter at column 11"),
        (["x,y", "1,2"], "Give a file with one JSON object per line"),
        (['{"input_ids": 5}'], 'line 1, "input_ids": the value is not a list of token ids'),
        (['{"x": [1.0]}', '{"x": [1e300]}'], 'line 2, "x": a number is outside the range of float32'),
        (['{"text": "the cat"}', '{"text": 3}'], 'line 2: "text" must be a string (found int)'),
        (['{"x": ' + "[" * 100_000], "line 1 cannot be read: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_error_in_a_line_names_the_line_and_the_key(lines: list[str], expected: str, maker: Maker) -> None:
    (maker.folder / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    message = maker.refusal(Rows(), data="lines.jsonl")
    assert message.startswith("inputs.data: lines.jsonl")
    assert expected in message


def test_ids_of_several_choices_get_no_mask_of_tokens() -> None:
    batch = stack_records({1: {"input_ids": [[1, 2, 3], [4, 5, 6]]}}, nn.Identity(), "lines.jsonl")
    assert set(batch) == {"input_ids"}


@settings(max_examples=examples(50))
@given(st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=9), min_size=1, max_size=5))
def test_lines_of_ids_are_padded_and_masked(ids: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.jsonl"
        path.write_text("\n".join(json.dumps({"input_ids": row}) for row in ids), encoding="utf-8")
        (batch,) = prepare(InputsConfig(data="ids.jsonl"), path.parent, bert(), None, 0).user_batches
    longest = max(map(len, ids))
    assert batch["input_ids"].tolist() == [row + [0] * (longest - len(row)) for row in ids]
    assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (longest - len(row)) for row in ids]
    assert batch["input_ids"].dtype is torch.int64


def test_ids_are_padded_with_the_pad_token_of_the_model(maker: Maker) -> None:
    model = BertModel(BertConfig(**TINY, pad_token_id=4)).eval()
    data = maker.lines({"input_ids": [5, 6], "token_type_ids": [1, 1]}, {"input_ids": [7], "token_type_ids": [1]})
    (batch,) = maker(model, data=data).user_batches
    assert batch["input_ids"].tolist() == [[5, 6], [7, 4]]
    assert batch["token_type_ids"].tolist() == [[1, 1], [1, 0]]


def test_mask_in_the_data_is_not_changed(maker: Maker) -> None:
    (batch,) = maker(data=maker.lines({"input_ids": [5, 6], "attention_mask": [0, 1]})).user_batches
    assert batch["attention_mask"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{}],
        [[5, 6]],
        [3],
        [{"text": "the cat"}, {"input_ids": [5]}],
        [{"text": "the cat", "input_ids": [5]}, {"text": "the cat"}],
        [{"input_ids": "the cat"}],
        [{"input_ids": None}],
        [{"input_ids": 5}],
        [{"input_ids": []}],
        [{"input_ids": []}, {"input_ids": [5, 6]}],
        [{"input_ids": [[5, 6], [5]]}],
        [{"input_ids": [5, 6]}, {"input_ids": [[5, 6]]}],
        [{"text": 5}],
        [{"text": ["the", "cat"]}],
        [{"text": None}],
        [{"inputs_ids": [5]}],
    ],
    ids=json.dumps,
)
def test_lines_without_valid_inputs_are_refused(records: list[Any], maker: Maker) -> None:
    maker.refusal(data=maker.lines(*records))


@pytest.mark.parametrize("name", ["token_type_ids", "attention_mask"])
def test_inputs_of_unequal_length_are_refused_on_a_declared_axis(name: str, maker: Maker) -> None:
    data = maker.lines({"input_ids": [5, 6], name: [1]})
    message = maker.refusal(data=data, dynamic={"batch": [1, 8], "sequence": [1, 16]})
    assert "sequence" in message
    assert name in message


# Files of every kind


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"text": "a"}{"text": "b"}', b"text"], ids=ascii)
@pytest.mark.parametrize("suffix", [".jsonl", ".npz", ".safetensors"])
def test_a_damaged_file_is_refused_by_its_name(suffix: str, content: bytes, maker: Maker) -> None:
    (maker.folder / f"data{suffix}").write_bytes(content)
    message = maker.refusal(data=f"data{suffix}")
    problems = ("the file cannot be read", "line 1 is not JSON")
    assert message.startswith(tuple(f"inputs.data: data{suffix}: {problem}" for problem in problems))
    assert "unsafe" not in message  # the message must not advise to load untrusted code


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@settings(max_examples=examples(40))
@given(fraction=st.floats(0, 0.99), flipped=st.integers(0, 255))
def test_a_file_cut_short_or_changed_is_read_or_refused(suffix: str, fraction: float, flipped: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        store(path, {"x": torch.ones(2, 3)})
        content = path.read_bytes()
        place = int(fraction * len(content))
        maker = Maker(Path(folder))
        path.write_bytes(content[:place])
        maker.refusal(Rows(), data=path.name)
        path.write_bytes(content[:place] + bytes([content[place] ^ flipped]) + content[place + 1 :])
        try:
            assert maker(Rows(), data=path.name).user_batches
        except Exception as error:
            assert type(error).__name__ == "ConfigError"  # noqa: PT017


@pytest.mark.parametrize("name", ["data.txt", "data.npy", "data.pt", "data", ".npz"])
def test_a_file_of_another_kind_is_refused(name: str, maker: Maker) -> None:
    (maker.folder / name).write_bytes(b"x")
    assert "Use .safetensors, .npz or .jsonl." in maker.refusal(data=name)


def store(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_arrays_are_loaded_unchanged(suffix: str, maker: Maker) -> None:
    stored = {"x": torch.randn(3, 4), "y": torch.arange(6).reshape(3, 2)}
    store(maker.folder / f"data{suffix}", stored)
    inputs = maker(Rows(), data=f"data{suffix}")
    assert all(torch.equal(inputs.user_batches[0][name], tensor) for name, tensor in stored.items())
    assert all(inputs.user_batches[0][name].dtype is tensor.dtype for name, tensor in stored.items())
    assert shapes(inputs) == {"x": [3, 4], "y": [3, 2]}


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"x": np.zeros((0, 4), "float32")},
        {"x": np.array(["a", "b"])},
        {"x": np.array([{}], dtype=object)},
        {"x": np.zeros((2, 4)), "z": np.zeros((2, 4))},
        {"x": np.zeros((2, 4)), "y": np.zeros((3, 4))},
    ],
    ids=["none", "empty", "text", "objects", "unknown name", "batches that differ"],
)
def test_invalid_arrays_are_refused(arrays: dict[str, Any], maker: Maker) -> None:
    np.savez(maker.folder / "data.npz", **arrays)
    maker.refusal(Rows(), data="data.npz", dynamic={"batch": [1, 8]})


@pytest.mark.parametrize("dtype", ["complex128", "uint64"])
def test_unsupported_dtypes_are_refused(dtype: str, maker: Maker) -> None:
    np.savez(maker.folder / "data.npz", x=np.zeros((2, 4), dtype), y=np.zeros((2, 4)))
    assert f"the dtype of x, {dtype}, is not supported by the files of a bundle" in maker.refusal(
        Rows(), data="data.npz"
    )


def test_arrays_larger_than_memory_are_refused_before_reading(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed file of 2.3 MB expanded to gigabytes of zeros."""
    np.savez_compressed(maker.folder / "data.npz", x=np.zeros((2, 4096)), y=np.zeros((2, 4)))
    monkeypatch.setattr(user_data, "free_memory", lambda: 1 << 16)
    assert "the arrays do not fit into memory (expected 0.0 GiB free, found 0.0 GiB)" in maker.refusal(
        Rows(), data="data.npz"
    )
    monkeypatch.setattr(user_data, "free_memory", lambda: 1 << 20)
    assert shapes(maker(Rows(), data="data.npz")) == {"x": [2, 4096], "y": [2, 4]}


def test_first_axis_is_unchanged_if_no_batch_is_declared(maker: Maker) -> None:
    np.savez(maker.folder / "data.npz", x=np.zeros((2, 4), "float32"), y=np.arange(5))
    assert shapes(maker(Rows(), data="data.npz")) == {"x": [2, 4], "y": [5]}


# Images


class Pixels(nn.Module):
    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return pixel_values


def picture(path: Path) -> str:
    image = pytest.importorskip("PIL.Image")
    image.fromarray((np.arange(20 * 24 * 3) % 251).astype(np.uint8).reshape(20, 24, 3)).save(path)
    return path.name


def test_images_are_processed_by_the_image_processor(maker: Maker) -> None:
    name = picture(maker.folder / "a.png")
    assert shapes(maker(Pixels(), images=[name, name])) == {"pixel_values": [2, 3, 16, 16]}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5])
def test_broken_image_is_refused_by_its_name(fraction: float, maker: Maker) -> None:
    good = picture(maker.folder / "good.png")
    content = (maker.folder / good).read_bytes()
    (maker.folder / "bad.png").write_bytes(content[: int(fraction * len(content))])
    message = maker.refusal(Pixels(), images=[good, "bad.png"])
    assert message.startswith("inputs.images")
    assert "bad.png" in message


def test_images_need_a_processor(maker: Maker) -> None:
    name = picture(maker.folder / "a.png")
    assert maker.refusal_without_processors(images=[name]).startswith("inputs.images: the model has no")
    empty = Pretrained(str(maker.folder), {"local_files_only": True})
    assert maker.refusal(Pixels(), empty, images=[name]).startswith("inputs.images: ")


def test_images_without_pillow_are_an_error_with_install_hint(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    name = picture(maker.folder / "a.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install -c constraints.txt -e '.[images]'" in maker.refusal(Pixels(), images=[name])
