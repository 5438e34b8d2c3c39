"""Tests that every fault of the catalog is caught at its target, with the right cause."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from optexport.errors import BundleError, ParityError
from optexport.parity.cases.basic_cases import make_cases
from optexport.parity.cases.special_values import special_cases
from optexport.parity.cases.vocabulary import vocabularies
from optexport.parity.verify import verify
from tests._helpers import exports
from tests.faults import attention, layers, merging, onnx_files, torch_files  # noqa: F401  # which enter their faults
from tests.faults.bundles import TAMPERINGS, Tampering
from tests.faults.catalogue import FAULTS, Fault
from tests.faults.seeding import Seeded, run, run_with, traced
from tests.faults.subjects import subject
from tests.faults.unseen import BELOW_THE_FLOOR, CANNOT_SHOW, LostInRounding, double, in_float64

TARGETS = ("original", "graph", "torchscript", "onnx", "onnx-optimized", "pt2")
BLAMED = f"{Seeded.__module__}:{Seeded.__qualname__} caused the difference"
SAID_OF_FILES = (
    "The graph passes, so the exporter or ",
    "The file passes without optimizations, so ONNX Runtime's optimizations of level ORT_ENABLE_",
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def parameter(name: str, entry: object, *, nightly: bool = False, missed: str | None = None) -> object:
    """Returns a test parameter. A fault that is known to be missed is a strict xfail."""
    marks = [pytest.mark.nightly] if nightly else []
    if missed is not None:
        marks.append(pytest.mark.xfail(reason=missed, strict=True, raises=pytest.fail.Exception))
    return pytest.param(entry, id=name, marks=marks)


def failing(error: ParityError) -> tuple[str, ...]:
    """Returns the targets that a parity error names, in the order of the pipeline."""
    return tuple(target for target in TARGETS if f"\n{target}: " in f"\n{error}")


def faults() -> Iterator[object]:
    """Yields all faults. Those that are slow or repeat a mistake are nightly; of the others, CI runs a sample."""
    mistakes: set[object] = set()
    for name, fault in FAULTS.items():
        again = fault.mistake in mistakes and fault.missed is None
        yield parameter(name, fault, nightly=fault.nightly or again, missed=fault.missed)
        if not fault.nightly:
            mistakes.add(fault.mistake)


@pytest.mark.sample(5, 18)
@pytest.mark.parametrize("fault", [*faults()])
def test_fault_is_caught_with_the_right_cause(fault: Fault, tmp_path: Path) -> None:
    with pytest.raises(ParityError) as caught:
        run_with(fault, tmp_path / "bundle")
    assert failing(caught.value) == fault.fails
    if fault.by_a_rule:
        assert BLAMED in str(caught.value)
        assert "remove-no-ops" not in str(caught.value)
        assert "share-equal" not in str(caught.value)
    else:
        assert SAID_OF_FILES[len(fault.fails) == 1 and "optimized" in fault.fails[0]] in str(caught.value)
        assert "caused the difference" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle-failure"], "nothing is left to be shipped"


@pytest.mark.sample(2)
@pytest.mark.parametrize("entry", [parameter(name, t, missed=t.missed) for name, t in TAMPERINGS.items()])
def test_resealed_bundle_does_not_verify(entry: Tampering, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    entry.act(folder)
    if entry.fails:
        failed = tuple(target.target for target in verify(folder).targets[1:] if not target.passed)
        if not failed:
            pytest.fail("it verifies")
        assert failed == entry.fails
    else:
        with pytest.raises(BundleError):
            verify(folder)


def size_in_float64(fault: Fault, *, made_there: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the change of each output by a fault in float64, and the largest value of each.

    Args:
        made_there: True puts the fault into the float64 graph, False into the original one.
    """
    of, spoil = traced(fault.on), Seeded(fault)
    honest = in_float64(of.graph_module)
    spoilt = spoil(in_float64(of.graph_module)) if made_there else in_float64(spoil(copy.deepcopy(of.graph_module)))
    distance, largest = (dict.fromkeys(of.signature.output_names, 0.0) for _ in range(2))
    inputs, ids = subject(fault.on).inputs, vocabularies(of.graph_module, of.signature)
    checked = make_cases(inputs, (), of.signature, of.suspect_sizes) + special_cases(inputs, ids, "standard", 0)
    for case in checked:
        if case.extreme:
            continue
        with torch.no_grad():
            results = [flat(graph(**double(case.batch))) for graph in (honest, spoilt)]
        for name, result, original in zip(of.signature.output_names, *results, strict=True):
            distance[name] = max(distance[name], float((result.double() - original.double()).abs().max()))
            largest[name] = max(largest[name], float(result.abs().max()))
    return distance, largest


def flat(outputs: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("fault", [parameter(name, fault) for name, fault in CANNOT_SHOW.items()])
def test_change_without_effect_in_float64_passes(fault: Fault, tmp_path: Path) -> None:
    distance, largest = size_in_float64(fault, made_there=True)
    for name in distance:
        assert distance[name] <= 1e-12 * largest[name], name
    assert run_with(fault, tmp_path / "bundle").passed


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("entry", [parameter(name, entry) for name, entry in BELOW_THE_FLOOR.items()])
def test_change_below_the_noise_floor_passes_and_has_its_size(entry: LostInRounding, tmp_path: Path) -> None:
    distance, _ = size_in_float64(entry.fault, made_there=False)
    result = run_with(entry.fault, tmp_path / "bundle")
    floors = {output.output: output.limit / 4 for output in result.parity[0].outputs}
    size = max(distance[name] / floors[name] for name in distance if floors[name])
    assert 0 < size < 4
    # The noise floor depends on how this processor rounds products, so it differs between machines.
    assert entry.size / 2 < size < 2 * entry.size


@pytest.mark.nightly
def test_every_subject_without_a_fault_passes(tmp_path: Path) -> None:
    for name in sorted({fault.on for fault in FAULTS.values() if not fault.nightly}):
        assert run(name, tmp_path / name, (), ("pt2",)).passed


def test_catalogue_has_sixty_faults_of_all_kinds() -> None:
    caught = [fault for fault in FAULTS.values() if fault.missed is None]
    assert len(caught) >= 60
    assert {fault.fails for fault in caught} == {
        ("graph",), ("onnx", "onnx-optimized"), ("onnx-optimized",), ("torchscript",), ("pt2",)
    }  # fmt: skip
