"""Tests of the ``[inputs]`` table of a config: texts, random tensors, axes and ranges."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from transformers import (
    BertConfig,
    BertTokenizerFast,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
    XLNetConfig,
    XLNetModel,
)

from optexport.config.inputs import InputsConfig
from optexport.errors import ConfigError
from optexport.inputs.preparation import prepare
from optexport.loading.loader import Pretrained
from optexport.signature.signature import Dim
from tests._helpers.inputs import LONGEST, TINY, WORDS, Maker, Rows, save_processors, shapes
from tests.tiers import examples


class Anything(nn.Module):
    """A plain module with any keyword inputs."""

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        return next(iter(tensors.values()))


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    return Maker(tmp_path)


# Texts


def test_texts_are_encoded_padded_and_masked(maker: Maker) -> None:
    (batch,) = maker(texts=["the cat sat", "the dog ran on the mat"]).user_batches
    assert batch["input_ids"].tolist() == [[2, 5, 6, 7, 3, 0, 0, 0], [2, 5, 11, 12, 8, 5, 10, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids"}


def test_texts_are_truncated_to_the_model_or_to_max_length(maker: Maker) -> None:
    long = ["the cat " * 40]
    assert shapes(maker(texts=long))["input_ids"][1] == LONGEST
    assert shapes(maker(texts=long, max_length=9))["input_ids"][1] == 9


def test_texts_are_truncated_to_the_limit_of_the_tokenizer(maker: Maker, tmp_path: Path) -> None:
    """RoBERTa has two more positions than tokens. Only its tokenizer has the right limit."""
    beside = save_processors(tmp_path / "roberta", model_max_length=LONGEST - 2)
    model = RobertaModel(RobertaConfig(**TINY, pad_token_id=1)).eval()
    batch = maker(model, beside, texts=["the cat " * 40]).example
    assert model(**batch).last_hidden_state.shape[:2] == batch["input_ids"].shape


def test_model_without_a_position_limit_accepts_long_texts(maker: Maker) -> None:
    """The config of XLNet has -1 positions."""
    model = XLNetModel(XLNetConfig(vocab_size=len(WORDS), d_model=8, n_layer=1, n_head=1, d_inner=8)).eval()
    batch = maker(model, texts=["the cat " * 40, "a"]).example
    assert batch["input_ids"].shape == (2, 82)
    assert maker(model).example["input_ids"].shape[1] > 1


@pytest.mark.parametrize("texts", [["zebra"], ["zebra", "lion tiger"], [""], ["", " "], ["\x00"]], ids=repr)
def test_texts_of_only_unknown_tokens_are_refused(texts: list[str], maker: Maker) -> None:
    assert "unknown" in maker.refusal(texts=texts)


def test_one_known_word_is_enough(maker: Maker) -> None:
    assert maker(texts=["zebra", "a lion"]).user_batches


def test_a_model_without_a_tokenizer_takes_no_texts(maker: Maker, tmp_path: Path) -> None:
    assert "inputs.texts: the model has no tokenizer" in maker.refusal_without_processors(texts=["the cat"])
    nowhere = Pretrained(str(tmp_path), {"local_files_only": True})
    assert "inputs.texts: the model's tokenizer cannot be loaded" in maker.refusal(beside=nowhere, texts=["the cat"])
    bare = tmp_path / "bare"
    BertConfig().save_pretrained(bare)  # transformers makes a tokenizer with only special tokens from this
    message = maker.refusal(beside=Pretrained(str(bare), {}), texts=["the cat"])
    assert "inputs.texts: the model has no tokenizer" in message


def test_tokenizer_without_a_pad_token_accepts_only_one_text(maker: Maker, tmp_path: Path) -> None:
    tokenizer = BertTokenizerFast.from_pretrained(maker.beside.name)
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    bare.save_pretrained(tmp_path / "bare")
    beside = Pretrained(str(tmp_path / "bare"), {"local_files_only": True})
    assert maker(beside=beside, texts=["the cat"]).user_batches[0]["input_ids"].shape[0] == 1
    assert "pad" in maker.refusal(beside=beside, texts=["the cat", "the cat sat"])


def test_an_encoder_with_a_decoder_gets_ids_for_both(maker: Maker) -> None:
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    batch = maker(T5Model(config).eval(), texts=["the cat sat", "a dog"]).example
    assert batch["decoder_input_ids"][:, 0].tolist() == [0, 0]
    assert batch["decoder_input_ids"].shape[1] != batch["input_ids"].shape[1]
    assert "token_type_ids" not in batch


# Random tensors

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"]
bounds = st.none() | st.integers(-300, 300).map(float) | st.floats(allow_nan=False, width=32)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.sampled_from(DTYPES), bounds, bounds, st.integers(0, 2**40))
@example("uint8", -4.0, None, 0)
@example("uint8", None, 1000.0, 0)
@example("int32", None, 1e12, 0)
@example("int64", None, 1e30, 0)
@example("int64", -math.inf, None, 0)
@example("float16", None, 1e6, 0)
@example("float32", None, math.inf, 0)
@example("float32", 5.0, None, 0)
@example("float32", 3.0, 1.0, 0)
def test_random_numbers_have_their_dtype_and_bounds(
    dtype: str, low: float | None, high: float | None, seed: int
) -> None:
    spec = {"shape": ["batch", 50], "dtype": dtype, "low": low, "high": high}
    try:
        config = InputsConfig.model_validate({"tensors": {"x": spec}})
        tensor = prepare(config, Path(), Rows(), None, seed).example["x"]
        again = prepare(config, Path(), Rows(), None, seed).example["x"]
    except (ConfigError, ValidationError):
        assume(False)
    assert tensor.dtype is getattr(torch, dtype)
    assert torch.equal(tensor, again)
    values = tensor.double()
    assert values.isfinite().all()
    rounding = 2 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
    rounding *= max(abs(low or 0.0), abs(high or 0.0), 1.0)
    assert low is None or values.min() >= math.floor(low) - rounding
    assert high is None or values.max() <= high + rounding


def test_dimensions_with_one_name_agree_and_others_differ(maker: Maker) -> None:
    tensors = {"x": {"shape": ["batch", "width", 3]}, "y": {"shape": ["width", "batch"], "dtype": "int64"}}
    inputs = maker(Rows(), tensors=tensors, dynamic={"batch": [1, 8], "width": [4, 9]})
    batch, width, _ = inputs.example["x"].shape
    assert list(inputs.example["y"].shape) == [width, batch]
    assert batch != width
    assert inputs.user_batches == ()
    assert inputs.dynamic == {
        "x": {0: Dim("batch", 1, 8), 1: Dim("width", 4, 9)},
        "y": {0: Dim("width", 4, 9), 1: Dim("batch", 1, 8)},
    }


def test_names_in_a_shape_are_dimensions_without_a_range(maker: Maker) -> None:
    dynamic = maker(Rows(), tensors={"x": {"shape": ["rows", 3, "columns"]}}).dynamic
    assert dynamic is not None
    assert {axis: getattr(dim, "name", dim) for axis, dim in dynamic["x"].items()} == {0: "rows", 2: "columns"}


@pytest.mark.parametrize("shape", [[], [3], ["batch"], [2, "width"]], ids=str)
def test_random_tensor_has_the_configured_shape(shape: list[int | str], maker: Maker) -> None:
    (sizes,) = shapes(maker(Rows(), tensors={"x": {"shape": shape}})).values()
    assert len(sizes) == len(shape)
    assert all(
        size == expected or (isinstance(expected, str) and size >= 2)
        for size, expected in zip(sizes, shape, strict=True)
    )


# All kinds of inputs


@settings(max_examples=examples(60))
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 6), st.integers(0, 6), st.booleans())
@example(2, 4, 4, 0, True)
@example(2, 4, 4, 4, True)
def test_example_is_in_the_declared_range_and_other_data_refused(
    rows: int, columns: int, low: int, more: int, from_file: bool
) -> None:
    high = low + more
    table: dict[str, Any] = {"dynamic": {"batch": [low, high]}}
    table |= {"data": "rows.npz"} if from_file else {"tensors": {"x": {"shape": ["batch", columns]}}}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "rows.npz", x=np.ones((rows, columns), "float32"))
        try:
            inputs = prepare(InputsConfig.model_validate(table), Path(folder), Rows(), None, 0)
        except ConfigError:
            assert from_file
            assert not low <= rows <= high
            return
    assert low <= inputs.example["x"].shape[0] <= high
    assert inputs.example["x"].shape[0] >= 2 or high == 1
    assert inputs.example["x"].shape[1] == columns
    assert all(low <= batch["x"].shape[0] <= high for batch in inputs.user_batches)
    assert inputs.dynamic == {"x": {0: Dim("batch", low, high)} if low < high else {}}


def test_a_single_row_is_traced_as_two(maker: Maker) -> None:
    inputs = maker(texts=["the cat"])
    assert inputs.user_batches[0]["input_ids"].shape[0] == 1
    assert inputs.example["input_ids"].shape[0] == 2


def test_a_single_row_of_tensors_stays_one(maker: Maker) -> None:
    np.savez(maker.folder / "rows.npz", x=np.ones((1, 4), "float32"))
    assert shapes(maker(Rows(), data="rows.npz")) == {"x": [1, 4]}
    assert shapes(maker(Rows(), data="rows.npz", dynamic={"batch": [1, 4]})) == {"x": [2, 4]}


def test_unknown_input_is_refused_with_a_suggestion(maker: Maker) -> None:
    message = maker.refusal(tensors={"input_idz": {"shape": ["batch", 4], "dtype": "int64"}})
    assert message.startswith("inputs")
    assert 'input_idz: BertModel has no input of this name\nHint: Did you mean "input_ids"?' in message


def test_module_with_kwargs_accepts_any_input_name(maker: Maker) -> None:
    assert shapes(maker(Anything(), tensors={"whatever": {"shape": ["batch", 4]}})) == {"whatever": [2, 4]}


def test_a_program_takes_its_own_inputs_and_no_others(maker: Maker) -> None:
    program = torch.export.export(Rows(), (), {"x": torch.ones(2, 4)}).module(check_guards=False)
    assert shapes(maker(program, tensors={"x": {"shape": ["batch", 4]}})) == {"x": [2, 4]}
    assert 'Did you mean "x"?' in maker.refusal(program, tensors={"xx": {"shape": ["batch", 4]}})


def test_unknown_dimension_is_refused_with_a_suggestion(maker: Maker) -> None:
    message = maker.refusal(texts=["the cat"], dynamic={"batsh": [1, 8]})
    assert message.startswith("inputs.dynamic.batsh: no input has a dimension of this name")
    assert 'Did you mean "batch"?' in message


def test_axes_have_their_configured_names(maker: Maker) -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = maker(texts=["the cat"], axes={name: ["rows", "words"] for name in names}, dynamic={"rows": [1, 8]})
    assert inputs.dynamic == {name: {0: Dim("rows", 1, 8)} for name in names}


@pytest.mark.parametrize("declared", [{}, {"dynamic": {"rows": [1, 8]}}], ids=["found out", "declared"])
def test_invalid_axes_are_refused(declared: dict[str, Any], maker: Maker) -> None:
    message = maker.refusal(texts=["the cat"], axes={"input_ids": ["rows"]}, **declared)
    assert message.startswith("inputs.axes.input_ids: ")
    axes = {"input_idz": ["rows", "words"], "input_ids": ["rows", "words"]}
    assert maker.refusal(texts=["the cat"], axes=axes, **declared).startswith("inputs.axes.input_idz: ")


def test_only_models_of_transformers_need_no_inputs(maker: Maker) -> None:
    assert set(maker().example) == {"input_ids", "attention_mask"}
    assert "nothing describes the model's inputs" in maker.refusal(Rows())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"data": "rows.npz", "dynamic": {"batch": [4, 8]}},
            "inputs.dynamic.batch: x is outside the declared range (expected 4 to 8, found 3)",
        ),
        (
            {"data": "rows.npz", "axes": {"y": ["rows"]}},
            "inputs.axes.y: wrong number of axis names (expected 2, found 1)",
        ),
        (
            {
                "data": "rows.npz",
                "axes": {"x": ["batch", "width"], "y": ["batch", "width"]},
                "dynamic": {"width": [1, 9]},
            },
            "inputs.dynamic.width: the sizes of two inputs differ (5 in y, 4 in x)",
        ),
        (
            {"tensors": {"x": {"shape": [2], "dtype": "uint8", "low": 0, "high": 257}}},
            "inputs.tensors.x: uint8 cannot represent numbers from 0 to 257",
        ),
        (
            {"tensors": {"x": {"shape": [2], "dtype": "int64", "low": 0.2, "high": 0.8}}},
            "inputs.tensors.x.high: high is not above low (expected more than 0.2, found 0.8)",
        ),
    ],
    ids=["range", "axes", "sizes", "dtype", "bounds"],
)
def test_inputs_that_do_not_fit_are_refused_with_numbers(table: dict[str, Any], message: str, maker: Maker) -> None:
    np.savez(maker.folder / "rows.npz", x=np.ones((3, 4), "float32"), y=np.ones((3, 5), "float32"))
    assert maker.refusal(Rows(), **table).startswith(message)


class Messages(nn.Module):
    """Sums the rows of each node's neighbours."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


@pytest.mark.parametrize("values", [{}, {"edges": {"indexes": "nodes"}}], ids=["found", "declared"])
def test_random_edges_point_to_nodes(values: dict[str, Any], maker: Maker) -> None:
    edges = {"shape": [2, "edges"], "dtype": "int64", "low": 0, "high": 60}
    tensors = {"x": {"shape": ["nodes", 4]}, "edges": edges}
    batch = maker(Messages(), tensors=tensors, values=values, dynamic={"nodes": [2, 60], "edges": [1, 90]}).example
    assert 1 < int(batch["edges"].max()) < batch["x"].shape[0]


def test_random_lengths_reach_the_longest(maker: Maker) -> None:
    lengths = {"shape": [200], "dtype": "int64", "low": 1}
    tensors = {"x": {"shape": ["time"]}, "y": lengths}
    batch = maker(Rows(), tensors=tensors, values={"y": {"indexes": "time"}}).example
    assert (int(batch["y"].min()), int(batch["y"].max())) == (1, batch["x"].shape[0])


def test_nodes_of_a_graph_are_not_split_into_batches(maker: Maker) -> None:
    edges = np.arange(120).reshape(2, 60) % 50
    np.savez(maker.folder / "graph.npz", x=np.ones((50, 4), "float32"), edges=edges)
    axes, dynamic = {"x": ["nodes", "features"], "edges": ["ends", "edges"]}, {"nodes": [2, 60], "edges": [1, 90]}
    (batch,) = maker(Messages(), data="graph.npz", axes=axes, dynamic=dynamic).user_batches
    assert batch["x"].shape == (50, 4)


def test_values_that_fit_no_input_are_refused_with_a_suggestion(maker: Maker) -> None:
    np.savez(maker.folder / "rows.npz", x=np.ones((3, 4), "float32"), y=np.ones(3, "int64"))
    message = maker.refusal(Rows(), data="rows.npz", values={"yy": {"indexes": "batch"}})
    assert message.startswith('inputs.values.yy: the model has no input of this name\nHint: Did you mean "y"?')
    message = maker.refusal(Rows(), data="rows.npz", values={"y": {"indexes": "bach"}})
    assert message.startswith("inputs.values.y: no input has an axis 'bach'\nHint: Did you mean \"batch\"?")


def test_largest_numbers_of_a_dtype_are_accepted(maker: Maker) -> None:
    spec = {"shape": ["batch", 400], "dtype": "uint8", "low": 254, "high": 256}
    assert maker(Rows(), tensors={"x": spec}).example["x"].unique().tolist() == [254, 255]
