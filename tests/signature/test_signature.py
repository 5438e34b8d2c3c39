"""Signatures: names, shared dimensions and dtypes of inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from optexport.errors import ConfigError
from optexport.signature.signature import Dim, Signature, TensorSpec, conventional_axes, flatten_outputs, named_inputs
from optexport.tracing.trace import trace
from tests._helpers import models
from tests.tiers import examples

BERT = Signature(
    (
        TensorSpec("input_ids", "int64", ("batch", "sequence")),
        TensorSpec("attention_mask", "int64", ("batch", "sequence")),
        TensorSpec("scale", "float32", ()),
        TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),
    ),
    (TensorSpec("last_hidden_state", "bfloat16", ("batch", "sequence", 16)),),
    {"batch": Dim("batch", 1, 8), "sequence": Dim("sequence", 2, 40)},
)


def test_dimension_is_the_same_object_under_each_use_of_a_name() -> None:
    shapes = BERT.dynamic_shapes()
    assert list(shapes) == [spec.name for spec in BERT.inputs]
    assert shapes["scale"] == {}
    assert shapes["input_ids"][0] is shapes["attention_mask"][0] is shapes["pixel_values"][0]
    assert shapes["input_ids"][1] is shapes["attention_mask"][1]
    assert (shapes["input_ids"][1].__name__, shapes["input_ids"][1].min, shapes["input_ids"][1].max) == (
        "sequence",
        2,
        40,
    )


def test_sizes_are_read_from_a_batch() -> None:
    batch = {"input_ids": torch.ones(3, 7), "attention_mask": torch.ones(3, 7), "pixel_values": torch.ones(3, 3, 8, 8)}
    assert BERT.sizes(batch) == {"batch": 3, "sequence": 7}


def test_every_dynamic_axis_is_listed_once() -> None:
    axes = [(name, axis, dim.name) for name, axis, dim in BERT.axes()]
    assert axes == [
        ("input_ids", 0, "batch"),
        ("input_ids", 1, "sequence"),
        ("attention_mask", 0, "batch"),
        ("attention_mask", 1, "sequence"),
        ("pixel_values", 0, "batch"),
    ]


def test_dtype_is_a_torch_dtype() -> None:
    assert BERT.outputs[0].torch_dtype is torch.bfloat16
    assert BERT.output_names == ["last_hidden_state"]


@given(
    st.text(min_size=1) | st.sampled_from(["input_ids", "pixel_values", "bbox", "decoder_input_ids"]), st.integers(0, 6)
)
def test_axes_have_distinct_names_and_the_first_is_the_batch(name: str, rank: int) -> None:
    axes = conventional_axes(name, rank)
    assert len(axes) == rank == len(set(axes))
    assert axes[:1] == ("batch",)[:rank]


def test_ids_and_mask_share_a_sequence_and_a_decoder_has_another() -> None:
    assert conventional_axes("input_ids", 2) == conventional_axes("attention_mask", 2) == ("batch", "sequence")
    assert conventional_axes("decoder_input_ids", 2) == ("batch", "decoder_sequence")
    assert conventional_axes("input_ids", 3) == ("batch", "input_ids_1", "input_ids_2")


class Pair(NamedTuple):
    first: Any
    second: Any


T = torch.zeros(1)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (T, ["output"]),
        ((T,), ["output_0"]),
        ([T, (T, T)], ["output_0", "output_1.0", "output_1.1"]),
        ({"a": T, "b": [T]}, ["a", "b.0"]),
        (OrderedDict(b=T, a=T), ["b", "a"]),
        (Pair(T, (T,)), ["first", "second.0"]),
        ({"a": None, "b": T, "c": 3, "d": "x"}, ["b"]),
        ((None, T), ["output_1"]),
        ({"0": T}, ["output_0"]),
        (None, []),
        ((), []),
        (
            BaseModelOutputWithPooling(last_hidden_state=T, pooler_output=None, hidden_states=(T, T)),
            ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else type(value).__name__,
)
def test_output_is_named_by_its_path(outputs: Any, names: list[str]) -> None:
    assert list(flatten_outputs(outputs)) == names


keys = st.sampled_from(["a", "b", "a.b", "0", 0, "output", "output_0", ""])
trees: st.SearchStrategy[Any] = st.recursive(
    st.builds(lambda: torch.zeros(1)) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(300))
@given(trees)
def test_all_tensors_of_an_output_are_kept_in_order(outputs: Any) -> None:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if leaf is not None]
    tensors = flatten_outputs(outputs)
    assert [id(tensor) for tensor in tensors.values()] == [id(leaf) for leaf in leaves]
    assert all(name and not name[0].isdigit() for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", "groupvit"])
def test_model_and_its_graph_name_the_same_outputs(name: str) -> None:
    """The original's outputs are compared with the graph's by name."""
    batch = models.inputs(name)
    with torch.no_grad():
        from_model = flatten_outputs(models.model(name)(**batch, **without_cache(name)))
        from_graph = flatten_outputs(models.traced(name)(**batch))
    assert list(from_model) == list(from_graph)
    assert all(from_model[key].shape == from_graph[key].shape for key in from_model)


def without_cache(name: str) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(models.model(name).config, "use_cache") else {}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("given_inputs", "names"),
    [
        (T, ["input"]),
        ((T,), ["input"]),
        ([T], ["input"]),
        ({"input": T}, ["input"]),
    ],
    ids=["tensor", "tuple", "list", "mapping"],
)
def test_unnamed_inputs_take_the_names_of_the_model(given_inputs: Any, names: list[str]) -> None:
    assert list(named_inputs(nn.Linear(1, 1), given_inputs)) == names


@pytest.mark.sample(2)
@pytest.mark.parametrize("given_inputs", [(T, T), ("x",), [[T]], 3, None, "x"], ids=repr)
def test_inputs_that_no_model_could_take_are_refused(given_inputs: Any) -> None:
    with pytest.raises(ConfigError, match="neither tensors by name.*\\n.*inputs of Linear: input"):
        named_inputs(nn.Linear(1, 1), given_inputs)


class Tied(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "dims"),
    [
        (lambda: nn.Linear(4, 3), {"input": torch.randn(2, 4)}, {"batch"}),
        (lambda: nn.Linear(4, 3), {"input": torch.randn(2, 5, 4)}, {"batch", "input_1"}),
        (lambda: nn.Conv2d(3, 2, 3), {"input": torch.randn(2, 3, 8, 9)}, {"batch", "input_2", "input_3"}),
        (lambda: Tied(), {"x": torch.randn(2, 5), "y": torch.randn(2, 5)}, {"batch", "x_1"}),
        (lambda: nn.BatchNorm1d(6), {"input": torch.randn(2, 6)}, {"batch"}),
    ],
    ids=["linear", "linear of rows", "convolution", "sum", "norm"],
)
def test_only_a_size_that_can_change_is_a_dimension(
    model: Callable[[], nn.Module], batch: dict[str, torch.Tensor], dims: set[str]
) -> None:
    signature = trace(model().eval(), batch).signature
    assert set(signature.dims) == dims
    assert signature.dynamic_shapes()
    assert all(dim.max is None or dim.min < dim.max for dim in signature.dims.values())
    assert {size for spec in signature.inputs for size in spec.shape if isinstance(size, str)} == dims
