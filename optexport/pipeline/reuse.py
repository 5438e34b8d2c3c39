"""Reuses the bundle of an earlier run if nothing that it depends on has changed.

The key covers the config, the model with its weights and attributes, its outputs on the traced inputs, the inputs, the
files of its tokenizer or processor, all code outside packages, the versions of all packages, and the machine. Classes
and functions in a model must be from packages: others often depend on further files or on the environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from optexport._utils import model_memory
from optexport._utils.progress import Progress
from optexport.bundle import digests
from optexport.bundle.layout import MANIFEST, MEASUREMENTS
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured, read_measured
from optexport.cache import imported_modules, keys, store
from optexport.cache.model_key import code_of_model
from optexport.config.metrics import CUSTOM_METRIC
from optexport.config.run_steps import is_measured
from optexport.errors import BundleError
from optexport.exporters import registry
from optexport.job import Job
from optexport.loading.preprocessors import SUFFIXES
from optexport.parity.checker import TargetParity
from optexport.pipeline.bundle_writer import write_measurements
from optexport.pipeline.plan import RunPlan
from optexport.report.result import Result
from optexport.tracing import model_run
from optexport.transformations.apply import is_built_in

_PARITY = TypeAdapter(tuple[TargetParity, ...])
# Measurements of the earlier run that stay valid, because the machine and the files are the same.
_STILL_VALID = {"device", "gain", "gain_skipped"}


def make_key(job: Job, plan: RunPlan, outputs: Any = None) -> str | None:
    """Returns a digest of everything that the bundle of a job depends on; None if it cannot be reused.

    Args:
        outputs: What the model returns for the traced inputs; by default, the model runs once.
    """
    if not (store.enabled() and _can_reuse(job, plan)):
        return None
    loaded, config = job.loaded, job.config
    try:
        if outputs is None:
            outputs = model_run.run(loaded.model, job.example)
        objects = [keys.of_object(value) for value in ((loaded.model, loaded.constants), loaded.pretrained, outputs)]
        files, code = _digest_processor(job), code_of_model(loaded.model)
    except Exception:  # the model's code may raise anything, and its files may be unreadable; other steps report it
        return None
    if None in (*objects, files):
        return None
    return store.entry_key(
        "bundle",
        objects,
        files,
        code,
        loaded.revision,
        keys.of_tensors([job.example, *job.user_batches]),
        str(job.dynamic),
        config.model_dump(mode="json"),
        job.config_text,
        imported_modules.installed_distributions(),
    )


def _can_reuse(job: Job, plan: RunPlan) -> bool:
    """Returns True if a key can cover all code and data, and if nothing is to be measured or shown in each run."""
    config, loaded = job.config, job.loaded
    return (
        plan.keep
        and plan.dump is None
        and loaded.to_trace is loaded.model
        and config.tune is None
        and not is_measured(config)
        and config.model.device == "cpu"
        and set(config.export.formats) <= registry.BUILT_IN.keys()
        and all(is_built_in(rule.transformation) for rule in job.rules)
        and not any(name.startswith(CUSTOM_METRIC) for name in config.parity.metrics or ())
        and not model_memory.is_large(loaded.model)
    )


def _digest_processor(job: Job) -> dict[str, str] | None:
    """Returns the digests of the files that a tokenizer or processor may read, except files of the bundle itself.

    The result is None if the processor is on the hub and has no revision.
    """
    pretrained = job.loaded.pretrained
    if pretrained is None or not pretrained.name:
        return {}
    folder, output = Path(pretrained.name), job.output.resolve()
    if not folder.is_dir():
        return None if job.loaded.revision is None else {}
    files = (path for path in folder.rglob("*") if path.suffix in (*SUFFIXES, ".py") and path.is_file())
    return {
        path.relative_to(folder).as_posix(): digests.sha256(path)
        for path in files
        if not path.resolve().is_relative_to(output)
    }


def remember(job: Job, draft: Path, parity: Sequence[TargetParity]) -> None:
    """Stores which bundle the run has written, so that an equal run finds it."""
    if job.reuse_key is not None:
        measured = read_measured(draft)
        # Not in the mode "json", which turns infinity into null.
        notes = {"manifest": measured.manifest, "date": measured.date, "parity": _PARITY.dump_python(tuple(parity))}
        store.write(job.reuse_key, notes)


def restore(job: Job, draft: Path, progress: Progress, other_steps: Sequence[str]) -> Result | None:
    """Copies the bundle of an earlier run with the same key from the output to a draft, and checks its files.

    The measurements get the date and origin of this run.

    Args:
        draft: An empty folder.
        other_steps: The steps of an export without an earlier bundle.

    Returns:
        The result of the earlier run; None if there is none, or if its bundle was moved or changed.
    """
    if job.reuse_key is None or (entry := store.read(job.reuse_key)) is None:
        return None
    _, notes = entry
    if (manifest := _read_manifest(job.output, notes["manifest"])) is None:
        return None
    progress.count.change(["reuse", "report"])
    with progress.step("reuse"):
        measured = _copy(job.output, draft, manifest)
    if measured is None:
        progress.count.change(other_steps)
        return None
    cache_hits = (f"the whole bundle with its times, made {notes['date']}",)
    still_valid = measured.model_dump(mode="json", include=_STILL_VALID)
    write_measurements(draft, job, progress.seconds, {**still_valid, "cache_hits": cache_hits})
    return Result(
        job.output,
        _PARITY.validate_python(notes["parity"]),
        manifest,
        gain=tuple(measured.gain),
        gain_skipped=measured.gain_skipped,
        cache_hits=cache_hits,
    )


def _read_manifest(output: Path, digest: str) -> Manifest | None:
    """Returns the manifest of a bundle if it has a digest."""
    try:
        manifest = digests.read_manifest_only(output)
    except BundleError:
        return None
    return manifest if manifest.digest == digest else None


def _copy(output: Path, draft: Path, manifest: Manifest) -> Measured | None:
    """Copies a bundle without report and signature; returns its measurements.

    If it was changed, the draft stays empty, and the result is None.
    """
    try:
        for name in (MANIFEST, MEASUREMENTS, *(record.path for record in manifest.files)):
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(output / name, draft / name)
        digests.check_unchanged(draft, manifest, report=False)
        return read_measured(draft)
    except (OSError, BundleError):
        for path in draft.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return None
