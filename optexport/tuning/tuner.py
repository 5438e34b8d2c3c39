"""Chooses the fastest rules and format passes for each format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optexport._utils.progress import Progress
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import Outcome
from optexport.cache import keys, store
from optexport.cache.imported_modules import code_of
from optexport.cache.model_key import make_model_key
from optexport.config.derived import resolve_config
from optexport.config.metrics import CUSTOM_METRIC
from optexport.config.schema import Format
from optexport.job import Job
from optexport.parity.checker import ParityChecker
from optexport.runtime import devices
from optexport.tracing.trace import Traced
from optexport.transformations.apply import is_built_in
from optexport.tuning import trial_cache
from optexport.tuning.candidate import configured
from optexport.tuning.candidate_builder import CandidateBuilder
from optexport.tuning.search import Search
from optexport.tuning.tournament import Tournament


def tune(
    builder: CandidateBuilder, workloads: Sequence[Workload], budget: float, progress: Progress
) -> tuple[Job, tuple[Outcome, ...]]:
    """Searches for the fastest candidate of each format.

    Args:
        builder: Builds and checks the candidates of a job.
        workloads: Inputs to measure on.
        budget: Seconds for the candidates of all formats. Their baselines and the last rungs come on top.
        progress: Times the search of each format.

    Returns:
        The job with the chosen rules and format passes, and the outcome of each search.
    """
    job = builder.job
    formats = list(dict.fromkeys(job.config.export.formats))
    remaining = budget
    outcomes = []
    for index, name in enumerate(formats):
        with progress.step(f"tune {name}"):
            tournament = Tournament(workloads, job.config.bench.threads)
            search = Search(job, name, builder, tournament, share(budget, remaining, index, len(formats)))
            entry = _cache_entry(job, builder.traced, builder.checker, workloads, name)
            outcome = search.run(trial_cache.read(entry))
            remaining -= search.spent
            if outcome is not None:
                trial_cache.write(entry, outcome.chosen, outcome.trials)
                outcomes.append(outcome)
    return _with_chosen(job, outcomes), tuple(outcomes)


def share(budget: float, remaining: float, index: int, formats: int) -> float:
    """Returns the seconds for one format: its share of the budget, or more if time is left.

    Args:
        budget: Seconds for all formats.
        remaining: Seconds left; negative if earlier formats took too long.
        index: Number of formats before this one.
        formats: Number of formats.
    """
    return max(budget / formats, remaining / (formats - index))


def _cache_entry(
    job: Job, traced: Traced, checker: ParityChecker, workloads: Sequence[Workload], file_format: Format
) -> str:
    """Returns the cache entry of a format's trials."""
    reference, gates = checker.reference, job.config.parity.metrics or ()
    plugins = {type(rule.transformation).__module__ for rule in job.rules if not is_built_in(rule.transformation)}
    metrics = {gate.removeprefix(CUSTOM_METRIC).partition(":")[0] for gate in gates if gate.startswith(CUSTOM_METRIC)}
    return store.entry_key(
        "tuning",
        make_model_key(traced.graph_module, job.loaded.model),
        str(traced.graph_module.graph),  # a graph that calls unnamed functions has no digest
        job.loaded.weights_sha256,
        file_format,
        [[rule.name, rule.options, rule.formats, rule.min_matches] for rule in job.rules],
        {module: code_of(module) for module in plugins | metrics},
        job.config.export.passes.get(file_format, []),
        job.config.export.opset,
        devices.describe(job.config.model.device),
        job.config.parity.model_dump(mode="json"),
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
