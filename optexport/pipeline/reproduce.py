"""Reproduces a bundle from its manifest, and reports the tensors or nodes that differ."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from optexport._utils import packages, signals, torch_settings
from optexport._utils.paths import as_path
from optexport._utils.platform import processor
from optexport._utils.progress import Progress
from optexport._utils.tensors import bytes_of
from optexport.bundle import digests
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured, read_measured
from optexport.bundle.sign import check_signature
from optexport.cache import store
from optexport.config import tracking_uri
from optexport.config.custom_code import check_custom_code
from optexport.config.derived import disable_measurements
from optexport.config.load import validate_settings
from optexport.config.schema import Config
from optexport.config.source import SourceKind, check_module, check_source, check_source_keys, source_kind
from optexport.config.validation import Mistakes
from optexport.errors import ConfigError
from optexport.exporters import registry
from optexport.parity import distances
from optexport.pipeline import run
from optexport.pipeline.plan import RunPlan
from optexport.pipeline.rules import load_rules
from optexport.report.progress import show_progress
from optexport.runtime.untrusted import archives
from optexport.transformations.registry import PLUGIN

_SHOWN = 5


def reproduce(
    bundle: str | os.PathLike[str],
    folder: str | os.PathLike[str] = ".",
    *,
    key: str | os.PathLike[str] | None = None,
    progress: bool | Progress | None = None,
) -> list[str]:
    """Exports the model of a bundle again and compares the files, like ``optexport reproduce``.

    It runs the code that the manifest names. Tuning and benchmarks are not repeated: the bundle's config contains the
    choices of an earlier tuning.

    Args:
        bundle: The bundle's folder, which stays unchanged.
        folder: The folder that paths in the bundle's config are relative to.
        key: A public key; the bundle must then have a valid signature, which is checked before anything runs.
        progress: Whether to print every step, with its time, on standard error; by default in notebooks and at prompts.

    Returns:
        A line for each difference; empty if all files have the same bytes.

    Raises:
        OptexportError: The bundle is damaged, or the run fails; one of the subclasses.
    """
    path = as_path(bundle, "bundle")
    check_signature(path, key)
    manifest = digests.read_manifest(path)
    packages.check(manifest.versions)
    with show_progress(progress) as shown:
        return _reproduce(path, manifest, as_path(folder, "folder"), shown)


def _reproduce(bundle: Path, manifest: Manifest, folder: Path, progress: Progress) -> list[str]:
    if manifest.config.get("generation") is not None:
        raise ConfigError(
            "the bundle is one part of a generative model; parts cannot be reproduced separately",
            location=str(bundle),
            hint="Run the config of the model again, and compare the bundles with: optexport diff",
        )
    if not (bundle / "config.toml").is_file():
        raise ConfigError(
            "the bundle has no config, because it was exported from Python; it does not record how to build the model",
            location=str(bundle),
            hint="Call optexport.export again, and compare the bundles with: optexport diff",
        )
    config = _restore_input_order(disable_measurements(validate_settings(manifest.config, str(bundle))), manifest)
    check_custom_code(config, str(bundle))
    config = _set_tracking_uri(config, bundle, folder)
    _check_references(config, bundle, folder)
    registry.check_device(config.model.device, config.export.formats, str(bundle))
    rules = load_rules(config, folder, ())
    # The folder of a failed check is written next to the bundle.
    plan = RunPlan(folder / "config.toml", config, rules, output=bundle.resolve(), keep=False)
    with store.disabled(), torch_settings.preserved(), signals.temporary_folder() as scratch:
        result = run.export_bundle(run.load_job(plan, scratch, progress), progress)
        differences = list(_list_differences(bundle, manifest, result.output, result.manifest))
        machine = _list_machine_differences(read_measured(bundle)) if differences else ()
        return [*_list_input_differences(manifest, result.manifest), *machine, *differences]


def find_hint(bundle: Path) -> str | None:
    """Returns a hint with the number of threads that a bundle was made with, if this process has another one."""
    threads = read_measured(bundle).threads
    return None if threads in (None, torch.get_num_threads()) else f"Run again with OMP_NUM_THREADS={threads}"


def _set_tracking_uri(config: Config, bundle: Path, folder: Path) -> Config:
    """Sets the MLflow URI from the environment: a bundle's author could name any server."""
    if source_kind(config.model.source, folder) is not SourceKind.MLFLOW:
        return config
    if (uri := tracking_uri.find_environment_uri()) is not None:
        return config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})
    raise ConfigError(
        f"the model is {config.model.source}, but the environment does not set an MLflow server for it",
        location=str(bundle),
        hint=f"Set MLFLOW_TRACKING_URI. The config of the bundle has {config.tracking.uri or 'no tracking.uri'}.",
    )


def _check_references(config: Config, bundle: Path, folder: Path) -> None:
    """Checks that the files and modules that the config names exist in the folder."""
    path = folder / "config.toml"
    mistakes = Mistakes(str(path))
    references = {f"transformations[{index}].use": rule.use for index, rule in enumerate(config.rules())}
    references |= {f"parity.metrics.{name}": name for name in config.parity.metrics or ()}
    for key, name in references.items():
        if name.startswith(PLUGIN):
            mistakes.collect(check_module, name.removeprefix(PLUGIN), folder, f"{path}: {key}")
    mistakes.collect(check_source, config, path)
    mistakes.collect(check_source_keys, config, path)
    try:
        mistakes.raise_all()
    except ConfigError as error:
        raise ConfigError(
            error.message,
            location=(error.location or "").replace(str(path), str(bundle), 1),
            hint=f"Set `folder` to the folder of the config (searched: {folder.resolve()}), and install the packages "
            "that the config uses.",
        ) from error


def _restore_input_order(config: Config, manifest: Manifest) -> Config:
    """Restores the order of the inputs for the random numbers, because JSON sorts its keys."""
    if (tensors := config.inputs.tensors) is None:
        return config
    names = [spec.name for spec in manifest.inputs]
    ordered = sorted(tensors, key=lambda name: names.index(name) if name in names else len(names))
    inputs = config.inputs.model_copy(update={"tensors": {name: tensors[name] for name in ordered}})
    return config.model_copy(update={"inputs": inputs})


def _list_input_differences(earlier: Manifest, later: Manifest) -> Iterator[str]:
    """Yields differences of versions and weights, which may explain other differences."""
    yield from packages.describe_changes(earlier.versions, later.versions)
    if earlier.model.revision != later.model.revision:
        yield f"the model's revision was {earlier.model.revision}, and is {later.model.revision} now"
    if earlier.model.weights_sha256 != later.model.weights_sha256:
        before, after = earlier.model.weights_sha256[:12], later.model.weights_sha256[:12]
        yield f"the digest of the model's weights was {before}, and is {after} now"


def _list_machine_differences(earlier: Measured) -> Iterator[str]:
    """Yields differences of the machine that affect rounding, and so the noise floor."""
    threads = torch.get_num_threads()
    if earlier.threads is not None and earlier.threads != threads:
        yield f"the number of threads (OMP_NUM_THREADS) was {earlier.threads}, and is {threads} now"
    if earlier.processor and earlier.processor != processor():
        yield f"the processor was {earlier.processor}, and is {processor()} now"


def _list_differences(bundle: Path, earlier: Manifest, rebuilt: Path, later: Manifest) -> Iterator[str]:
    """Yields the files that differ, with their differences."""
    digests_before = {file.path: file.sha256 for file in earlier.files}
    digests_after = {file.path: file.sha256 for file in later.files}
    for name in sorted({*digests_before, *digests_after} - {"config.toml"}):
        if digests_before.get(name) == digests_after.get(name):
            continue
        if name not in digests_before or name not in digests_after:
            yield f"{name} is {'new' if name in digests_after else 'missing'}"
            continue
        yield f"{name} differs"
        read_parts = _PART_READERS.get(name, _PART_READERS.get(Path(name).suffix, _no_parts))
        parts = list(_list_part_differences(read_parts(bundle / name), read_parts(rebuilt / name)))
        yield from (f"  {part}" for part in parts[:_SHOWN])
        if parts[_SHOWN:]:
            yield f"  and {len(parts) - _SHOWN} more"
    for key in sorted(set(Manifest.model_fields) - {"config", "versions", "model", "files", "digest"}):
        if getattr(earlier, key) != getattr(later, key):
            yield f"manifest.json differs: {key}"


def _list_part_differences(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences of a file's parts: tensors by distance, texts by line."""
    for name in [*earlier, *(name for name in later if name not in earlier)]:
        if name not in earlier or name not in later:
            yield f"{name} is {'new' if name in later else 'missing'}"
            continue
        before, after = earlier[name], later[name]
        if isinstance(before, torch.Tensor):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                yield f"{name} was {before.dtype} {[*before.shape]}, and is {after.dtype} {[*after.shape]}"
            elif not torch.equal(bytes_of(before), bytes_of(after)):
                yield f"{name} differs{_describe_distance(before, after)}"
        elif before != after:
            lines = itertools.zip_longest(before.splitlines(True), after.splitlines(True), fillvalue="(no line)")
            number, pair = next((number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
            was, now = (line.strip() for line in pair)
            yield f"{name}, line {number}: {'the line endings differ' if was == now else f'was {was}, is {now}'}"


def _describe_distance(before: torch.Tensor, after: torch.Tensor) -> str:
    """Describes the distance of two tensors of one shape; empty if it is no number, as for NaN or the sign of zero."""
    if before.is_complex():
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    distance = distances.largest(distances.distance(after.detach(), before.detach()))
    return f" by at most {distance:.3g}" if distance else ""


def _no_parts(path: Path) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _text(path: Path) -> dict[str, Any]:
    return {"text": path.read_text(encoding="utf-8", errors="replace")}


def _onnx(path: Path) -> dict[str, Any]:
    import onnx_ir as ir

    model = ir.load(path)
    weights = {
        name: torch.from_numpy(value.const_value.numpy().copy())
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    return {"graph": "\n".join(map(str, model.graph)), **weights}


def _torchscript(path: Path) -> dict[str, Any]:
    module = archives.load_torchscript(path)
    return {"code": str(module.graph), **module.state_dict()}


def _pt2(path: Path) -> dict[str, Any]:
    program = archives.load_pt2(path)
    return {"graph": str(program.graph), **program.state_dict}


_PART_READERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "reference.safetensors": load_file,
    ".onnx": _onnx,
    ".pt": _torchscript,
    ".pt2": _pt2,
    ".txt": _text,
    ".json": _text,
    ".pbtxt": _text,
}
