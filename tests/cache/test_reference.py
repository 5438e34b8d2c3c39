"""Cached float64 references are reused for the same work only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.parity.cases.case import Case
from optexport.parity.reference import Reference
from optexport.parity.reference_run import _cache_key, run_original
from optexport.signature.signature import Batch
from tests.parity.network import Tensors, call, network

COMPUTATION = "a digest of it"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


class Counted:
    """Runs a model, and counts its runs in float64."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensors:
        self.runs += batch["x"].dtype is torch.float64
        return call(model, batch)


def reference(model: nn.Module, cases: list[Case], *, batched: list[str] | None = None) -> tuple[Reference, int]:
    run = Counted()
    return run_original(run, model, cases, batched=batched or [], computation=COMPUTATION), run.runs


def assert_same(first: Reference, second: Reference) -> None:
    assert (first.float64_mismatches, first.variations, first.noise) == (
        second.float64_mismatches,
        second.variations,
        second.noise,
    )
    for a, b in zip(first.exact, second.exact, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_same_reference_is_computed_once() -> None:
    model, cases = network()
    first, runs = reference(model, cases, batched=["x"])
    again, none = reference(model, cases, batched=["x"])
    assert runs >= len(cases)
    assert none == 0
    assert_same(first, again)


def test_other_weights_inputs_or_batch_axes_are_recomputed() -> None:
    model, cases = network()
    reference(model, cases)
    assert reference(model, [*cases, Case("more", {"x": torch.ones(2, 6)})])[1]
    assert reference(model, [Case(case.name, {"x": case.batch["x"] + 1e-6}) for case in cases])[1]
    assert reference(model, cases, batched=["x"])[1]
    with torch.no_grad():
        next(model.parameters()).flatten()[0] += 1e-6
    assert reference(model, cases)[1]


def test_cache_entries_of_devices_are_separate() -> None:
    model, cases = network()
    own = run_original(call, model, cases, computation=COMPUTATION)
    assert own.cache_key
    assert _cache_key(model, own, COMPUTATION, [], "cpu") == own.cache_key
    assert _cache_key(model, own, COMPUTATION, [], "cuda") != own.cache_key


def test_other_computation_has_another_entry() -> None:
    model, cases = network()
    own = run_original(call, model, cases, computation=COMPUTATION)
    assert run_original(call, model, cases, computation="another").cache_key != own.cache_key
    assert not run_original(call, model, cases).cache_key


def test_other_code_with_equal_weights_is_recomputed() -> None:
    model, cases = network()
    reference(model, cases)

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.0001

    model.__class__ = Other
    assert reference(model, cases)[1]


def test_nothing_is_cached_without_a_writable_folder(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cases = network()
    monkeypatch.setenv("OPTEXPORT_CACHE", "")
    assert reference(model, cases)[1]
    assert reference(model, cases)[1]
    assert not store.exists()
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "file" / "below"))
    assert reference(model, cases)[1]
    assert reference(model, cases)[1]
