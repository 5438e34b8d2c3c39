"""Tests of the search with simulated times."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from optexport.bench.artifact import Artifact
from optexport.bench.turns import Settings, Timing
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Outcome, Trial
from optexport.config.benchmarks import FormatLimits
from optexport.errors import BenchError
from optexport.exporters import registry
from optexport.report import tuning as report
from optexport.tuning.candidate import Candidate, Option, rules_in
from optexport.tuning.candidate_builder import CandidateRejected
from optexport.tuning.search import Search
from optexport.tuning.tournament import Tournament
from optexport.tuning.tuner import share
from tests.tiers import examples

_PASSES = registry.list_passes("torchscript")
_WORKLOADS = (Workload({"batch": 1}, 1, Path(), traced=True), Workload({"batch": 8}, 8, Path()))


@dataclass
class World:
    """Simulates candidates, with a clock: each option speeds its files up by a factor."""

    folder: Path
    speed: Mapping[Option, float]
    rules: int = 2
    noise: float = 0.01
    broken: frozenset[Option] = frozenset()
    unused: frozenset[int] = frozenset()
    crashing: frozenset[Option] = frozenset()
    killed: list[str] = field(default_factory=list)
    large: frozenset[Option] = frozenset()
    idle: frozenset[Option] = frozenset()
    at: Mapping[tuple[Option, str], float] = field(default_factory=dict)
    build_seconds: float = 1.0
    layer_seconds: float = 0.0
    stored_seconds: float = 0.0
    launch_seconds: float = 1.0
    now: float = 0.0
    races: list[tuple[int, int]] = field(default_factory=list)
    built: dict[str, Candidate] = field(default_factory=dict)
    stored: list[Candidate] = field(default_factory=list)

    def matching_rules(self, candidate: Candidate) -> list[int]:
        return [rule for rule in rules_in(candidate) if rule not in self.unused]

    def layer_search_seconds(self, file_format: str) -> float:
        return self.layer_seconds if self.built else 0.0

    def build(self, file_format: str, candidate: Candidate, name: str) -> Artifact:
        self.now += self.build_seconds + (0.0 if self.built else self.layer_seconds)
        if candidate & self.broken:
            raise CandidateRejected("parity failed")
        path = self.folder / f"{len(self.built)}.pt"
        path.write_text(str(sorted(map(str, candidate - self.idle))))
        self.built[name] = candidate
        return Artifact(name, path, file_format, 10**6 * len(candidate & self.large) + 1)

    def saved_seconds(self, file_format: str) -> float:
        return self.stored_seconds

    def store(self, artifact: Artifact) -> None:
        assert artifact.path.exists()
        self.stored.append(self.built[artifact.name])

    def discard(self, artifact: Artifact) -> None:
        artifact.path.unlink()

    def race(self, artifacts: Sequence[Artifact], workloads: Sequence[Workload], race: Settings) -> list[Timing]:
        launches, cost = 0, self.launch_seconds * len(artifacts)
        while launches < race.launches and (launches == 0 or self.now + cost <= race.deadline):
            launches, self.now = launches + 1, self.now + cost
        self.races.append((len(artifacts), launches))
        race = Settings(rounds=launches * race.rounds_per_launch, rounds_per_launch=race.rounds_per_launch)
        return [timing for workload in workloads for timing in self._turns(artifacts, workload, race)]

    def _turns(self, artifacts: Sequence[Artifact], workload: Workload, race: Settings) -> list[Timing]:
        draw = random.Random(f"{workload.label} {sorted(a.name for a in artifacts)} {race.rounds}")
        shared = [[draw.gauss(0, 0.2) for _ in range(race.rounds_per_launch)] for _ in range(race.launches)]
        timings = []
        for artifact in artifacts:
            candidate = self.built[artifact.name]
            if artifact.name in self.killed:
                self.killed.remove(artifact.name)
                raise BenchError("the process ended by SIGKILL", location=artifact.name)
            if candidate & self.crashing:
                raise BenchError("the process ended", location=artifact.name)
            factors = [self.at.get((item, workload.label), self.speed.get(item, 1.0)) for item in candidate]
            seconds = workload.rows / math.prod(factors)
            turns = []
            for launch in shared:
                process = draw.gauss(0, self.noise)
                turns.append(tuple((seconds * math.exp(s + process + draw.gauss(0, self.noise)),) for s in launch))
            timings.append(Timing(artifact, workload, tuple(turns), (0.1,), None))
        return timings

    def search(
        self,
        earlier: Sequence[Trial] = (),
        budget: float = 1e6,
        configured: Sequence[str] = (),
        expected: Sequence[int] = (),
        max_mb: float | None = None,
        device: str = "cpu",
    ) -> Outcome:
        search = self.start(configured, expected, max_mb, device)
        return search.run(earlier, self.now + budget)

    def start(
        self,
        configured: Sequence[str] = (),
        expected: Sequence[int] = (),
        max_mb: float | None = None,
        device: str = "cpu",
    ) -> Search:
        rules = [
            SimpleNamespace(name="rule", formats=None, transformation=None, min_matches=int(i in expected))
            for i in range(self.rules)
        ]
        config = SimpleNamespace(
            model=SimpleNamespace(device=device),
            bench=SimpleNamespace(rounds=20),
            export=SimpleNamespace(passes={"torchscript": list(configured)}),
            gate=SimpleNamespace(max_size_mb=None if max_mb is None else FormatLimits(every=max_mb)),
        )
        job: Any = SimpleNamespace(rules=rules, config=config)
        builder: Any = self
        search = Search(job, "torchscript", builder, Tournament(_WORKLOADS, 1, self.race, lambda: self.now))
        assert search.build_start()
        search.measure_start()
        return search


@pytest.fixture
def world(tmp_path: Path) -> Callable[..., World]:
    return lambda speed, **more: World(tmp_path, speed, **more)


def test_rule_that_slows_is_dropped(world: Callable[..., World]) -> None:
    outcome = world({0: 1.2, 1: 0.8}).search()
    assert outcome.chosen.rules == (0,)
    assert outcome.over_plain is not None
    assert outcome.over_plain.low > 1.1


def test_a_file_with_the_same_bytes_names_the_other_file(world: Callable[..., World]) -> None:
    outcome = world({}, idle=frozenset({0})).search(configured=["freeze"])
    reasons = {trial.change: trial.refused for trial in outcome.trials}
    assert reasons["without rule (1)"] == "has the same bytes as the configured file"
    outcome = world({}, idle=frozenset({"freeze", "shared-masks"})).search()
    reasons = {trial.change: trial.refused for trial in outcome.trials}
    assert reasons["with freeze"] == "has the same bytes as the configured file"
    table = capture(lambda console: report.show([outcome], console))
    assert "speedup over" in table
    assert "the configured file" in table
    (row,) = [line for line in table.splitlines() if " as configured " in line]
    assert "baseline" in row


def capture(show: Callable[[Console], None]) -> str:
    """Returns what a function prints on a console."""
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        show(console)
    return captured.get()


def test_broken_rule_is_refused_and_the_others_stay(world: Callable[..., World]) -> None:
    outcome = world({0: 1.2, 1: 3.0}, broken=frozenset([1])).search()
    assert outcome.chosen.rules == (0,)
    reasons = {trial.change: trial.refused for trial in outcome.trials if trial.refused is not None}
    assert reasons["as configured"] == "parity failed"


def test_faster_passes_are_combined(world: Callable[..., World]) -> None:
    outcome = world(dict.fromkeys(_PASSES, 1.2)).search()
    assert outcome.chosen.passes == _PASSES


def test_passes_for_the_cpu_are_not_tried_on_cuda(world: Callable[..., World]) -> None:
    outcome = world(dict.fromkeys(_PASSES, 1.2)).search(device="cuda")
    assert outcome.chosen.passes == registry.list_passes("torchscript", "cuda") == ("freeze",)


@pytest.mark.parametrize("paying", _PASSES)
def test_few_candidates_are_all_measured(world: Callable[..., World], paying: str) -> None:
    outcome = world({paying: 1.3}, rules=0).search()
    assert outcome.chosen.passes == (paying,)
    assert len([trial for trial in outcome.trials if trial.comparison is not None]) >= len(_PASSES)


def test_few_faster_candidates_are_combined(world: Callable[..., World]) -> None:
    outcome = world(dict.fromkeys(_PASSES[:2], 1.3), rules=0, broken=frozenset(_PASSES[2:])).search()
    assert outcome.chosen.passes == _PASSES[:2]


def test_small_gain_that_is_certain_is_taken(world: Callable[..., World]) -> None:
    speed = {_PASSES[0]: 1.3, _PASSES[1]: 1.008}
    outcome = world(speed, rules=0, noise=1e-4, broken=frozenset(_PASSES[2:])).search()
    assert outcome.chosen.passes == _PASSES[:2]


def test_noisy_machine_keeps_the_configured_candidate(world: Callable[..., World]) -> None:
    outcome = world({0: 1.02, 1: 0.98}, noise=0.5).search()
    assert outcome.chosen.change == "as configured"
    verdicts = [trial.comparison.verdict for trial in outcome.trials if trial.comparison is not None]
    assert verdicts
    assert set(verdicts) == {"inconclusive"}


def test_candidate_slower_than_plain_at_a_shape_is_not_chosen(world: Callable[..., World]) -> None:
    outcome = world({0: 2.0, 1: 1.0}, at={(0, "batch=1"): 0.8}).search()
    assert outcome.chosen.change == "plain export"


def test_file_that_crashes_is_refused_and_the_search_continues(world: Callable[..., World]) -> None:
    outcome = world({0: 1.2, _PASSES[0]: 2.0}, crashing=frozenset([_PASSES[0]])).search()
    assert outcome.chosen.rules == (0, 1)
    (reason,) = {trial.refused for trial in outcome.trials if trial.refused is not None}
    assert "cannot be measured: the process ended" in reason


@pytest.mark.parametrize("name", ["as configured", "plain export"])
def test_baseline_is_run_again_after_one_kill(world: Callable[..., World], name: str) -> None:
    outcome = world({0: 0.8, 1: 1.2}, killed=[name]).search()
    assert outcome.chosen.rules == (1,)
    assert outcome.over_plain is not None


def test_start_that_cannot_run_ends_the_search(world: Callable[..., World]) -> None:
    with pytest.raises(BenchError, match="by SIGKILL"):
        world({}, killed=["as configured"] * 2).search()


@pytest.mark.parametrize(("speed", "chosen"), [(0.94, "plain export"), (1.0, "as configured")])
def test_configured_candidate_slower_than_plain_is_not_chosen(
    world: Callable[..., World], speed: float, chosen: str
) -> None:
    outcome = world({0: speed}, rules=1, noise=0.04).search()
    assert outcome.chosen.change == chosen


def test_second_search_starts_from_the_choice_of_the_first(world: Callable[..., World]) -> None:
    speed = {0: 0.8, 1: 1.1, **dict.fromkeys(_PASSES, 1.2)}
    first = world(speed).search()
    second = world(speed).search([first.chosen, *first.trials])
    assert second.chosen.change == first.chosen.change
    fresh = {trial.change for trial in second.trials if not trial.earlier}
    assert fresh == {"plain export", "as configured", first.chosen.change}
    assert {trial.change for trial in second.trials} == {trial.change for trial in first.trials}


def test_configured_pass_that_slows_is_removed(world: Callable[..., World]) -> None:
    outcome = world({_PASSES[0]: 0.7}).search(configured=[_PASSES[0]])
    assert outcome.chosen.change == f"without {_PASSES[0]}"


def test_rule_with_min_matches_stays_even_if_slow(world: Callable[..., World]) -> None:
    outcome = world({0: 0.8, 1: 0.8}).search(expected=[1])
    assert outcome.chosen.rules == (1,)


def test_file_above_the_size_gate_is_refused(world: Callable[..., World]) -> None:
    outcome = world({_PASSES[0]: 3.0}, large=frozenset([_PASSES[0]])).search(max_mb=0.5)
    assert outcome.chosen.change == "as configured"
    reasons = [trial.refused for trial in outcome.trials if trial.refused is not None]
    assert reasons
    assert all("has 1 MB, more than gate.max_size_mb = 0.5" in reason for reason in reasons)


def test_cached_trials_of_other_searches_are_ignored(world: Callable[..., World]) -> None:
    damaged = [Trial("x", (99,), ()), Trial("y", (), ("unknown",))]
    assert world({0: 0.8, 1: 1.2}).search(damaged).chosen.rules == (1,)


def test_outcome_names_its_measure(world: Callable[..., World]) -> None:
    assert world({}).search().measure == "as configured"
    assert world({}, broken=frozenset([0])).search().measure == "without rule (1)"


def test_rules_without_matches_are_not_toggled(world: Callable[..., World]) -> None:
    outcome = world({}, rules=3, unused=frozenset([1])).search()
    changes = {trial.change for trial in outcome.trials}
    assert "without rule (2)" not in changes
    assert {"without rule (1)", "without rule (3)"} <= changes


_SPEEDS = st.sampled_from([0.7, 0.9, 1.0, 1.1, 1.4])


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    speeds=st.lists(_SPEEDS, min_size=2, max_size=5),
    lowered=st.lists(_SPEEDS, min_size=len(_PASSES), max_size=len(_PASSES)),
    broken=st.sets(st.integers(0, 4), max_size=2),
    noise=st.sampled_from([0.0, 0.01, 0.03]),
)
def test_choice_is_never_much_slower_than_the_baselines(
    tmp_path: Path, speeds: list[float], lowered: list[float], broken: set[int], noise: float
) -> None:
    speed: dict[Option, float] = {**dict(enumerate(speeds)), **dict(zip(_PASSES, lowered, strict=True))}
    world = World(tmp_path, speed, rules=len(speeds), broken=frozenset(broken), noise=noise)
    chosen = world.search().chosen
    factor = math.prod(speed[option] for option in (*chosen.rules, *chosen.passes))
    passing = math.prod(s for i, s in enumerate(speeds) if i not in broken)
    assert not broken & set(chosen.rules)
    assert factor >= max(1.0, passing) * (1 - 2 * noise) - 1e-9


def test_smallest_of_equally_fast_changes_is_chosen(world: Callable[..., World]) -> None:
    outcome = world({_PASSES[0]: 1.5}).search()
    assert outcome.chosen.change == f"with {_PASSES[0]}"
    assert any(_PASSES[0] in trial.passes and len(trial.passes) > 1 for trial in outcome.trials)


def test_larger_change_wins_if_one_percent_faster(
    world: Callable[..., World],
) -> None:
    outcome = world({_PASSES[0]: 1.5, _PASSES[1]: 1.04}, noise=0.02).search()
    assert {*_PASSES[:2]} <= {*outcome.chosen.passes}


def test_removal_of_the_only_rule_combines_with_a_pass(world: Callable[..., World]) -> None:
    """Without its only rule the file is the plain export, which is measured in any case, and is not a candidate."""
    outcome = world({0: 0.9, _PASSES[0]: 1.3}, rules=1).search()
    assert (outcome.chosen.rules, outcome.chosen.passes) == ((), _PASSES[:1])
    assert outcome.chosen.change == f"plain export, with {_PASSES[0]}"


def test_without_time_the_start_is_chosen(world: Callable[..., World]) -> None:
    outcome = world({0: 0.5, 1: 1.0}).search(budget=10)
    assert outcome.chosen.change == "as configured"
    assert outcome.over_plain is None
    assert outcome.shapes == ()
    assert outcome.untried_text.startswith("0 of 6 candidates tried; no time for: ")


def test_search_for_float32_layers_counts_for_the_final_export_only(world: Callable[..., World]) -> None:
    search = world({_PASSES[0]: 1.5}, layer_seconds=100.0).start()
    assert (search.build_seconds, search.export_seconds) == (1.0, 101.0)
    assert search.run((), search.tournament.clock() + 60).chosen.passes == _PASSES[:1]


def test_only_the_chosen_file_is_stored_and_its_export_is_not_reserved(world: Callable[..., World]) -> None:
    simulated = world({_PASSES[0]: 1.5}, stored_seconds=0.75)
    search = simulated.start()
    assert search.export_seconds == 0.25
    outcome = search.run((), search.tournament.clock() + 600)
    assert simulated.stored == [{*outcome.chosen.rules, *outcome.chosen.passes}]


def test_last_rung_has_fewer_rounds_if_time_is_short(world: Callable[..., World]) -> None:
    small, large = (world({_PASSES[0]: 1.5}, noise=0.0) for _ in range(2))
    assert small.search(budget=30).chosen.passes == large.search().chosen.passes == _PASSES[:1]
    assert small.races[-1][1] == 4
    assert large.races[-1][1] == 10


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.floats(0, 200),
    build_seconds=st.floats(0.1, 10),
    launch_seconds=st.floats(0.1, 5),
    slower=st.floats(1, 3),
    rules=st.integers(0, 4),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_search_ends_within_its_budget(
    tmp_path: Path, budget: float, build_seconds: float, launch_seconds: float, slower: float, rules: int, speed: float
) -> None:
    world = World(tmp_path, {0: speed}, rules=rules, build_seconds=build_seconds, launch_seconds=launch_seconds)
    start: list[float] = []
    run_rung = Search.measure_start

    def measure(search: Search) -> None:
        run_rung(search)
        start.append(world.now)
        if slower > 2:  # the machine gets busy after the first measurement
            world.launch_seconds *= slower

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "measure_start", measure)
        outcome = world.search(budget=budget)
    late = world.now - start[0] - budget
    # Only one launch or build may be late: the one during which the machine got slower.
    assert late <= 1e-6 + (0 if slower <= 2 else max(files for files, _ in world.races) * world.launch_seconds * 2)
    assert set(outcome.chosen.rules) <= set(range(rules))


@given(now=st.floats(0, 1e5), seconds=st.floats(-100, 1e5), formats=st.integers(1, 3), needed=st.floats(0, 1e4))
def test_shares_never_exceed_the_remaining_time(now: float, seconds: float, formats: int, needed: float) -> None:
    end = now + seconds
    for remaining in range(formats, 0, -1):
        deadline = share(now, end, remaining, needed)
        assert now <= deadline <= max(now, end) + 1e-6
        now = deadline


def test_share_that_is_too_short_becomes_all_of_the_time() -> None:
    assert share(0, 30, 3, 5) == 10
    assert share(0, 30, 3, 15) == 30
    assert share(10, 5, 3, 15) == 10
