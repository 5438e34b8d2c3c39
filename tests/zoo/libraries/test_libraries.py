"""Tests a sample of the libraries' models; `python -m tests.zoo.libraries` runs all of them."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

from tests.zoo.libraries import catalogue, judge, table
from tests.zoo.libraries.absent import absent
from tests.zoo.libraries.model import Input, Model, network

# Fast models of the libraries in sample.txt, which `make test` installs. Without them, these tests fail.
FAST = (
    "pytorch-tcn/tcn",
    "rtdl_revisiting_models/mlp",
    "rtdl_revisiting_models/resnet",
    "torch_geometric/gcn",
    "torch_geometric/graphsage",
    "torch_geometric/sgconv",
    "torchfm/dcn",
    "torchfm/fm",
    "torchfm/wd",
    "vit-pytorch/simple_vit",
)
_LINEAR = Model(
    "torch/linear",
    network("torch.nn:Linear", 4, 2),
    {"input": Input(("batch", 4))},
    ({"batch": 2}, {"batch": 3}),
    {"batch": {"max": 9}},
)


@pytest.mark.sample(3, 5)
@pytest.mark.parametrize("name", FAST)
def test_files_of_model_are_right_at_other_sizes(name: str) -> None:
    outcome = judge.judge(name, effort="quick")
    assert table.is_right(outcome.as_json()), outcome.reasons


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # two of the peers are deprecated
def test_peers_export_a_simple_model_rightly() -> None:
    outcome = judge.judge_peers("torchfm/lr")
    assert [outcome.stages[peer] for peer in judge.PEERS] == ["done"] * 3, outcome.reasons


def test_catalogue_has_many_models_of_many_libraries() -> None:
    names = [model.name for module in catalogue.FIELDS for model in module.models()]
    assert len(set(names)) == len(names) >= 150
    assert len({name.partition("/")[0] for name in names}) >= 8


def test_models_have_other_sizes_of_every_dynamic_axis() -> None:
    for model in catalogue.models().values():
        traced, *others = model.sizes
        named = {axis for tensor in model.inputs.values() for axis in tensor.shape if isinstance(axis, str)}
        assert named == traced.keys(), model.name
        assert all({sizes[axis] for sizes in others} - {traced[axis]} for axis in named), model.name
        assert model.dims.keys() <= named, model.name


def test_model_is_built_reproducibly_with_other_values_in_each_batch() -> None:
    one, second = _LINEAR.build(), _LINEAR.build()
    assert not one.training
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), second.parameters(), strict=True))
    first, other = _LINEAR.batches()
    assert first["input"].shape == (2, 4)
    assert other["input"].shape == (3, 4)
    assert not torch.equal(first["input"], other["input"][:2])
    (dim,) = _LINEAR.dynamic()["input"].values()
    assert (dim.name, dim.max) == ("batch", 9)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("results", "difference"),
    [
        ([np.ones((2, 2)), np.ones((3, 2))], ""),
        ([np.ones((2, 2)), np.ones((2, 2))], "at batch 3: output 0 has the shape (2, 2) instead of (3, 2)"),
        ([np.ones((2, 2)), np.full((3, 2), 1.5)], "at batch 3: output 0 is off by 0.5 of its largest value"),
    ],
)
def test_file_that_differs_at_one_size_is_wrong(results: list[Any], difference: str) -> None:
    outputs = [[np.ones((2, 2))], [np.ones((3, 2))]]
    eager = judge.Eager(_LINEAR, torch.nn.Identity(), [{}, {}], outputs)
    following = iter(results)
    assert eager.difference(lambda batch: [next(following)]) == difference


def test_file_that_raises_at_one_size_is_wrong() -> None:
    def run(batch: judge.Batch) -> list[Any]:
        raise RuntimeError("a long story\nshape '[2]' is invalid")

    eager = judge.Eager(_LINEAR, torch.nn.Identity(), [{}], [[np.ones(2)]])
    assert eager.difference(run) == "at batch 2: RuntimeError: shape '[2]' is invalid"


def test_tensors_of_a_librarys_class_are_found_in_order() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert judge.tensors({"a": [one, None], "b": (two, 3)}) == [one, two]


def test_absent_package_is_importable_until_the_end_of_the_block() -> None:
    with absent("no_such_package"):
        from no_such_package.part import Mode  # type: ignore[import-not-found]

        assert Mode.NEAREST is not None
    assert importlib.util.find_spec("no_such_package") is None


def test_page_counts_models_and_names_the_peers_that_are_right() -> None:
    shared = {"cls": "Net", "inputs": {"x": [2, 4]}, "seconds": {"exported": 2.0}}
    right = dict.fromkeys(("built", "eager", "exported", *judge.FORMATS), "done")
    stages = {"built": "done", "eager": "done", "exported": "refused"}
    results = {
        "one/a": {**shared, "model_type": "one/a", "stages": right, "reasons": {}},
        "one/b": {**shared, "model_type": "one/b", "stages": stages, "reasons": {"exported": "exit 3: no"}},
    }
    peers = {"one/b": {**shared, "model_type": "one/b", "stages": {"jit_trace": "done"}, "reasons": {}}}
    models = dict.fromkeys(("one/a", "one/b", "one/c"), _LINEAR)
    page = table.table(models, results, peers)
    assert "| **all** | 2 | 1 (50.0 %) | 1 | 0 | 0 | 0 of 1 | 0 of 1 | 1 of 1 |" in page
    assert "| one/b | refused | exit 3: no | torch.jit.trace |" in page
    assert "Not tried yet: 1" in page
