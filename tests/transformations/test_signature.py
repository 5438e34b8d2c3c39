"""Signatures are equal for equal transformations only, in every process."""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    Transformation,
    compose,
)


class Does(Transformation):
    """A transformation with one attribute of any kind."""

    def __init__(self, value: Any = None, **attributes: Any) -> None:
        self.value = value
        vars(self).update(attributes)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class DoesToo(Does):
    """Another class with the same attributes."""


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def double(x: float) -> float:
    return 2 * x


def triple(x: float) -> float:
    return 3 * x


def _with_one_other() -> np.ndarray:
    numbers = np.arange(2000)
    numbers[1000] = 0
    return numbers


def examples() -> list[Transformation]:
    """Returns transformations that are all different."""
    values: list[Any] = [
        *(None, True, False, 0, 1, -1, -2, 2**64, 0.0, -0.0, 1.0, 0.1, float("inf"), 1j, "", "1", "a", "b", b"a"),
        *((), (1,), (1, 2), (2, 1), [1, 2], {1, 2}, frozenset({1, 2}), {"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}),
        *({"first", "second", "third", "fourth"}, ("a,b",), ("a", "b"), ((1,), 2), (1, (2,)), range(3)),
        *(torch.float32, torch.float16, torch.device("cpu"), torch.device("meta"), Colour.RED, Colour.BLUE),
        *(int, float, nn.Linear, double, triple, operator.add, operator.mul, torch.add, torch.mul),
        *(torch.zeros(2), torch.zeros(3), torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2)),
        *(torch.arange(5.0).reshape(1, 5)[:, 2], torch.ones(4, 6)[1:3, ::2]),
        *(torch.zeros(()), torch.ones((), dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool)),
        *(functools.partial(double, 1), functools.partial(double, 2), functools.partial(triple, 1)),
        *(np.float32(1), np.arange(3), np.arange(2000), _with_one_other(), slice(1, 2), slice(2)),
        *(pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b"), MergeLinears(), FuseBiasInLinear()),
        *(torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar, torch.ops.aten.mul, "a".join, "b".join),
    ]
    return [
        *(Does(value) for value in values),
        DoesToo(1),
        Does(1, other=1),
        Does(1, other=2),
        MergeLinears(),
        FuseBiasInLinear(),
        FuseBatchNorm1dInLinear(),
        FuseBatchNorm2dInConv2d(),
        ChangeTrueDivToMulByInverse(),
        ChangeTrueDivToMulByInverse(exact=True),
        compose(),
        compose(MergeLinears()),
        compose(MergeLinears(), FuseBiasInLinear()),
        compose(FuseBiasInLinear(), MergeLinears()),
        compose(FuseBiasInLinear(), FuseBatchNorm1dInLinear()),
        compose(MergeLinears(), inplace=False),
        compose(compose(MergeLinears())),
    ]


def _described(transformation: Transformation) -> str:
    return f"{type(transformation).__name__}({getattr(transformation, 'value', None)!r})"


def test_equal_transformations_have_equal_signatures() -> None:
    for first, second in zip(examples(), examples(), strict=True):
        assert first.signature == second.signature, _described(first)


def test_different_transformations_have_different_signatures() -> None:
    signatures = [(transformation.signature, transformation) for transformation in examples()]
    for (first, a), (second, b) in itertools.combinations(signatures, 2):
        assert first != second, f"{_described(a)} and {_described(b)}"


@pytest.mark.parametrize(("first", "second"), [(-1, -2), (1, True), (0, False), (1, 1.0), (0.0, -0.0), (2**61 - 1, 0)])
def test_values_with_equal_hashes_are_distinct(first: Any, second: Any) -> None:
    assert Does(first).signature != Does(second).signature
    assert Does([first]).signature != Does([second]).signature
    assert Does({"k": first}).signature != Does({"k": second}).signature


def test_two_functions_without_a_name_are_distinct() -> None:
    assert Does(lambda x: x + 1).signature != Does(lambda x: x + 2).signature


def test_a_subclass_made_at_run_time_differs_from_its_base() -> None:
    derived = type("Derived", (Does,), {})
    assert derived(1).signature != Does(1).signature


def test_the_order_of_a_dict_or_set_does_not_matter() -> None:
    assert Does({"a": 1, "b": 2}).signature == Does({"b": 2, "a": 1}).signature
    assert Does(set("abcdef")).signature == Does(set("fedcba")).signature
    assert Does(1, a=1, b=2).signature == Does(1, b=2, a=1).signature


def test_options_may_be_unhashable() -> None:
    transformation = compose(Does([1, {2: [3]}]), MergeLinears())
    assert transformation.signature == compose(Does([1, {2: [3]}]), MergeLinears()).signature


@pytest.mark.slow
def test_signatures_are_equal_in_every_process() -> None:
    program = "from tests.transformations.test_signature import examples; print(*(e.signature for e in examples()))"
    paths = os.pathsep.join(["."] + [path for path in sys.path if path])
    mine = [transformation.signature for transformation in examples()]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": paths}  # the child process has another hash seed
    command = [sys.executable, "-c", program]
    theirs = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert [_described(e) for e, a, b in zip(examples(), mine, theirs, strict=True) if a != b] == []
