"""Runs the export pipeline, from model source to verified bundle.

This module calls every step that the progress display shows, in the same order and with the same names. Comments name
the steps that other modules announce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from optexport._utils import atomic_dir, signals, torch_settings
from optexport._utils.progress import Progress
from optexport.bundle import layout
from optexport.config.error_locations import naming_config
from optexport.config.run_steps import is_measured, list_bundle_steps, list_run_steps
from optexport.diagnosis import reproduction
from optexport.job import Job
from optexport.parity import gates
from optexport.pipeline import bundle_writer, lockfile, reuse, steps
from optexport.pipeline.api_arguments import as_texts
from optexport.pipeline.export_ahead import exporting_ahead
from optexport.pipeline.gain import measure_gain
from optexport.pipeline.measure import list_workloads, measure_files
from optexport.pipeline.plan import RunOptions, RunPlan, plan_run, start_tracking
from optexport.pipeline.variant import VariantExporter, transform_variant
from optexport.quantization.sensitivity import LayerChoices
from optexport.report.html import page
from optexport.report.progress import show_progress
from optexport.report.result import Result
from optexport.tracing import model_run
from optexport.tracking import TrackingProcess


@torch_settings.preserved()
def run(  # noqa: PLR0913 - options of the public API
    path: str | Path,
    *,
    without: str | Sequence[str] = (),
    tune: bool = False,
    baseline: bool = False,
    dump: str | Path | None = None,
    locked: bool = False,
    progress: bool | Progress | None = None,
    keep: bool = True,
) -> Result:
    """Runs a config file.

    Args:
        without: One or more names of rules to omit.
        tune: Whether to tune even if the config does not ask for it.
        baseline: Whether to write the untransformed export too, to ``<output>-baseline``.
        dump: A folder for the graph before and after every transformation.
        locked: Whether to reject packages, models or files that differ from the config's lock.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.
        keep: Whether to write the bundle and track the run; otherwise the run only checks parity.

    Raises:
        OptexportError: The run fails; the subclass has the exit code.
    """
    omitted = as_texts(without, "without")
    options = RunOptions(without=omitted, tune=tune, baseline=baseline, dump=dump, locked=locked, keep=keep)
    with show_progress(progress) as shown:
        return run_plan(plan_run(path, options), shown)


@torch_settings.preserved()
def run_plan(plan: RunPlan, progress: Progress, tracking_process: TrackingProcess | None = None) -> Result:
    """Runs a plan; raises the errors of `run`.

    Args:
        tracking_process: The process that tracks the run; None tracks it in this process.
    """
    is_tracked = plan.config.tracking.enabled
    if (all_steps := list_run_steps(plan.config, baseline=plan.baseline is not None)) is not None:
        progress.count.expect(all_steps)
    with (
        signals.temporary_folder() as workspace,
        contextlib.ExitStack() as output_lock,  # no other run replaces the bundle during its upload
    ):
        with naming_config(plan.path):
            job = load_job(plan, workspace, progress)
        # plan.py: "start tracking"; only now, so that most mistakes in a config or a source start no MLflow run
        with (
            start_tracking(plan.config, plan.path, plan.output, plan.origin, progress, tracking_process) as tracker,
            naming_config(plan.path),
        ):
            progress.count.after_bundle = None  # the steps of a tuned run are unknown during its baseline
            if plan.baseline is not None:
                export_bundle(steps.as_baseline(job, plan.baseline), progress.prefixed("baseline"))
            progress.count.after_bundle = int(is_tracked)
            result = export_bundle(steps.with_origin(job, plan, tracker.run_id), progress, output_lock)
            with progress.step("track") if is_tracked else contextlib.nullcontext():
                tracker.send()
    return replace(result, baseline=plan.baseline, seconds=progress.elapsed).with_tracking(tracker)


def export_in_memory(job: Job, progress: Progress) -> Result:
    """Exports a model that was loaded in Python, and tracks the run if its config asks for it."""
    if not job.config.tracking.enabled:
        result = export_bundle(job, progress)
        return replace(result, seconds=progress.elapsed)
    model_run.check_runs(job.loaded.model, job.example)
    with (
        contextlib.ExitStack() as output_lock,
        start_tracking(job.config, None, job.output, job.origin, progress) as tracker,
    ):
        origin = job.origin.model_copy(update={"mlflow_run": tracker.run_id})
        progress.count.after_bundle = 1  # "track"
        result = export_bundle(replace(job, origin=origin), progress, output_lock)
        with progress.step("track"):
            tracker.send()
    return replace(result, seconds=progress.elapsed).with_tracking(tracker)


def load_job(plan: RunPlan, workspace: Path, progress: Progress) -> Job:
    """Loads the model of a plan, its inputs and the custom metrics; before tracking, the model must run on the inputs.

    Args:
        workspace: A temporary folder for downloads, and for the bundle if the plan does not keep it.
    """
    metrics = gates.load_metrics(plan.config.parity.metrics, plan.folder)
    with progress.step("load"):
        loaded = steps.load_model(plan.config, plan.folder, workspace)
    with progress.step("inputs"):
        job = steps.prepare_inputs(plan, loaded, metrics, workspace)
        is_tracked = plan.config.tracking.enabled
        outputs = model_run.check_runs(job.loaded.model, job.example) if is_tracked else None
        job = replace(job, reuse_key=reuse.make_key(job, plan, outputs))
    if plan.lock is not None:
        lockfile.check_model(plan.lock, job, plan.path)
    return job


def export_bundle(job: Job, progress: Progress, output_lock: contextlib.ExitStack | None = None) -> Result:
    """Writes the bundle of a model if all checks pass; reuses the bundle of an equal run.

    Args:
        output_lock: Takes over the lock of the bundle. No other run replaces the bundle until the stack is closed.
    """
    with (
        atomic_dir.drafting(job.output, layout.check_replaceable, output_lock) as draft,
        torch.random.fork_rng(devices=[]),
    ):
        result = reuse.restore(job, draft, progress, list_steps(job)) or export_and_check(job, draft, progress)
        with progress.step("report"):
            page.write(draft)
    reproduction.remove(job.failure)
    return result


def export_and_check(job: Job, draft: Path, progress: Progress) -> Result:
    """Traces, transforms, exports and checks a model, and writes the bundle without its report to a draft.

    Raises:
        OptexportError: A check fails, or another error of `run`.
    """
    with signals.temporary_folder() as scratch, contextlib.ExitStack() as stack:
        if job.config.tune is None:
            progress.count.expect(list_steps(job))
        with progress.step("trace"):
            traced = steps.trace_model(job)
            workloads = list_workloads(traced, scratch)
            bundle_writer.write_graph(draft / "graph_before.txt", traced.graph_module)
        with progress.step("reference"):
            checker = steps.run_reference(traced)
        # tuning/tuner.py: "tune FORMAT", only with [tune]
        choices = LayerChoices()
        traced, outcomes = steps.tune(traced, checker, workloads, scratch, progress, choices)
        progress.count.expect(list_steps(traced.job, tuned=True))
        # variant.py: "transform", for each variant
        graphs = [transform_variant(variant, traced, progress) for variant in traced.job.variants]
        pairs = list(zip(traced.job.variants, graphs, strict=True))
        ahead = stack.enter_context(exporting_ahead(traced, pairs))
        with progress.step("other sizes"):
            checker = steps.check_other_sizes(traced, checker, graphs)
        # variant.py, for each variant: "check graph", "export FORMAT" and "check FORMAT" for each format, "undo". After
        # a check, "lower" and "check lowered graph" or "check lowered onnx", only with [precision].
        exporter = VariantExporter(traced, checker, draft, progress, choices, ahead)
        variants = [exporter.export(*pair) for pair in pairs]
        # variant.py: "node errors"
        results = exporter.results(variants, outcomes)
        with progress.step("gain"):
            results = measure_gain(results, draft)
        # measure.py: "measure", only if the config asks for it
        results = measure_files(results, workloads, draft, scratch, progress)
        with progress.step("bundle"):
            manifest = bundle_writer.write_bundle(draft, results)
        bundle_writer.write_measurements(draft, job, progress.seconds, bundle_writer.measured_values(results))
    reuse.remember(job, draft, results.checker.targets)
    return results.as_result(manifest)


def list_steps(job: Job, *, tuned: bool = False) -> list[str]:
    """Lists the steps of an export, or those after the search of a tuned run."""
    rule_formats = [rule.formats for rule in job.rules]
    return list_bundle_steps(job.config, rule_formats, measured=is_measured(job.config), tuned=tuned)
