"""What is kept of float64: it is found again for the same work, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.proof import reference_store
from optexport.proof.cases import Batch, Case
from optexport.proof.reference import Reference, run_original
from tests.proof.measuring import Tensors, call, network


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTEXPORT_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


class Counted:
    """Runs a model, and counts how often it ran in float64."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensors:
        self.runs += batch["x"].dtype is torch.float64
        return call(model, batch)


def reference(model: nn.Module, cases: list[Case], *, batched: list[str] | None = None) -> tuple[Reference, int]:
    run = Counted()
    return run_original(run, model, cases, batched=batched or []), run.runs


def assert_same(one: Reference, other: Reference) -> None:
    assert (one.unguided, one.ways, one.noise) == (other.unguided, other.ways, other.noise)
    for a, b in zip(one.exact, other.exact, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_the_same_work_is_done_once() -> None:
    model, cases = network()
    first, runs = reference(model, cases, batched=["x"])
    again, none = reference(model, cases, batched=["x"])
    assert runs >= len(cases)
    assert none == 0
    assert_same(first, again)


def test_other_weights_inputs_or_ways_are_other_work() -> None:
    model, cases = network()
    reference(model, cases)
    assert reference(model, [*cases, Case("more", {"x": torch.ones(2, 6)})])[1]
    assert reference(model, [Case(case.name, {"x": case.batch["x"] + 1e-6}) for case in cases])[1]
    assert reference(model, cases, batched=["x"])[1]
    with torch.no_grad():
        next(model.parameters()).flatten()[0] += 1e-6
    assert reference(model, cases)[1]


def test_other_code_over_the_same_weights_is_other_work() -> None:
    model, cases = network()
    reference(model, cases)

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.0001

    model.__class__ = Other
    assert reference(model, cases)[1]


def test_an_entry_that_was_edited_is_not_believed(store: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model, cases = network()
    first, _ = reference(model, cases)
    (entry,) = store.iterdir()
    with safe_open(entry, framework="pt") as file:
        notes = file.metadata()
    tensors = load_file(entry)
    tensors["0.y"] = tensors["0.y"] + 0.01
    save_file(tensors, entry, notes)
    again, runs = reference(model, cases)
    assert runs
    assert_same(first, again)


@pytest.mark.parametrize("damage", [b"", b"not a tensor", None])
def test_what_is_damaged_is_computed_again(store: Path, damage: bytes | None) -> None:
    model, cases = network()
    first, _ = reference(model, cases)
    (entry,) = store.iterdir()
    content = entry.read_bytes()
    entry.write_bytes(content[: len(content) // 2] if damage is None else damage)
    again, runs = reference(model, cases)
    assert runs
    assert_same(first, again)


def test_nothing_is_kept_where_no_place_is_named_or_none_can_be_written(
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


def test_what_was_not_used_for_longest_makes_room(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for index in range(3):
        reference_store.write(f"entry {index}", [{"y": torch.full((256,), float(index))}], {})
        os.utime(store / f"entry {index}.safetensors", (index, index))
    size = (store / "entry 0.safetensors").stat().st_size
    monkeypatch.setattr(reference_store, "_ALL_BYTES", 2 * size + 1)
    assert reference_store.read("entry 0") is not None  # which is used again
    reference_store.write("entry 3", [{"y": torch.ones(256)}], {})
    assert sorted(path.stem for path in store.iterdir()) == ["entry 0", "entry 3"]
