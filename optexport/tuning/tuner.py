"""Chooses the fastest rules and format passes for each format."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optexport._utils.progress import Progress
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Outcome
from optexport.cache import keys, store
from optexport.cache.imported_modules import code_of
from optexport.cache.model_key import make_model_key
from optexport.config.derived import resolve_config
from optexport.config.metrics import CUSTOM_METRIC
from optexport.config.schema import Format
from optexport.exporters import registry
from optexport.job import Job
from optexport.parity.checker import ParityChecker
from optexport.runtime import devices
from optexport.tracing.trace import Traced
from optexport.transformations.apply import is_built_in
from optexport.tuning import trial_cache
from optexport.tuning.candidate import configured
from optexport.tuning.candidate_builder import CandidateBuilder
from optexport.tuning.search import BUILD_SHARE, Search
from optexport.tuning.tournament import ROUNDS_PER_LAUNCH, Tournament

# Launches of one file at one shape that a format needs time for, to be measured at several shapes. At three shapes, a
# launch may take three times as long. That leaves 40: two for each of 12 files in the first rung, and four, which a
# verdict needs, for each of four files in the last one.
_LAUNCHES_FOR_SEVERAL_SHAPES = 120
_NO_TIME = "no time for candidates, the files stay as configured"


@dataclass(frozen=True)
class Budget:
    """The time of a tuned run.

    Attributes:
        text: The budget in words, such as ``5m``.
        end: When the run must end, by `time.monotonic`.
        reserve: Seconds of the work after the search, without exporting and checking files.
        build_seconds: Expected seconds to export and check a file in the first format, until one is built.
    """

    text: str
    end: float
    reserve: float
    build_seconds: float


def tune(
    builder: CandidateBuilder, workloads: Sequence[Workload], needs_all: bool, budget: Budget, progress: Progress
) -> tuple[Job, tuple[Outcome, ...]]:
    """Searches for the fastest candidate of each format.

    Args:
        builder: Builds and checks the candidates of a job.
        workloads: Inputs to measure on, with the most important ones first.
        needs_all: False if only the first workload may be measured for lack of time.
        budget: The time of the run. The search ends early enough for the export and checks of the chosen files.
        progress: Times the search of each format, and shows what the budget is enough for.

    Returns:
        The job with the chosen rules and format passes, and the outcome of each search.
    """
    job = builder.job
    formats = list(dict.fromkeys(job.config.export.formats))
    # ONNX first, in case there is time for one format only: its processes start fastest.
    searches = [
        Search(job, name, builder, Tournament(workloads if needs_all else workloads[:1], job.config.bench.threads))
        for name in sorted(formats, key=lambda name: name != "onnx")
    ]
    outcomes: list[Outcome] = []
    exports: list[float] = []  # measured or expected seconds of the final exports
    slowest = budget.build_seconds
    for index, search in enumerate(searches):
        with progress.step(f"tune {search.format}"):
            remaining = len(searches) - index
            # It is built now and at the end.
            in_time = time.monotonic() < _find_end(budget, exports, remaining + 1, slowest)
            if in_time and not search.build_start():
                continue  # the run itself reports why no file passes
            slowest = search.build_seconds if index == 0 and in_time else max(slowest, search.build_seconds)
            exports.append(search.export_seconds if in_time else slowest / 2)
            end = _find_end(budget, exports, remaining - 1, slowest)
            in_time = in_time and time.monotonic() + search.tournament.cost(1, ROUNDS_PER_LAUNCH) < end
            if in_time:
                search.measure_start()
            if not outcomes:
                progress.note(f"tune: budget {budget.text}: {_estimate(searches, end - time.monotonic())}")
            outcomes.append(
                _run_search(search, workloads, end, remaining) if in_time else search.outcome_without_time()
            )
    outcomes.sort(key=lambda outcome: [*map(str, formats)].index(outcome.format))
    return _with_chosen(job, outcomes), tuple(outcomes)


def _find_end(budget: Budget, exports: Sequence[float], unbuilt: int, slowest: float) -> float:
    """Returns when all searches must end.

    Args:
        budget: The time of the run.
        exports: Seconds of the final exports of some formats.
        unbuilt: Number of the other formats. Their exports are expected to take half of the slowest one, because ONNX
            is first and takes longest.
        slowest: Seconds of the slowest build so far.
    """
    return budget.end - budget.reserve - sum(exports) - unbuilt * slowest / 2


def _estimate(searches: Sequence[Search], seconds: float) -> str:
    """Describes how many candidates there is time for, by the costs of the first format.

    Args:
        seconds: Seconds of all searches.
    """
    first, formats = searches[0], len(searches)
    if not first.build_seconds:
        return _NO_TIME
    mean = first.build_seconds * (formats + 1) / (2 * formats)  # see `_find_end`
    plain = first.build_seconds
    affordable = min(BUILD_SHARE * seconds / mean, (seconds - plain - first.least_seconds) / mean + 1)
    count = min(sum(len(search.changes()) for search in searches), math.floor(affordable))
    return f"about {count} candidate{'s' if count > 1 else ''}" if count > 0 else _NO_TIME


def _run_search(search: Search, workloads: Sequence[Workload], end: float, remaining: int) -> Outcome:
    """Runs the search of one format, whose start was measured."""
    tournament = search.tournament
    needed = search.least_seconds + search.build_seconds  # with the plain export
    deadline = share(tournament.clock(), end, remaining, needed)
    launches = (deadline - tournament.clock()) / tournament.cost(1, ROUNDS_PER_LAUNCH)
    if len(tournament.workloads) < len(workloads) and launches >= _LAUNCHES_FOR_SEVERAL_SHAPES and not search.is_fixed:
        tournament.change_workloads(workloads)
    builder = search.builder
    entry = _cache_entry(search.job, builder.traced, builder.checker, tournament.workloads, search.format)
    outcome = search.run(trial_cache.read(entry) if entry else [], deadline)
    if entry and outcome.shapes:  # without shapes, nothing was compared
        trial_cache.write(entry, outcome.chosen, outcome.trials)
    return outcome


def share(now: float, end: float, formats: int, needed: float) -> float:
    """Returns when a format's search must end.

    Args:
        now: The current time.
        end: When all searches must end.
        formats: Number of formats that share the remaining time, with this one.
        needed: Seconds of the shortest search. If the share is less, the format has all of the time: one tuned format
            is better than none.
    """
    remaining = max(0.0, end - now)
    seconds = remaining / formats
    return now + (seconds if seconds >= needed else remaining)


def _cache_entry(
    job: Job, traced: Traced, checker: ParityChecker, workloads: Sequence[Workload], file_format: Format
) -> str | None:
    """Returns the cache entry of a format's trials.

    It is None if a rule or metric has no file, as in a cell of a notebook, so that no key would notice another code.
    """
    reference, gates = checker.reference, job.config.parity.metrics or ()
    plugins = {type(rule.transformation).__module__ for rule in job.rules if not is_built_in(rule.transformation)}
    metrics = {gate.removeprefix(CUSTOM_METRIC).partition(":")[0] for gate in gates if gate.startswith(CUSTOM_METRIC)}
    code = {module: code_of(module) for module in plugins | metrics}
    if not all(code.values()):
        return None
    return store.entry_key(
        "tuning",
        make_model_key(traced.graph_module, job.loaded.model),
        str(traced.graph_module.graph),  # a graph that calls unnamed functions has no digest
        job.loaded.weights_sha256,
        file_format,
        registry.versions([file_format]),
        [[rule.name, rule.options, rule.formats, rule.min_matches] for rule in job.rules],
        code,
        job.config.export.passes.get(file_format, []),
        job.config.export.opset,
        job.config.export.onnx.providers,
        devices.describe(job.config.model.device),
        job.config.parity.model_dump(mode="json"),
        job.precision_of(file_format),
        job.config.precision and [job.config.precision.keep_float32, job.config.precision.weight_bits],
        keys.of_tensors([job.example, *(case.batch for case in reference.cases), *reference.outputs]),
        [workload.label for workload in workloads],
        [case.name for case in reference.cases],
        {name: bound.limit for name, bound in checker.tolerances.items()},
        job.config.bench.threads,
    )


def _with_chosen(job: Job, outcomes: Sequence[Outcome]) -> Job:
    """Restricts rules and format passes to the formats that chose them."""
    chosen = {outcome.format: outcome.chosen for outcome in outcomes}
    formats = list(dict.fromkeys(job.config.export.formats))
    rules = []
    for index, rule in enumerate(job.rules):
        rule_formats = [
            name
            for name in formats
            if (index in chosen[name].rules if name in chosen else index in configured(job, name))
        ]
        if rule_formats:
            rules.append(replace(rule, formats=None if rule_formats == formats else tuple(rule_formats)))
    passes = {**job.config.export.passes, **{name: list(chosen[name].passes) for name in formats if name in chosen}}
    export = job.config.export.model_copy(update={"passes": passes})
    config = resolve_config(job.config.model_copy(update={"export": export, "tune": None}), rules)
    return replace(job, config=config, rules=tuple(rules))
