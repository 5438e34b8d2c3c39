"""The search for one format's recipe: the files are made and proven, and race in heats.

The field of candidates is halved from heat to heat while the rounds double (successive halving: Jamieson and Talwalkar,
Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016), so that most of the time goes to those
that may win. What wins is decided by a last heat alone, whose times had no say in who ran in it: picking the fastest of
many by the times that made it look so would pick noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from optexport.bench.artifact import Artifact
from optexport.bench.comparison import Comparison
from optexport.config import format_passes
from optexport.config.benchmarks import LEAST_ROUNDS
from optexport.config.schema import Format
from optexport.errors import BenchError
from optexport.job import Job
from optexport.transformations import KeepOutputs
from optexport.transformations.apply import NamedRule
from optexport.tuning.candidate import Ingredient, Recipe, change_in_words, configured, in_order, passes_in, rules_in
from optexport.tuning.candidate_builder import CandidateBuilder, CandidateRejected, content_of
from optexport.tuning.outcome import Outcome, Trial
from optexport.tuning.tournament import Contest

_FIRST_ROUNDS = 4
# Of the candidates' time, what may go into making them; the rest is for races.
_MAKING = 0.6
# How many of the best single changes are tried together.
_MOST_TOGETHER = 4
_FINALISTS = 2
# Of two that cannot be told apart, how many times as fast the larger change must look to be made; a start that looks
# as much slower than the plain export, and is not as much faster at best, is no start to stay with.
_WORTH_A_CHANGE = 1.01


class Search:
    """The search for one format's recipe, once.

    Args:
        workshop: Makes the files.
        contest: Lets them race.
        seconds: For candidates. What they are compared with is made in any case, and the last heat is run; both come
            on top, so that a format whose files take long to make has candidates too.

    Attributes:
        spent: Seconds that candidates took.
    """

    def __init__(
        self, job: Job, file_format: Format, workshop: CandidateBuilder, contest: Contest, seconds: float
    ) -> None:
        self.job, self.format, self.workshop, self.seconds = job, file_format, workshop, seconds
        self.begun = self.end = math.inf
        self.spent = 0.0
        self.contest = contest
        self.configured = self.start = configured(job, file_format)
        # What decides the outputs, and what is expected to find work, is not a matter of speed.
        kept = [i for i in rules_in(self.start) if job.rules[i].min_matches or _keeps_outputs(job.rules[i])]
        self.plain: Recipe = frozenset(kept)
        self.made: list[Recipe] = []
        self.artifacts: dict[Recipe, Artifact] = {}
        self.refused: dict[Recipe, str] = {}
        self.untried: list[Recipe] = []
        self._contents: dict[str, str] = {}

    def run(self, earlier: Sequence[Trial]) -> Outcome | None:
        """Searches; None where nothing passes, of which the run itself will tell."""
        self._try(self.plain)
        self._start_from_what_passes()
        if self.start not in self.made:
            return None
        self.begun = time.monotonic()
        self.end = self.begun + self.seconds
        known = {Recipe([*trial.rules, *trial.passes]): trial for trial in earlier if self._can_be(trial)}
        chosen_then = list(known)[:1]
        for recipe in [*chosen_then, *(recipe for recipe in self._single_changes() if recipe not in known)]:
            self._try(recipe, until=self.begun + _MAKING * self.seconds)
        self._race()
        chosen = self._choose()
        measured_plain = chosen != self.plain and self.contest.ran_last(self.plain)
        tried = [*self.made, *self.refused]
        return Outcome(
            self.format,
            self._trial(chosen),
            self._told(self.start),
            self._last(self.plain, chosen) if measured_plain else None,
            tuple(
                [self._trial(recipe) for recipe in tried]
                + [replace(trial, earlier=True) for recipe, trial in known.items() if recipe not in tried]
            ),
            tuple(self._told(recipe) for recipe in self.untried),
        )

    def _can_be(self, trial: Trial) -> bool:
        """Whether a trial that was kept is one of this search's; a damaged one may say anything."""
        known = format_passes.of_format(self.format, self.job.config.model.device)
        return set(trial.rules) <= set(range(len(self.job.rules))) and set(trial.passes) <= set(known)

    def _start_from_what_passes(self) -> None:
        """Where what is configured is refused, starts from those of its ingredients that pass, taken one by one."""
        self._try(self.configured)
        if self.configured in self.made:
            return
        self.start = self.plain
        for ingredient in in_order(self.configured - self.plain):
            self._try(self.start | {ingredient})
            if self.start | {ingredient} in self.made:
                self.start |= {ingredient}

    def _single_changes(self) -> list[Recipe]:
        """The start with each lowering that it lacks, or without one it has, and without each rule that finds work."""
        # Those first that change more, should there be no time for all.
        lowered: list[Ingredient] = [*format_passes.of_format(self.format, self.job.config.model.device)]
        rules = [i for i in self.workshop.working(self.start) if i not in self.plain]
        return [self.start ^ {ingredient} for ingredient in [*lowered, *rules]]

    def _try(self, recipe: Recipe, until: float = math.inf) -> None:
        """Makes and proves a file, once, if there is time for it."""
        if recipe in self.made or recipe in self.refused:
            return
        if time.monotonic() > until:
            self.untried.append(recipe)
            return
        try:
            artifact = self.workshop.make(self.format, recipe, self._told(recipe))
        except CandidateRejected as refusal:
            self.refused[recipe] = str(refusal)
            return
        content = content_of(artifact)
        if reason := self._why_not_raced(recipe, artifact, content):
            self.refused[recipe] = reason
            self.workshop.discard(artifact)
            return
        self._contents[content] = artifact.name
        self.made.append(recipe)
        self.artifacts[recipe] = artifact

    def _why_not_raced(self, recipe: Recipe, artifact: Artifact, content: str) -> str | None:
        """Why a file that is proven is no candidate; None if it is one."""
        if artifact.fixed and not all(workload.traced for workload in self.contest.workloads):
            return "it takes the traced shape only, and others are to be measured"
        bar = self.job.config.gate.max_size_mb
        most = None if bar is None else bar.of(self.format)
        if most is not None and artifact.size > most * 1e6 and recipe not in (self.plain, self.configured):
            return f"it takes {artifact.size / 1e6:.4g} MB, and gate.max_size_mb is {most:g}"
        if content in self._contents and recipe not in (self.configured, self.start):
            return f'it gives the same file as "{self._contents[content]}"'
        return None

    def _race(self) -> None:
        """Halves the field from heat to heat; after the first the best changes are tried together too."""
        rounds = _FIRST_ROUNDS
        field = self._candidates(self.made)
        while self._is_heat_due(field, rounds):
            field = self._heat(field, rounds)
            together = self._together(field) if rounds == _FIRST_ROUNDS else []
            field = self._kept(field, max(_FINALISTS, len(field) // 2)) + together
            rounds *= 2
        self.spent = time.monotonic() - self.begun
        self._heat(self._kept(field, _FINALISTS), max(LEAST_ROUNDS, self.job.config.bench.rounds))
        for recipe in list(self.artifacts):
            self.workshop.discard(self.artifacts.pop(recipe))

    def _together(self, field: Sequence[Recipe]) -> list[Recipe]:
        """The best changes so far, two and more of them at once; to leave out all rules is one of them."""
        singles = [*field, *([self.plain] if self.plain != self.start and self.contest.ran(self.plain) else [])]
        better = [recipe for recipe in self._fastest(singles)[:_MOST_TOGETHER] if self._speedup(recipe) > 1]
        found = []
        for count in range(2, len(better) + 1):
            changes = frozenset[Ingredient]().union(*(self.start ^ one for one in better[:count]))
            self._try(self.start ^ changes, until=self.end)
            found.append(self.start ^ changes)
        return [recipe for recipe in self._candidates(found) if recipe in self.artifacts and recipe not in field]

    def _choose(self) -> Recipe:
        """The fastest of the last heat if it is faster for sure, else the start; never what is slower than plain.

        Of those that are as fast, the one that changes least.
        """
        ran = [recipe for recipe in self._candidates(self.made) if self.contest.ran_last(recipe)]
        faster = [recipe for recipe in [*ran, self.plain] if self._is_faster(recipe)]
        faster.sort(key=lambda recipe: self._last(self.start, recipe).speedup, reverse=True)
        alike = [one for one in faster if self._as_fast(one, faster[0])]
        alike.sort(key=lambda recipe: len(recipe ^ self.start))
        others = [one for one in faster if one not in alike]
        return next((one for one in (*alike, *others, self.start) if not self._worse_than_plain(one)), self.plain)

    def _as_fast(self, recipe: Recipe, fastest: Recipe) -> bool:
        """Whether what lies between two is neither seen for sure nor worth a change, should it be as it looks."""
        if recipe == fastest:
            return True
        found = self._last(recipe, fastest)
        return found.verdict != "faster" and found.speedup < _WORTH_A_CHANGE

    def _worse_than_plain(self, recipe: Recipe) -> bool:
        """Whether it is slower at one shape, or looks slower over all and is worth no change at best."""
        if not self.contest.ran_last(self.plain) or recipe == self.plain:
            return False
        over_all = self.contest.compare(self.plain, recipe)
        return (over_all.speedup < 1 / _WORTH_A_CHANGE and over_all.high < _WORTH_A_CHANGE) or any(
            self.contest.compare_at(workload, self.plain, recipe).verdict == "slower"
            for workload in self.contest.workloads
        )

    def _is_faster(self, recipe: Recipe) -> bool:
        """Whether it is faster than the start for sure; the plain export by all heats, of which no one had a choice."""
        last = recipe != self.plain
        return self.contest.ran_last(recipe) and self.contest.compare(self.start, recipe, last=last).verdict == "faster"

    def _last(self, baseline: Recipe, candidate: Recipe) -> Comparison:
        return self.contest.compare(baseline, candidate, last=True)

    def _speedup(self, recipe: Recipe) -> float:
        return self.contest.compare(self.start, recipe).speedup

    def _candidates(self, recipes: Iterable[Recipe]) -> list[Recipe]:
        return [recipe for recipe in recipes if recipe not in (self.start, self.plain)]

    def _fastest(self, field: Sequence[Recipe]) -> list[Recipe]:
        """The fastest first; what has not run yet before all, since only what promises most is made without."""
        return sorted(
            field, key=lambda recipe: self._speedup(recipe) if self.contest.ran(recipe) else math.inf, reverse=True
        )

    def _kept(self, field: Sequence[Recipe], most: int) -> list[Recipe]:
        """The fastest, and the fastest single change to compare several with; the files of the others go."""
        ordered = self._fastest(field)
        single = [recipe for recipe in ordered if len(recipe ^ self.start) == 1][:1]
        kept = [recipe for index, recipe in enumerate(ordered) if index < most or recipe in single]
        for recipe in ordered:
            if recipe not in kept:
                self.workshop.discard(self.artifacts.pop(recipe))
        return kept

    def _is_heat_due(self, field: Sequence[Recipe], rounds: int) -> bool:
        """Whether to run one before the last heat.

        The first is run in any case where it decides what drops out, since what it was made for is made. Of as many as
        the last heat takes it tells no more than what to try together.
        """
        in_time = time.monotonic() + self.contest.cost(len(field) + 2, rounds) < self.end
        if self.contest.rungs == 0:
            return len(field) > _FINALISTS or (len(field) > 1 and in_time)
        return len(field) > _FINALISTS + 1 and in_time  # of which one may be a single change

    def _heat(self, field: Sequence[Recipe], rounds: int) -> list[Recipe]:
        """Lets candidates race with the start and the plain export; those that cannot be run there are refused.

        What the others are compared with has a second chance, as a process may end for a cause that is not its file's.
        """
        running = {one: self.artifacts[one] for one in (self.plain, self.start, *field) if one in self.artifacts}
        excused: list[Recipe] = []
        while True:
            try:
                self.contest.rung(running, rounds)
                return [recipe for recipe in field if recipe in running]
            except BenchError as error:
                broken = next((recipe for recipe, artifact in running.items() if artifact.name == error.location), None)
                if broken in (self.plain, self.start) and broken not in excused:
                    excused.append(broken)
                    continue
                if broken is None or broken == self.start:
                    raise
                self.refused[broken] = f"it cannot be run in a process of its own: {error.message}"
                self.made.remove(broken)
                self.workshop.discard(self.artifacts.pop(broken))
                del running[broken]

    def _told(self, recipe: Recipe) -> str:
        without_rules = rules_in(recipe) == rules_in(self.plain) != rules_in(self.configured)
        if recipe == self.plain != self.configured or without_rules:
            return ", ".join(["plain export", *(f"with {name}" for name in passes_in(recipe))])
        return change_in_words(self.configured, recipe, self.job.rules)

    def _trial(self, recipe: Recipe) -> Trial:
        measured = recipe != self.start and self.contest.ran(recipe)
        return Trial(
            self._told(recipe),
            tuple(rules_in(recipe)),
            tuple(passes_in(recipe)),
            self.refused.get(recipe),
            self.contest.compare(self.start, recipe) if measured else None,
        )


def _keeps_outputs(rule: NamedRule) -> bool:
    return isinstance(rule.transformation, KeepOutputs)
