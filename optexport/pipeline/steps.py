"""Steps of a run before its files are written: load, inputs, trace, reference, tune, other sizes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx, nn

from optexport import tracking
from optexport._utils import model_memory
from optexport._utils.module_state import copy_shared_outputs
from optexport._utils.progress import Progress
from optexport.bench.workload import Workload
from optexport.bundle import digests
from optexport.bundle.outcomes import Outcome
from optexport.cache.model_key import make_model_key
from optexport.config.derived import disable_measurements, resolve_config
from optexport.config.schema import Config
from optexport.config.source import SourceKind, source_kind
from optexport.inputs import preparation
from optexport.job import Job
from optexport.loading import loader
from optexport.loading.loader import Loaded
from optexport.loading.processing import add_processing
from optexport.parity import gates, noise_floor
from optexport.parity.cases import data_batches, size_probe
from optexport.parity.cases.basic_cases import make_cases
from optexport.parity.cases.branch_cases import branch_cases
from optexport.parity.cases.special_values import special_cases
from optexport.parity.cases.vocabulary import (
    attention_masks,
    describe_unchecked_ids,
    has_value_dependent_sizes,
    vocabularies,
)
from optexport.parity.checker import ParityChecker
from optexport.parity.gates import Metric
from optexport.parity.reference import Call, Reference, repeated_runner
from optexport.parity.reference_run import run_original
from optexport.pipeline import lockfile, triton
from optexport.pipeline.plan import RunPlan
from optexport.quantization.candidate_lowering import CandidateLowering
from optexport.quantization.sensitivity import LayerChoices
from optexport.signature.arguments import as_constants, find_arguments
from optexport.signature.signature import Batch, Signature, as_arguments, named_outputs
from optexport.tracing import model_run
from optexport.tracing.graph_checks import check_deterministic, check_writable
from optexport.tracing.trace import Traced, trace
from optexport.transformations import KeepOutputs
from optexport.transformations.apply import Transformed
from optexport.tuning import tuner
from optexport.tuning.candidate_builder import CandidateBuilder

# In bytes of weights. A single run of a larger model is slow, and its weights may be on disk.
_MAX_PROBED_BYTES = 1 << 30
# How many times more sizes are tried at exhaustive effort.
_TIMES_EXHAUSTIVE = 16
# What a tuned run reserves for its work after the search, without exporting and checking files: the seconds of "gain",
# and a share of the time before the search, because transforming, other sizes, the bundle and tracking take longer for
# larger models and on busy machines. The share is more than half, because "other sizes" runs the original and the graph
# as "reference" does, which takes most of the time before the search.
_FIXED_RESERVE = 3.0
_RESERVED_SHARE = 0.6


@dataclass(frozen=True)
class TracedJob:
    """A job with the trace of its model.

    Attributes:
        job: The job, without the inputs that the trace fixed.
        trace: The trace, with only the outputs that the rules keep.
        call: Runs the model or a graph on a batch; returns these outputs by name.
        vocabularies: The number of valid ids of each input that indexes an embedding.
        nodes: The number of nodes of the graph before the rules.
    """

    job: Job
    trace: Traced
    call: Call
    vocabularies: Mapping[str, int]
    nodes: int

    @property
    def graph_module(self) -> fx.GraphModule:
        return self.trace.graph_module

    @property
    def signature(self) -> Signature:
        return self.trace.signature


def load_model(config: Config, folder: Path, downloads: Path) -> Loaded:
    """Loads the model of a config, and adds the configured processing.

    Args:
        folder: The folder that paths in the config are relative to.
        downloads: The folder for a model that MLflow stores.
    """
    downloaded = None
    if source_kind(config.model.source, folder) is SourceKind.MLFLOW:
        uri = config.model.source.removeprefix("mlflow:")
        downloaded = tracking.download_model(uri, config.tracking, folder, downloads)
    return add_processing(loader.load(config.model, folder, downloaded), config.processing)


def prepare_inputs(plan: RunPlan, loaded: Loaded, metrics: Mapping[str, Metric], workspace: Path) -> Job:
    """Prepares the inputs of a loaded model, and returns the job of the plan.

    Args:
        metrics: The custom metrics by name.
        workspace: The folder for the bundle if the plan does not keep it.
    """
    config = plan.config
    inputs = preparation.prepare(
        config.inputs, plan.folder, loaded.model, loaded.pretrained, config.parity.seed, loaded.program
    )
    if loaded.program is None:
        arguments = find_arguments(loaded.model, list(inputs.example), as_constants(config.inputs.constants))
        loaded = loaded.with_example(inputs.example, arguments)
    return Job(
        config,
        loaded,
        inputs.example,
        inputs.user_batches,
        inputs.dynamic,
        plan.rules,
        output=plan.output if plan.keep else workspace / "bundle",
        config_text=plan.config_text,
        dump=plan.dump,
        rows=inputs.rows,
        metrics=metrics,
        final_output=None if plan.keep else plan.output,
        origin=plan.origin,
    )


def as_baseline(job: Job, output: Path) -> Job:
    """Returns a job that exports the same model untransformed, without format passes or lower precision."""
    config = resolve_config(disable_measurements(job.config), (), output)
    return replace(job, config=config, rules=(), output=output, dump=None, reuse_key=None)


def with_origin(job: Job, plan: RunPlan, mlflow_run: str | None) -> Job:
    """Returns the job with a completed origin: the digest of its lock file and its MLflow run."""
    lock_sha256 = None if plan.lock is None else digests.sha256(lockfile.lock_path(plan.path))
    return replace(job, origin=job.origin.model_copy(update={"lock_sha256": lock_sha256, "mlflow_run": mlflow_run}))


def trace_model(job: Job) -> TracedJob:
    """Traces the model of a job, and fixes the inputs that tracing supports for one value only.

    Raises:
        TraceError: The model cannot be traced, or the user's data have several values for a fixed input.
        ExportError: The layout of the bundle does not support the inputs or outputs of the model.
    """
    traced, call = trace_original(job)
    job = job.with_fixed_inputs(traced.constants)
    if job.config.export.layout is not None:
        triton.check(traced.signature, job.config.export.formats)
    ids = vocabularies(traced.graph_module, traced.signature)
    return TracedJob(job, traced, call, ids, len(traced.graph_module.graph.nodes))


def trace_original(job: Job) -> tuple[Traced, Call]:
    """Traces the model.

    Returns:
        The trace, with only the outputs that the rules keep, and a function that runs the model or a graph for these.
    """
    values = {name: value.indexes for name, value in job.config.inputs.values.items()}
    traced = trace(job.loaded.to_trace, job.example, job.dynamic, values)
    check_writable(traced.graph_module.graph)
    rules = [rule.transformation for rule in job.rules if isinstance(rule.transformation, KeepOutputs)]
    outputs_by_rule = [set(rule.outputs) for rule in rules if rule.outputs]  # without names, the rule keeps all
    complete = traced.signature
    reduced = complete.select_outputs(set.intersection(*outputs_by_rule) if outputs_by_rule else ())
    check_deterministic(traced.graph_module, complete.output_names, reduced.output_names)

    def call(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        copied = {name: tensor.clone() for name, tensor in batch.items()}  # a model may change its inputs in place
        with model_run.eager(model):
            results = named_outputs(model(**as_arguments(copied)), copied, torch.Tensor)
        outputs = copy_shared_outputs(model, results.values())
        signature = reduced if len(outputs) == len(reduced.outputs) else complete
        # The order of a dict's keys may depend on values.
        names = list(results) if {*results} == {*signature.output_names} else signature.output_names
        named = dict(zip(names, outputs, strict=True))
        return {name: named[name].detach() for name in reduced.output_names}  # a model may turn gradients on

    return replace(traced, signature=reduced), call


def run_reference(traced: TracedJob, more_sizes: Sequence[dict[str, int]] = ()) -> ParityChecker:
    """Runs the original on all cases, measures its noise floor, and returns a checker for targets.

    Args:
        more_sizes: Sizes to check in addition to those that the effort and the trace's suspect sizes give.

    Raises:
        ParityError: The original gives no usable results.
        ConfigError: The original itself does not pass a gate.
    """
    reference = _run_cases(traced, more_sizes)
    job, parity = traced.job, traced.job.config.parity
    always_empty = [spec.name for spec in traced.signature.outputs if 0 in spec.shape]
    tolerances = noise_floor.measure_tolerances(
        reference, parity.noise_multiple, parity.atol, parity.rtol, always_empty=always_empty
    )
    checker = ParityChecker(
        reference,
        tolerances,
        gates.make_gates(parity.metrics, job.metrics, reference, tolerances, parity.noise_multiple),
    )
    gates.check_usable(checker.targets[0].gate_results)
    return checker


def _run_cases(traced: TracedJob, more_sizes: Sequence[dict[str, int]]) -> Reference:
    """Runs the original on all cases; the effort decides their number."""
    job, signature, effort = traced.job, traced.signature, traced.job.config.parity.effort
    declared = job.config.inputs.tensors or {}
    checked_cases = make_cases(
        job.example, job.user_batches, signature, [*traced.trace.suspect_sizes, *more_sizes], effort
    )
    checked_cases += special_cases(
        job.example,
        traced.vocabularies,
        effort,
        job.config.parity.seed,
        declared=declared,
        attention_masks=attention_masks(traced.graph_module, signature),
        has_value_dependent_sizes=has_value_dependent_sizes(traced.graph_module),
    )
    branches, unreached = branch_cases(traced.graph_module, signature, checked_cases)
    checked_cases += branches
    reference = run_original(
        traced.call,
        job.loaded.model,
        checked_cases,
        declared=job.has_declared_sizes,
        batched=None if effort == "quick" else signature.batched,
        device=job.config.model.device,
        computation=make_model_key(traced.graph_module, job.loaded.model),
    )
    unchecked_data = data_batches.describe_unchecked_data(job.user_batches, job.rows, reference.cases)
    unchecked_ids = describe_unchecked_ids(traced.vocabularies, declared)
    return replace(reference, skipped=(*unchecked_data, *unchecked_ids, *unreached, *reference.skipped))


def tune(
    traced: TracedJob,
    checker: ParityChecker,
    workloads: Sequence[Workload],
    scratch: Path,
    progress: Progress,
    choices: LayerChoices,
) -> tuple[TracedJob, tuple[Outcome, ...]]:
    """Chooses the fastest rules and format passes of each format, if the config has ``[tune]``.

    Args:
        choices: Receives the layers that stay in float32.

    Returns:
        The job with the chosen rules and passes, and the outcome of each search.
    """
    config = traced.job.config.tune
    if config is None:
        return traced, ()
    lowering = CandidateLowering(traced.job, traced.call, checker, choices)
    builder = CandidateBuilder(traced.job, traced.trace, traced.call, checker, scratch, lowering)
    elapsed = time.monotonic() - progress.start
    budget = tuner.Budget(
        config.budget,
        end=progress.start + config.seconds,
        reserve=_FIXED_RESERVE + _RESERVED_SHARE * elapsed,
        build_seconds=elapsed,  # about right for MiniLM and ALBERT, also on a busy machine
    )
    needs_all = bool(traced.job.config.bench.shapes)
    job, outcomes = tuner.tune(builder, workloads, needs_all, budget, progress)
    return replace(traced, job=job), outcomes


def check_other_sizes(traced: TracedJob, checker: ParityChecker, graphs: Sequence[Transformed]) -> ParityChecker:
    """Tries many sizes quickly; returns a checker that also has those at which a graph and the model differ."""
    sizes = _find_differing_sizes(traced, graphs)
    return run_reference(traced, sizes) if sizes else checker


def _find_differing_sizes(traced: TracedJob, graphs: Sequence[Transformed]) -> list[dict[str, int]]:
    """Returns sizes at which the results of the original and a graph differ.

    Returns none at quick effort, or for large models.
    """
    effort, model = traced.job.config.parity.effort, traced.job.loaded.model
    if effort == "quick" or model_memory.weight_bytes(model) >= _MAX_PROBED_BYTES:
        return []
    suspect_sizes = traced.trace.suspect_sizes
    sizes = [*suspect_sizes]
    for graph in graphs:
        sizes += size_probe.find_differing_sizes(
            repeated_runner(model, traced.call),
            repeated_runner(graph.graph_module, traced.call),
            traced.job.example,
            traced.signature,
            sizes,
            times=_TIMES_EXHAUSTIVE if effort == "exhaustive" else 1,
            reordered=any(applied.report.changes for applied in graph.applied),
        )
    return sizes[len(suspect_sizes) :]
