"""Finds the rules and passes that pay, format by format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optexport._utils.progress import Progress
from optexport.bench.workload import Workload
from optexport.cache import keys, model_key, store
from optexport.cache.imported_modules import code_of
from optexport.config.metrics import METRIC
from optexport.config.schema import Format
from optexport.job import Job, resolved
from optexport.parity.checker import ParityChecker
from optexport.parity.reference import Call
from optexport.runtime import devices
from optexport.tracing.trace import Traced
from optexport.transformations.apply import is_built_in
from optexport.tuning import trial_cache
from optexport.tuning.candidate import configured
from optexport.tuning.candidate_builder import CandidateBuilder
from optexport.tuning.outcome import Outcome
from optexport.tuning.search import Search
from optexport.tuning.tournament import Contest


def tune(
    job: Job,
    traced: Traced,
    call: Call,
    proof: ParityChecker,
    workloads: Sequence[Workload],
    budget: float,
    folder: Path,
    progress: Progress,
) -> tuple[Job, tuple[Outcome, ...]]:
    """Finds the recipe of each format's file.

    Args:
        traced: Is not changed.
        proof: Has the reference, the bounds and the gates that candidates must keep to.
        workloads: What the files are measured on.
        budget: Seconds for the candidates of all formats. What each is compared with, and its last heat, come on top.
        folder: Where to write files.

    Returns:
        The job with the rules and passes that were chosen, and what came of the search.
    """
    workshop = CandidateBuilder(job, traced, call, proof, folder)
    formats = list(dict.fromkeys(job.config.export.formats))
    left = budget
    outcomes = []
    for index, name in enumerate(formats):
        with progress.step(f"tune {name}"):
            contest = Contest(workloads, job.config.bench.threads)
            search = Search(job, name, workshop, contest, share(budget, left, index, len(formats)))
            known = _entry(job, traced, proof, workloads, name)
            outcome = search.run(trial_cache.read(known))
            left -= search.spent
            if outcome is not None:
                trial_cache.write(known, outcome.chosen, outcome.trials)
                outcomes.append(outcome)
    return _with_chosen(job, outcomes), tuple(outcomes)


def share(budget: float, left: float, index: int, formats: int) -> float:
    """Seconds for the search of one format: as many as for any, whatever earlier ones took of them.

    Args:
        left: Seconds of the budget that are left, or below 0 where it was overdrawn.
        index: How many formats came before.
    """
    return max(budget / formats, left / (formats - index))


def _entry(job: Job, traced: Traced, proof: ParityChecker, workloads: Sequence[Workload], file_format: Format) -> str:
    """What the trials of a format are kept under."""
    reference, gates = proof.reference, job.config.parity.metrics or ()
    plugins = {type(rule.transformation).__module__ for rule in job.rules if not is_built_in(rule.transformation)}
    metrics = {gate.removeprefix(METRIC).partition(":")[0] for gate in gates if gate.startswith(METRIC)}
    return store.name(
        "tuning",
        model_key.of(traced.graph_module, job.loaded.model),
        str(traced.graph_module.graph),  # where its calls are not known by name there is no digest of it
        job.loaded.weights_sha256,
        file_format,
        [[rule.name, rule.options, rule.formats, rule.min_matches] for rule in job.rules],
        {module: code_of(module) for module in plugins | metrics},
        job.config.export.passes.get(file_format, []),
        job.config.export.opset,
        devices.described(job.config.model.device),
        job.config.parity.model_dump(mode="json"),
        keys.of_tensors([job.example, *(case.batch for case in reference.cases), *reference.outputs]),
        [workload.label for workload in workloads],
        [case.name for case in reference.cases],
        {name: bound.limit for name, bound in proof.bounds.items()},
        job.config.bench.threads,
    )


def _with_chosen(job: Job, outcomes: Sequence[Outcome]) -> Job:
    """The job in which every rule and lowering is for the formats that chose it; without rules that none chose."""
    chosen = {outcome.format: outcome.chosen for outcome in outcomes}
    formats = list(dict.fromkeys(job.config.export.formats))
    rules = []
    for index, rule in enumerate(job.rules):
        own = [
            name
            for name in formats
            if (index in chosen[name].rules if name in chosen else index in configured(job, name))
        ]
        if own:
            rules.append(replace(rule, formats=None if own == formats else tuple(own)))
    lowered = {**job.config.export.passes, **{name: list(trial.passes) for name, trial in chosen.items()}}
    export = job.config.export.model_copy(update={"passes": {name: found for name, found in lowered.items() if found}})
    config = resolved(job.config.model_copy(update={"export": export, "tune": None}), rules)
    return replace(job, config=config, rules=tuple(rules))
