"""Searches for the fastest candidate of one format.

Each rung halves the field of candidates and doubles the rounds (successive halving: Jamieson and Talwalkar,
Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016), so that promising candidates get most of
the time. Only the last rung decides, because its times did not decide who ran in it. Choosing by the times that
brought a candidate into the last rung would choose noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from optexport.bench.artifact import Artifact
from optexport.bench.turns import Settings
from optexport.bundle.outcomes import LEAST_ROUNDS, PLAIN_EXPORT, Comparison, Outcome, Trial, name_file
from optexport.config.schema import Format
from optexport.errors import BenchError
from optexport.exporters.registry import list_passes
from optexport.job import Job
from optexport.transformations import KeepOutputs
from optexport.transformations.apply import NamedRule
from optexport.tuning.candidate import Candidate, Option, configured, describe_change, in_order, passes_in, rules_in
from optexport.tuning.candidate_builder import CandidateBuilder, CandidateRejected, digest_of
from optexport.tuning.tournament import ROUNDS_PER_LAUNCH, Tournament

# Two launches, because the memory layout of a single process may decide who drops out (see bench/turns.py).
_FIRST_ROUNDS = 2 * ROUNDS_PER_LAUNCH
# Share of the time before the last rung that may be spent on building candidates; the rest is for measuring. More than
# half, because a candidate without a file cannot win, while fewer rounds only rank the others less exactly.
BUILD_SHARE = 0.6
# Share of the time that the last rung may take, unless that is too short for a verdict. It alone decides, but only on
# candidates that were built and measured before.
_LAST_SHARE = 0.5
# Number of the best single changes that are combined.
_MAX_COMBINED = 4
_FINALISTS = 2
# If the times of two candidates overlap, the larger change must look this many times as fast to be chosen. A start that
# looks this much slower than the plain export, and is at best not this much faster, is not kept.
_MIN_GAIN = 1.01


class Search:
    """The search for one format's fastest candidate. Runs once: `build_start`, `measure_start`, `run`.

    Args:
        job: The run.
        file_format: Format of the files.
        builder: Builds and checks files.
        tournament: Measures files.

    Attributes:
        build_seconds: Seconds of the latest build and check of a file, without the search for float32 layers.
    """

    def __init__(self, job: Job, file_format: Format, builder: CandidateBuilder, tournament: Tournament) -> None:
        self.job, self.format, self.builder, self.tournament = job, file_format, builder, tournament
        self.build_seconds = 0.0
        self.configured = self.start = configured(job, file_format)
        # Rules that decide the outputs, or must match, do not depend on speed.
        required = [i for i in rules_in(self.start) if job.rules[i].min_matches or _keeps_outputs(job.rules[i])]
        self.plain: Candidate = frozenset(required)
        self.built: list[Candidate] = []
        self.artifacts: dict[Candidate, Artifact] = {}
        self.rejected: dict[Candidate, str] = {}
        self.untried: list[Candidate] = []
        self._names: dict[str, str] = {}
        self._has_last_rung = False

    def build_start(self) -> bool:
        """Builds the configured file, or one with as many of its options as pass; returns False if none passes.

        The run itself reports why none passes.
        """
        self._find_start()
        return self.start in self.built

    def measure_start(self) -> None:
        """Measures the start once, which shows how long measurements take."""
        self._run_rung([], ROUNDS_PER_LAUNCH)

    @property
    def is_fixed(self) -> bool:
        """True if the start accepts only the traced shape."""
        return self.artifacts[self.start].fixed

    @property
    def export_seconds(self) -> float:
        """Seconds to export and check the chosen file after the search; 0 until a file is built."""
        if not self.build_seconds:
            return 0.0
        search_seconds = self.builder.layer_search_seconds(self.format)
        return max(0.0, self.build_seconds - self.builder.saved_seconds(self.format)) + search_seconds

    @property
    def least_seconds(self) -> float:
        """Seconds to build one candidate, and to compare it with the baselines."""
        return self.build_seconds + self._last_rung_seconds(1)

    def changes(self) -> list[Candidate]:
        """Returns the start with each format pass toggled, and, once it is built, without each matching rule."""
        # Format passes first, because they change more, in case the time is too short for all.
        passes: list[Option] = [*list_passes(self.format, self.job.config.model.device)]
        rules = self.builder.matching_rules(self.start) if self.start in self.built else []
        return [self.start ^ {option} for option in [*passes, *rules] if option not in self.plain]

    def run(self, earlier: Sequence[Trial], deadline: float) -> Outcome:
        """Runs the search.

        Args:
            earlier: Trials of an earlier run, with the chosen one first.
            deadline: When the search must end, by the clock of the tournament. If that is too early for one candidate,
                the start is chosen.
        """
        if self.tournament.clock() + self.least_seconds > deadline:
            return self.outcome_without_time()
        self._try(self.plain)
        if self.tournament.clock() + self.least_seconds > deadline:
            return self.outcome_without_time()
        cached = {Candidate([*trial.rules, *trial.passes]): trial for trial in earlier if self._is_valid(trial)}
        chosen_before = list(cached)[:1]
        new_changes = [candidate for candidate in self.changes() if candidate not in cached]
        launches = Settings(rounds=max(LEAST_ROUNDS, self.job.config.bench.rounds)).launches  # as many as a benchmark
        rounds = launches * ROUNDS_PER_LAUNCH
        longest_last = max(_LAST_SHARE * (deadline - self.tournament.clock()), self._last_rung_seconds(1))
        rung_deadline = deadline - min(longest_last, self._last_rung_seconds(_FINALISTS + 1, rounds))
        self._build([*chosen_before, *new_changes], rung_deadline)
        self._race(rounds, rung_deadline, deadline)
        return self.outcome(list(cached.items()))

    def outcome(self, cached: Sequence[tuple[Candidate, Trial]] = ()) -> Outcome:
        """Returns the choice by the measurements so far, stores its export for the run, and removes all files."""
        chosen = self._choose() if self._has_last_rung else self.start
        if chosen in self.artifacts:
            self.builder.store(self.artifacts[chosen])
        for candidate in list(self.artifacts):
            self.builder.discard(self.artifacts.pop(candidate))
        measured_plain = chosen != self.plain and self._has_last_rung and self.tournament.has_run_last(self.plain)
        tried = [*self.built, *self.rejected]
        return Outcome(
            self.format,
            self._trial(chosen),
            self._describe(self.start),
            self._compare_last(self.plain, chosen) if measured_plain else None,
            tuple(
                [self._trial(candidate) for candidate in tried]
                + [replace(trial, earlier=True) for candidate, trial in cached if candidate not in tried]
            ),
            tuple(self._describe(candidate) for candidate in self.untried),
            tuple(workload.label for workload in self.tournament.workloads) if self._has_last_rung else (),
        )

    def outcome_without_time(self) -> Outcome:
        """Returns the start as the choice, and all changes as untried."""
        self.untried = self._without_baselines(self.changes())
        return self.outcome()

    def _is_valid(self, trial: Trial) -> bool:
        """Returns True if a cached trial fits this search; a damaged cache may hold anything."""
        passes = list_passes(self.format, self.job.config.model.device)
        return set(trial.rules) <= set(range(len(self.job.rules))) and set(trial.passes) <= set(passes)

    def _find_start(self) -> None:
        """Sets the start: the configured candidate, or as many of its options as pass."""
        self._try(self.configured)
        if self.configured in self.built:
            return
        self._try(self.plain)
        self.start = self.plain
        for option in in_order(self.configured - self.plain):
            self._try(self.start | {option})
            if self.start | {option} in self.built:
                self.start |= {option}

    def _build(self, candidates: Sequence[Candidate], deadline: float) -> None:
        """Builds candidates while there is time to build them and for their first rung.

        The first one may take all the time, because without it there is nothing to measure.
        """
        now = self.tournament.clock()
        build_deadline = now + BUILD_SHARE * (deadline - now)
        for candidate in candidates:
            count = len(self._without_baselines(self.built)) + 1
            # Few candidates are all in the last rung, whose time is for one of them at least.
            few = count <= _FINALISTS
            rung = self.tournament.cost(*((count - 1, LEAST_ROUNDS) if few else (count + 2, _FIRST_ROUNDS)))
            self._try(candidate, min(build_deadline, deadline - rung) if count > 1 else deadline)

    def _try(self, candidate: Candidate, deadline: float = math.inf) -> None:
        """Builds and checks a candidate, unless that was done or would take too long."""
        if candidate in self.built or candidate in self.rejected:
            return
        start, searched = self.tournament.clock(), self.builder.layer_search_seconds(self.format)
        if start + self.build_seconds > deadline:
            self.untried.append(candidate)
            return
        try:
            artifact = self.builder.build(self.format, candidate, self._describe(candidate))
        except CandidateRejected as refusal:
            self.rejected[candidate] = str(refusal)
            return
        search_seconds = self.builder.layer_search_seconds(self.format) - searched
        self.build_seconds = self.tournament.clock() - start - search_seconds
        digest = digest_of(artifact)
        if reason := self._find_race_problem(candidate, artifact, digest):
            self.rejected[candidate] = reason
            self.builder.discard(artifact)
            return
        self._names[digest] = artifact.name
        self.built.append(candidate)
        self.artifacts[candidate] = artifact

    def _find_race_problem(self, candidate: Candidate, artifact: Artifact, digest: str) -> str | None:
        """Returns why a checked file need not be measured, or None."""
        if artifact.fixed and not all(workload.traced for workload in self.tournament.workloads):
            return "accepts only the traced shape, but other shapes must be measured"
        limits = self.job.config.gate.max_size_mb
        maximum = None if limits is None else limits.of(self.format)
        if maximum is not None and artifact.size > maximum * 1e6 and candidate not in (self.plain, self.configured):
            return f"has {artifact.size / 1e6:.4g} MB, more than gate.max_size_mb = {maximum:g}"
        if digest in self._names and candidate not in (self.configured, self.start, self.plain):
            return f"has the same bytes as {name_file(self._names[digest])}"
        return None

    def _race(self, rounds: int, rung_deadline: float, deadline: float) -> None:
        """Halves the field in each rung, adds combinations of the best after the first, and runs the last rung.

        Args:
            rounds: Rounds of the last rung, if there is time for them.
            rung_deadline: When the rungs before the last one must be done.
            deadline: When the last rung must be done.
        """
        rung_rounds = _FIRST_ROUNDS
        field = self._without_baselines(self.built)
        while self._is_rung_due(field, rung_rounds, rung_deadline):
            field = self._run_rung(field, rung_rounds, rung_deadline)
            combined = self._combine(field, rung_deadline) if rung_rounds == _FIRST_ROUNDS else []
            field = self._keep_fastest(field, max(_FINALISTS, len(field) // 2)) + combined
            rung_rounds *= 2
        finalists = self._keep_fastest(field, _FINALISTS)
        available = deadline - self.tournament.clock()
        while finalists and self._last_rung_seconds(len(finalists)) > available:
            self._drop(finalists.pop())
        if (finalists or self.plain != self.start) and self._last_rung_seconds(len(finalists)) <= available:
            self._run_rung(finalists, rounds, deadline)
            self._has_last_rung = True

    def _last_rung_seconds(self, finalists: int, rounds: int = LEAST_ROUNDS) -> float:
        """Estimates the seconds of the last rung, by default with the fewest rounds that give a verdict."""
        return self.tournament.cost(finalists + len({self.plain, self.start}), rounds)

    def _combine(self, field: Sequence[Candidate], deadline: float) -> list[Candidate]:
        """Combines the best changes so far; leaving out all rules counts as one change."""
        uses_plain = self.plain != self.start and self.tournament.has_run(self.plain)
        singles = [*field, *([self.plain] if uses_plain else [])]
        better = [candidate for candidate in self._by_speed(singles)[:_MAX_COMBINED] if self._speedup(candidate) > 1]
        combined = []
        for count in range(2, len(better) + 1):
            changes = frozenset[Option]().union(*(self.start ^ candidate for candidate in better[:count]))
            self._try(self.start ^ changes, deadline)
            combined.append(self.start ^ changes)
        # Two combinations may be equal: leaving out all rules includes leaving out one.
        distinct = self._without_baselines(dict.fromkeys(combined))
        new = [candidate for candidate in distinct if candidate in self.artifacts]
        return [candidate for candidate in new if candidate not in field]

    def _choose(self) -> Candidate:
        """Returns the fastest of the last rung, or the start if no other is certainly faster.

        Of equally fast candidates, the smallest change wins. No candidate that is slower than the plain export wins.
        """
        finalists = [item for item in self._without_baselines(self.built) if self.tournament.has_run_last(item)]
        faster = [candidate for candidate in [*finalists, self.plain] if self._is_faster(candidate)]
        faster.sort(key=lambda candidate: self._compare_last(self.start, candidate).speedup, reverse=True)
        equal = [candidate for candidate in faster if self._is_equally_fast(candidate, faster[0])]
        equal.sort(key=lambda candidate: len(candidate ^ self.start))
        slower = [candidate for candidate in faster if candidate not in equal]
        ranked = (*equal, *slower, self.start)
        return next((candidate for candidate in ranked if not self._is_worse_than_plain(candidate)), self.plain)

    def _is_equally_fast(self, candidate: Candidate, fastest: Candidate) -> bool:
        """Returns True if the fastest is not certainly faster, nor by enough to matter."""
        if candidate == fastest:
            return True
        comparison = self._compare_last(candidate, fastest)
        return comparison.verdict != "faster" and comparison.speedup < _MIN_GAIN

    def _is_worse_than_plain(self, candidate: Candidate) -> bool:
        """Returns True if it is slower at one shape, or slower overall without real gains."""
        if not self.tournament.has_run_last(self.plain) or candidate == self.plain:
            return False
        overall = self.tournament.compare(self.plain, candidate)
        return (overall.speedup < 1 / _MIN_GAIN and overall.high < _MIN_GAIN) or any(
            self.tournament.compare_at(workload, self.plain, candidate).verdict == "slower"
            for workload in self.tournament.workloads
        )

    def _is_faster(self, candidate: Candidate) -> bool:
        """Returns True if it is certainly faster than the start.

        The plain export ran in every rung without being selected, so that all rungs count for it.
        """
        last = candidate != self.plain
        ran = self.tournament.has_run_last(candidate)
        return ran and self.tournament.compare(self.start, candidate, last=last).verdict == "faster"

    def _compare_last(self, baseline: Candidate, candidate: Candidate) -> Comparison:
        return self.tournament.compare(baseline, candidate, last=True)

    def _speedup(self, candidate: Candidate) -> float:
        return self.tournament.compare(self.start, candidate).speedup

    def _without_baselines(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate not in (self.start, self.plain)]

    def _by_speed(self, field: Sequence[Candidate]) -> list[Candidate]:
        """Sorts by speed; combinations that have not run come first, as they promise most."""
        return sorted(
            field,
            key=lambda candidate: self._speedup(candidate) if self.tournament.has_run(candidate) else math.inf,
            reverse=True,
        )

    def _keep_fastest(self, field: Sequence[Candidate], count: int) -> list[Candidate]:
        """Returns the fastest and the fastest single change; discards the other files."""
        ranked = self._by_speed(field)
        single = [candidate for candidate in ranked if len(candidate ^ self.start) == 1][:1]
        fastest = [candidate for rank, candidate in enumerate(ranked) if rank < count or candidate in single]
        for candidate in ranked:
            if candidate not in fastest:
                self._drop(candidate)
        return fastest

    def _drop(self, candidate: Candidate) -> None:
        """Removes the file of a candidate that dropped out."""
        self.builder.discard(self.artifacts.pop(candidate))

    def _is_rung_due(self, field: Sequence[Candidate], rounds: int, deadline: float) -> bool:
        """Returns True if another rung should run before the last one.

        The first rung always runs if it decides who drops out, because its files exist already. With as many
        candidates as the last rung takes, a rung only shows what to combine.
        """
        in_time = self.tournament.clock() + self.tournament.cost(len(field) + 2, rounds) < deadline
        if rounds == _FIRST_ROUNDS:
            return len(field) > _FINALISTS or (len(field) > 1 and in_time)
        return len(field) > _FINALISTS + 1 and in_time  # one more than the finalists, which may be a single change

    def _run_rung(self, field: Sequence[Candidate], rounds: int, deadline: float = math.inf) -> list[Candidate]:
        """Measures a field with the start and the plain export; rejects what cannot run.

        The start and the plain export have a second try, because a process may end for reasons unrelated to its file.
        """
        names = (self.plain, self.start, *field)
        running = {candidate: self.artifacts[candidate] for candidate in names if candidate in self.artifacts}
        retried: list[Candidate] = []
        while True:
            try:
                self.tournament.rung(running, rounds, deadline)
                return [candidate for candidate in field if candidate in running]
            except BenchError as error:
                failed = next((item for item, artifact in running.items() if artifact.name == error.location), None)
                if failed in (self.plain, self.start) and failed not in retried:
                    retried.append(failed)
                    continue
                if failed is None or failed == self.start:
                    raise
                self.rejected[failed] = f"cannot be measured: {error.message}"
                self.built.remove(failed)
                self.builder.discard(self.artifacts.pop(failed))
                del running[failed]

    def _describe(self, candidate: Candidate) -> str:
        without_rules = rules_in(candidate) == rules_in(self.plain) != rules_in(self.configured)
        if candidate == self.plain != self.configured or without_rules:
            return ", ".join([PLAIN_EXPORT, *(f"with {name}" for name in passes_in(candidate))])
        return describe_change(self.configured, candidate, self.job.rules)

    def _trial(self, candidate: Candidate) -> Trial:
        measured = candidate != self.start and self.tournament.has_run(candidate)
        return Trial(
            self._describe(candidate),
            tuple(rules_in(candidate)),
            tuple(passes_in(candidate)),
            self.rejected.get(candidate),
            self.tournament.compare(self.start, candidate) if measured else None,
        )


def _keeps_outputs(rule: NamedRule) -> bool:
    return isinstance(rule.transformation, KeepOutputs)
