"""Runs a config with ``[generation]``, with an MLflow run for each part."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from optexport import tracking
from optexport._utils import signals, torch_settings
from optexport._utils.packages import versions
from optexport._utils.paths import as_path
from optexport._utils.progress import Progress
from optexport.bundle.git import checkout
from optexport.bundle.measurements import Origin
from optexport.config.derived import resolve_config
from optexport.config.error_locations import naming_config
from optexport.config.load import load_config
from optexport.config.requirements import check_extras, check_onnx_file_runs
from optexport.config.schema import Config
from optexport.config.toml_file import read_redacted
from optexport.errors import CheckError, ConfigError
from optexport.exporters import registry
from optexport.generation import export
from optexport.generation.components import Component, Prompt
from optexport.generation.result import GenerationResult
from optexport.inputs import preparation
from optexport.job import Job
from optexport.loading.loader import Loaded
from optexport.parity.gates import load_metrics
from optexport.pipeline import steps
from optexport.pipeline.api_arguments import as_texts
from optexport.pipeline.portable_config import portable_config
from optexport.pipeline.rules import load_rules
from optexport.report.progress import show_progress
from optexport.report.result import Result
from optexport.tracking import run_params


@torch_settings.preserved()
def run_generation(
    path: str | Path, *, without: str | Sequence[str] = (), progress: bool | Progress | None = None
) -> GenerationResult:
    """Runs a config file that has a table ``[generation]``.

    Each part is tracked as a separate run, after all checks. If a check fails, one run has the failure.

    Args:
        without: One or more names of rules to omit.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Raises:
        OptexportError: The run fails; the subclass has the exit code.
    """
    path, without = as_path(path, "path"), as_texts(without, "without")
    config, folder = load_config(path, without), path.parent
    if config.generation is None:
        raise ConfigError("the config has no table [generation]", location=str(path), hint="Call optexport.run(path).")
    check_extras(config, path)
    check_onnx_file_runs(config, path)
    new_tokens = config.generation.new_tokens
    with naming_config(path):
        rules = load_rules(config, folder, without)
        metrics = load_metrics(config.parity.metrics, folder)
        config = resolve_config(config, rules)
        output = config.output_path(folder)
        export.check_output(output)
    git = checkout(folder)
    text = read_redacted(path)
    with (
        naming_config(path),
        signals.temporary_folder() as downloads,
        contextlib.ExitStack() as output_lock,
        show_progress(progress) as shown,
    ):
        with shown.step("load"):
            loaded = steps.load_model(config, folder, downloads)
        with shown.step("inputs"):
            prepared = preparation.prepare(config.inputs, folder, loaded.model, loaded.pretrained, config.parity.seed)
            prompts = [_prompt(batch, loaded) for batch in prepared.user_batches or (prepared.example,)]

        def origin(part: str) -> Origin:
            return Origin(git=git, part=part)

        def make_job(part: Component, location: Path) -> Job:
            first = part.batches[0]
            component = Loaded(part.module, revision=loaded.revision, pretrained=loaded.pretrained)
            return Job(
                config,
                component,
                first,
                part.batches,
                part.dynamic,
                rules,
                location,
                text,
                metrics=metrics,
                origin=origin(part.name),
            )

        is_tracked = config.tracking.enabled
        shown.count.after_bundle = int(is_tracked)
        try:
            result = export.produce(loaded.model, prompts, output, make_job, new_tokens, shown, output_lock)
        except CheckError:
            settings = portable_config(config)
            formats = config.export.formats
            package_versions = versions() | registry.versions(formats)
            tags = run_params.tags(settings["model"]["source"], formats, package_versions, Origin(git=git))
            with tracking.tracking(tracking.Tracker(config.tracking, path, output), settings, tags):
                raise
        with shown.step("track") if is_tracked else contextlib.nullcontext():
            parts = {name: _track(part, config, path, origin(name)) for name, part in result.parts.items()}
    return replace(result, parts=parts)


def _prompt(batch: Prompt, loaded: Loaded) -> Prompt:
    """Returns the arguments of ``generate``: no decoder inputs, and padding on the left."""
    named = {name: tensor for name, tensor in batch.items() if not name.startswith("decoder_")}
    encoded = getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False)
    if encoded or "input_ids" not in named:
        return named
    ids = named["input_ids"]
    mask = named.get("attention_mask", torch.ones_like(ids))
    # Tokenizers pad on the right by default, but new tokens come after the last position.
    turns = [int(row.flip(0).argmax()) for row in mask]
    rows = [(i.roll(turn), m.roll(turn)) for i, m, turn in zip(ids, mask, turns, strict=True)]
    return {"input_ids": torch.stack([i for i, _ in rows]), "attention_mask": torch.stack([m for _, m in rows])}


def _track(part: Result, config: Config, path: Path, origin: Origin) -> Result:
    manifest = part.manifest
    tags = run_params.tags(manifest.model.source, list(part.files), manifest.versions, origin)
    tracker = tracking.Tracker(config.tracking, path, part.output)
    with tracking.tracking(tracker, manifest.config, tags):
        tracker.send()
    return replace(part, run_id=tracker.run_id, run_page=tracker.page, tracking_failure=tracker.failure)
