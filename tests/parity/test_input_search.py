"""Tests the search for failing inputs and their reduction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from optexport import export
from optexport.errors import ParityError
from optexport.parity.cases.case import Case
from optexport.parity.input_search import failure_test, find_failing, make_measure, smallest_failing
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Outputs
from optexport.parity.reference_run import run_original
from optexport.signature.signature import Batch, Dim, Signature, TensorSpec
from optexport.transformations import Transformation
from tests._helpers import exports
from tests._helpers.models import randomise
from tests.tiers import examples

IDS = 30
SIGNATURE = Signature(
    (TensorSpec("ids", "int64", ("batch", "sequence")), TensorSpec("mask", "int64", ("batch", "sequence"))),
    (),
    {"batch": Dim("batch", 1, 32), "sequence": Dim("sequence", 2, 64)},
)


def batch(rows: int = 4, columns: int = 9) -> Batch:
    ids = torch.arange(rows * columns).reshape(rows, columns) % (IDS - 10) + 5
    return {"ids": ids, "mask": torch.ones_like(ids)}


@settings(max_examples=examples(8), suppress_health_check=list(HealthCheck))
@given(st.integers(1, 8), st.integers(2, 12))
def test_a_failing_input_is_made_as_small_as_the_fault_allows(rows: int, columns: int) -> None:
    """The fault needs a minimum number of rows and columns, and no particular values."""

    def fails(inputs: Batch) -> bool:
        return inputs["ids"].shape[0] >= rows and inputs["ids"].shape[1] >= columns

    smallest = smallest_failing(fails, Case("traced", batch(8, 12)), SIGNATURE, {"ids": IDS})
    if (rows, columns) == (8, 12) and smallest is None:
        return
    assert smallest is not None
    assert list(smallest.batch["ids"].shape) == [rows, columns]
    assert smallest.name.startswith(f"batch {rows}, sequence {columns}")


@pytest.mark.parametrize(
    ("fails", "part"),
    [
        (lambda inputs: bool((inputs["ids"] == 17).any()), "ids all 17"),
        (lambda inputs: bool((inputs["ids"] == IDS - 1).any()), f"ids all {IDS - 1}"),
        (lambda inputs: not inputs["mask"].any(1).all(), "mask all 0"),
        (lambda inputs: any(row[0] == 0 and row.any() for row in inputs["mask"][:, :3]), "mask padded left"),
    ],
)
def test_the_simplest_failing_values_are_named(fails: Callable[[Batch], bool], part: str) -> None:
    inputs = batch()
    inputs["ids"][1, 2] = IDS - 1
    inputs["mask"][2] = 0
    inputs["mask"][3, :2] = 0
    smallest = smallest_failing(fails, Case("data", inputs), SIGNATURE, {"ids": IDS})
    assert smallest is not None
    assert fails(smallest.batch)
    assert part in smallest.name
    assert smallest.name.startswith("batch 1, ")


def test_values_stay_if_only_sizes_may_change() -> None:
    inputs = batch()
    smallest = smallest_failing(lambda inputs: True, Case("data", inputs), SIGNATURE, {"ids": IDS}, values=False)
    assert smallest is not None
    assert torch.equal(smallest.batch["ids"], inputs["ids"][:1, :2])
    assert smallest.name == "batch 1, sequence 2; else as at data"


def test_no_input_is_named_if_no_smaller_one_fails() -> None:
    inputs = batch(3, 7)
    assert smallest_failing(lambda inputs: False, Case("data", inputs), SIGNATURE, {}) is None
    assert smallest_failing(
        lambda inputs: inputs["ids"].shape == (3, 7) and torch.equal(inputs["ids"], inputs["ids"]),
        Case("data", inputs), SIGNATURE, {}, values=False,
    ) is None  # fmt: skip


def test_a_search_ends_in_time_with_its_smallest_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fails(inputs: Batch) -> bool:
        nonlocal calls
        calls += 1
        return inputs["ids"].numel() > 6

    # A fake clock, because real time depends on the load of the machine: 20 calls take one second.
    monkeypatch.setattr("optexport.parity.input_search.time", SimpleNamespace(monotonic=lambda: 0.05 * calls))
    smallest = smallest_failing(fails, Case("data", batch(30, 60)), SIGNATURE, {}, seconds=1.0)
    assert calls <= 21
    assert smallest is not None
    assert fails(smallest.batch)


def test_a_search_is_deterministic_and_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fails(inputs: Batch) -> bool:
        return inputs["ids"].shape[1] % 8 == 5 and inputs["ids"].shape[0] > 1

    first, second = (find_failing(fails, batch(), SIGNATURE, {"ids": IDS}) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.name == second.name
    assert list(first.batch["ids"].shape) == [2, 5]
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**62), st.integers(100, 3000))
def test_a_search_respects_sizes_vocabulary_and_budget(seed: int, limit: int) -> None:
    tried: list[Batch] = []

    def fails(inputs: Batch) -> bool:
        tried.append(inputs)
        return False

    assert find_failing(fails, batch(), SIGNATURE, {"ids": IDS}, seed=seed, examples=40, max_elements=limit) is None
    for inputs in tried:
        assert 1 <= inputs["ids"].shape[0] <= 32
        assert 2 <= inputs["ids"].shape[1] <= 64
        assert sum(tensor.numel() for tensor in inputs.values()) <= limit
        assert 0 <= int(inputs["ids"].min()) <= int(inputs["ids"].max()) < IDS
        assert set(inputs["mask"].flatten().tolist()) <= {0, 1}
    assert len({inputs["ids"].shape for inputs in tried}) > 5


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IDS, 6)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) * mask[..., None]).sum(1)


def call(model: nn.Module, inputs: Batch) -> Outputs:
    return {"y": model(**inputs)}


@pytest.mark.slow
def test_the_failure_test_is_right_on_new_inputs() -> None:
    model, wrong = randomise(Sums()), randomise(Sums())
    with torch.no_grad():
        wrong.words.weight[7] += 1e-3
    tolerances = measure_tolerances(run_original(call, model, [Case("traced", batch())]), 4.0)
    measure = make_measure(call, model, tolerances, 4.0)
    right = failure_test(measure, lambda inputs: call(model, dict(inputs)))
    fails = failure_test(measure, lambda inputs: call(wrong, dict(inputs)))
    assert find_failing(right, batch(), SIGNATURE, {"ids": IDS}, examples=60) is None
    assert not fails({"ids": torch.full((2, 3), 6), "mask": torch.ones(2, 3, dtype=torch.int64)})
    smallest = smallest_failing(fails, Case("traced", batch()), SIGNATURE, {"ids": IDS})
    assert smallest is not None
    assert smallest.name == "batch 1, sequence 2; ids all 7; mask all 1"


def test_an_input_refused_by_the_original_is_not_a_failure() -> None:
    class Refuses(nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    tolerances = measure_tolerances(run_original(call, randomise(Sums()), [Case("traced", batch())]), 4.0)
    assert not failure_test(make_measure(call, Refuses(), tolerances, 4.0), lambda inputs: {})(batch())


class WrongAtSomeLengths(Transformation):
    """Adds an error at some sequence lengths, optionally only if all positions are equal."""

    preserves_computation = True

    def __init__(self, sizes: tuple[int, ...], *, alike: bool = False) -> None:
        self.sizes, self.alike = sizes, alike

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        (output,) = graph_module.graph.find_nodes(op="output")
        hidden = output.all_input_nodes[0]
        with graph_module.graph.inserting_before(output):
            wrong = graph_module.graph.call_function(_shifted, (hidden, self.sizes, self.alike))
        output.replace_input_with(hidden, wrong)
        return graph_module


def _shifted(hidden: torch.Tensor, sizes: tuple[int, ...], alike: bool) -> torch.Tensor:
    is_wrong = hidden.shape[1] in sizes and (not alike or torch.allclose(hidden, hidden[:, :1], atol=1e-5))
    return hidden + 0.5 if is_wrong else hidden


@pytest.mark.slow
def test_a_failing_run_reports_the_smallest_failing_input(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="Smallest input that fails: batch 1, sequence 20; x all 0; mask all 1"):
        export(
            exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, formats=["pt2"],
            transformations=WrongAtSomeLengths(tuple(range(20, 70))), effort="quick",
        )  # fmt: skip


@pytest.mark.slow
def test_exhaustive_effort_finds_faults_missed_by_fixed_cases(tmp_path: Path) -> None:
    rule = WrongAtSomeLengths(tuple(range(35, 62)), alike=True)
    with pytest.raises(ParityError, match=r"\(case: found by search: batch \d+, sequence 35; ") as failed:
        export(
            exports.block(), exports.batch(), tmp_path / "bundle", dynamic=exports.DYNAMIC, formats=["pt2"],
            transformations=rule, effort="exhaustive",
        )  # fmt: skip
    assert "WrongAtSomeLengths caused the difference" in str(failed.value)
    assert failed.value.parity is not None
    assert (tmp_path / "bundle-failure" / "case.safetensors").is_file()
