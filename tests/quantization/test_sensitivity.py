"""Search for the layers that stay in float32, on layers whose errors add up as angles."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from optexport.config.metrics import MetricGateConfig
from optexport.errors import ConfigError, ParityError
from optexport.parity.cases.case import Case
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import make_gates
from optexport.parity.noise_floor import measure_tolerances
from optexport.parity.reference import Reference
from optexport.quantization.sensitivity import Choice, choose_layers, group_layers, is_within, layers_in, measure_harm
from optexport.runtime.runners import Run

_GATE = 0.99
_ROOM = math.acos(_GATE)


def _checker() -> ParityChecker:
    y = torch.tensor([[1.0, 0.0]])
    reference = Reference((Case("data", {}, data=True),), ({"y": y},), ({"y": y.double()},))
    tolerances = measure_tolerances(reference, 4.0)
    return ParityChecker(
        reference, tolerances, make_gates({"cosine": MetricGateConfig(min=_GATE)}, {}, reference, tolerances, 4.0)
    )


class Bent:
    """Makes and counts candidates. Lowered layers turn the original's vector by the sum of their angles."""

    def __init__(self, angles: Sequence[float]) -> None:
        self.angles = {f"layer.{index}": angle for index, angle in enumerate(angles)}
        self.count = 0

    def __call__(self, float32_units: Collection[str]) -> list[Run]:
        self.count += 1
        angle = sum(angle for name, angle in self.angles.items() if name not in float32_units)
        return [lambda batch: {"y": torch.tensor([[math.cos(angle), math.sin(angle)]])}]

    def choose(self, keep: Collection[str] = ()) -> Choice:
        return choose_layers("file", "int8", list(self.angles), keep, self, _checker())


def test_rows_that_change_by_chance_do_not_rank_layers() -> None:
    """Each layer alone changes the same row. Only the last one, with a large error, must stay in float32."""
    rows = 48
    y = torch.stack([torch.linspace(0.6, 1.0, rows), torch.zeros(rows)], 1)
    y[0, 0] = 0.01
    errors = {f"layer.{index}": 0.012 for index in range(20)} | {"layer.20": 0.5}
    reference = Reference((Case("data", {}, data=True),), ({"y": y},), ({"y": y.double()},))
    tolerances = measure_tolerances(reference, 4.0)
    gates = make_gates({"argmax_agreement": MetricGateConfig(min=0.97)}, {}, reference, tolerances, 4.0)

    def make(float32_units: Collection[str]) -> list[Run]:
        error = sum(value for name, value in errors.items() if name not in float32_units)
        return [lambda batch: {"y": y + torch.tensor([0.0, error])}]

    choice = choose_layers("file", "int8", list(errors), [], make, ParityChecker(reference, tolerances, gates))
    assert choice.measured == ["layer.20"]


def test_choice_passes_in_every_way_to_run_the_file() -> None:
    exact, sensitive = Bent([0.02, 0.03]), Bent([0.02, 0.3])

    def make(float32_units: Collection[str]) -> list[Run]:
        return [*exact(float32_units), *sensitive(float32_units)]

    choice = choose_layers("file", "int8", list(exact.angles), [], make, _checker())
    assert choice.measured == ["layer.1"]
    assert choice.chosen.passed


def test_recorded_values_are_those_of_the_worst_way() -> None:
    exact, sensitive = Bent([0.01]), Bent([0.1])

    def make(float32_units: Collection[str]) -> list[Run]:
        return [*exact(float32_units), *sensitive(float32_units), *exact(float32_units)]

    choice = choose_layers("file", "int8", list(exact.angles), [], make, _checker())
    (result,) = choice.chosen.gate_results
    assert result.value == pytest.approx(math.cos(0.1), abs=1e-6)


def test_least_harmful_layer_must_pass_in_every_way() -> None:
    exact, sensitive = Bent([0.1, 0.2]), Bent([0.3, 0.3])

    def make(float32_units: Collection[str]) -> list[Run]:
        return [*exact(float32_units), *sensitive(float32_units)]

    with pytest.raises(ParityError, match="no choice of layers in int8 passes the gates"):
        choose_layers("file", "int8", list(exact.angles), [], make, _checker())


_ANGLES = st.lists(st.floats(0.0, 0.3), min_size=1, max_size=12)


@pytest.mark.slow
@given(_ANGLES)
def test_choice_passes_and_keeps_no_layer_without_need(angles: list[float]) -> None:
    bent = Bent(angles)
    try:
        choice = bent.choose()
    except ParityError:
        assert min(angles) > _ROOM - 1e-6
        return
    lowered = [angle for name, angle in bent.angles.items() if name not in choice.float32_units]
    assert lowered
    assert choice.chosen.passed
    assert sum(lowered) <= _ROOM + 1e-6
    for name in choice.float32_units:  # errors add up, and the least harmful layers are lowered first
        assert sum(lowered) + bent.angles[name] > _ROOM - 1e-6


@given(_ANGLES)
def test_fully_lowered_candidate_that_passes_is_made_once(angles: list[float]) -> None:
    bent = Bent([angle * _ROOM / 2 / (sum(angles) or 1.0) for angle in angles])
    choice = bent.choose()
    assert (choice.float32_units, bent.count) == ([], 1)


def test_few_files_are_made_for_many_layers() -> None:
    bent = Bent([1.0, *[1e-3] * 40])
    assert bent.choose().float32_units == ["layer.0"]
    assert bent.count <= 1 + 41 + 1 + math.ceil(math.log2(41)) + 8


def test_most_harmful_layer_is_kept_at_any_place() -> None:
    for target in range(5):
        angles = [0.02] * 5
        angles[target] = 0.2
        assert Bent(angles).choose().float32_units == [f"layer.{target}"]


def test_layer_in_keep_float32_is_never_lowered() -> None:
    choice = Bent([0.0, 0.0, 0.3]).choose(keep=["layer.0"])
    assert choice.float32_units == ["layer.0", "layer.2"]
    assert [layer.kept for layer in choice.record().layers] == ["asked for", None, "measured"]


def test_single_layer_that_hurts_cannot_be_lowered() -> None:
    with pytest.raises(
        ParityError, match="no choice of layers in int8 passes the gates\n  all layers lowered: y, cosine is 0.955"
    ):
        Bent([0.3]).choose()


def test_unknown_layer_name_is_refused() -> None:
    with pytest.raises(ConfigError, match='file has no layer "layr.0"'):
        Bent([0.0, 0.0]).choose(keep=["layr.0"])


def test_harm_is_relative_to_the_margin_of_the_gate() -> None:
    checker = _checker()
    own = checker.targets[0].gate_results
    half = math.acos(1 - 0.5 * (1 - _GATE))
    target = checker.check(
        "file", lambda batch: {"y": torch.tensor([[math.cos(half), math.sin(half)]])}, precision="int8"
    )
    assert measure_harm(target, own) == pytest.approx(0.5, rel=1e-3)
    broken = checker.check("file", lambda batch: {"y": torch.tensor([[math.nan, 0.0]])}, precision="int8")
    assert measure_harm(broken, own) == math.inf


def test_very_many_layers_are_lowered_in_groups() -> None:
    layers = [f"encoder.layer.{i}.{name}" for i in range(12) for name in "abcdef"] + ["pooler"]
    assert group_layers(layers) == [*(f"encoder.layer.{i}" for i in range(12)), "pooler"]
    assert group_layers(layers[:60]) == layers[:60]
    assert layers_in("encoder.layer.1", layers) == [f"encoder.layer.1.{name}" for name in "abcdef"]
    assert not is_within("encoder.layer.11.a", ["encoder.layer.1"])
