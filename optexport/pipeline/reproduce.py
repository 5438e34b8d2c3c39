"""Reproduces a bundle from its manifest, and reports the tensors or nodes that differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from optexport._utils import packages, signals, torch_settings
from optexport._utils.platform import processor
from optexport._utils.progress import Progress
from optexport.bundle import digests
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured, read_measured
from optexport.cache import store
from optexport.config import tracking_uri
from optexport.config.custom_code import check_custom_code
from optexport.config.load import checked_settings
from optexport.config.schema import Config
from optexport.config.source import SourceKind, check_beside_source, check_module, check_source, source_kind
from optexport.config.validation import Mistakes
from optexport.errors import ConfigError
from optexport.job import rules_of, unmeasured
from optexport.pipeline import run
from optexport.runtime import devices
from optexport.runtime.untrusted import archives
from optexport.transformations.registry import PLUGIN

_SHOWN = 5


def reproduce(bundle: Path, folder: Path, progress: Progress) -> list[str]:
    """Runs a bundle again, without tuning and benchmarks.

    The bundle's config contains the choices of an earlier tuning.

    Args:
        bundle: The bundle's folder, which stays unchanged.
        folder: The folder that paths in the bundle's config are relative to.

    Returns:
        A line for each difference; empty if all files have the same bytes.

    Raises:
        OptexportError: The bundle is damaged, or the run fails; one of the subclasses.
    """
    manifest = digests.read_manifest(bundle)
    if manifest.config.get("generation") is not None:
        raise ConfigError(
            "it is a part of a generative model, which is made as a whole",
            location=str(bundle),
            hint="Run its config again, and compare: optexport diff",
        )
    if not (bundle / "config.toml").is_file():
        raise ConfigError(
            "it was made of a model in Python, and not by a config, so that nothing says how to make that model again",
            location=str(bundle),
            hint="Call optexport.export again, and compare: optexport diff",
        )
    config = _in_order(unmeasured(checked_settings(manifest.config, str(bundle))), manifest)
    check_custom_code(config, str(bundle))
    config = _with_store(config, bundle, folder)
    _check_named(config, bundle, folder)
    devices.check(config.model.device, config.export.formats, str(bundle))
    with store.off(), torch_settings.put_back(), signals.temporary_folder() as scratch:
        job = run.prepare(config, folder, rules_of(config, folder, ()), scratch / "bundle", scratch, progress)
        made = run.produce(replace(job, beside=bundle.resolve()), progress).manifest
        differences = list(_differences(bundle, manifest, scratch / "bundle", made))
        around = _surroundings(read_measured(bundle)) if differences else ()
        return [*_reasons(manifest, made), *around, *differences]


def _with_store(config: Config, bundle: Path, folder: Path) -> Config:
    """Sets the MLflow URI from the environment: a bundle's author could name any server."""
    if source_kind(config.model.source, folder) is not SourceKind.MLFLOW:
        return config
    if (uri := tracking_uri.of_environment()) is not None:
        return config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})
    raise ConfigError(
        f"its model is {config.model.source}, and a bundle does not say which MLflow may be asked for it",
        location=str(bundle),
        hint=f"Set MLFLOW_TRACKING_URI; its config says {config.tracking.uri}.",
    )


def _check_named(config: Config, bundle: Path, folder: Path) -> None:
    """Checks that the files and modules that the config names exist in the folder."""
    path = folder / "config.toml"
    mistakes = Mistakes(str(path))
    called = {f"transformations[{index}].use": rule.use for index, rule in enumerate(config.rules())}
    called |= {f"parity.metrics.{name}": name for name in config.parity.metrics or ()}
    for key, name in called.items():
        if name.startswith(PLUGIN):
            mistakes.of(check_module, name.removeprefix(PLUGIN), folder, f"{path}: {key}")
    mistakes.of(check_source, config, path)
    mistakes.of(check_beside_source, config, path)
    try:
        mistakes.tell()
    except ConfigError as error:
        raise ConfigError(
            error.message,
            location=(error.location or "").replace(str(path), str(bundle), 1),
            hint=f"What its config names is looked for in {folder.resolve()}: give the folder of that config with "
            "--folder, and install the packages that it names.",
        ) from error


def _in_order(config: Config, manifest: Manifest) -> Config:
    """Restores the order of the inputs for the random numbers, because JSON sorts its keys."""
    if (tensors := config.inputs.tensors) is None:
        return config
    names = [spec.name for spec in manifest.inputs]
    ordered = sorted(tensors, key=lambda name: names.index(name) if name in names else len(names))
    inputs = config.inputs.model_copy(update={"tensors": {name: tensors[name] for name in ordered}})
    return config.model_copy(update={"inputs": inputs})


def _reasons(was: Manifest, now: Manifest) -> Iterator[str]:
    """Yields differences of versions and weights, which may explain other differences."""
    yield from packages.describe_changes(was.versions, now.versions)
    if was.model.revision != now.model.revision:
        yield f"the model's revision was {was.model.revision}, and is {now.model.revision} now"
    if was.model.weights_sha256 != now.model.weights_sha256:
        before, after = was.model.weights_sha256[:12], now.model.weights_sha256[:12]
        yield f"the model's weights had the digest {before}, and have {after} now"


def _surroundings(was: Measured) -> Iterator[str]:
    """Yields differences of the machine that affect rounding, and so the noise floor."""
    if was.threads is not None and was.threads != torch.get_num_threads():
        yield f"it ran with {was.threads} threads (OMP_NUM_THREADS), and runs with {torch.get_num_threads()} now"
    if was.processor and was.processor != processor():
        yield f"it ran on {was.processor}, and runs on {processor()} now"


def _differences(bundle: Path, was: Manifest, again: Path, now: Manifest) -> Iterator[str]:
    """Yields the files that differ, with their differences."""
    then, made = ({file.path: file.sha256 for file in each.files} for each in (was, now))
    for name in sorted({*then, *made} - {"config.toml"}):
        if then.get(name) == made.get(name):
            continue
        if name not in then or name not in made:
            yield f"{name} is {'there now' if name in made else 'not there now'}"
            continue
        yield f"{name} differs"
        inside = _INSIDE.get(name, _INSIDE.get(Path(name).suffix, _no_parts))
        parts = list(_parts(inside(bundle / name), inside(again / name)))
        yield from (f"  {part}" for part in parts[:_SHOWN])
        if parts[_SHOWN:]:
            yield f"  and {len(parts) - _SHOWN} more"
    for key in sorted(set(Manifest.model_fields) - {"config", "versions", "model", "files", "digest"}):
        if getattr(was, key) != getattr(now, key):
            yield f"manifest.json differs: {key}"


def _parts(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences of a file's parts: tensors by distance, texts by line."""
    for name in [*was, *(name for name in now if name not in was)]:
        if name not in was or name not in now:
            yield f"{name} is {'there now' if name in now else 'not there now'}"
            continue
        one, other = was[name], now[name]
        if isinstance(one, torch.Tensor):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                yield f"{name} was {one.dtype} {[*one.shape]}, and is {other.dtype} {[*other.shape]}"
            elif not torch.equal(one, other):
                far = (one.double() - other.double()).abs().max().item()
                yield f"{name} is off by {far:.3g}"
        elif one != other:
            lines = itertools.zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing")
            number, first = next((number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1])
            yield f"{name}, line {number}: was {first[0].strip()}, is {first[1].strip()}"


def _no_parts(path: Path) -> dict[str, Any]:  # noqa: ARG001
    return {}


def _text(path: Path) -> dict[str, Any]:
    return {"the text": path.read_text(encoding="utf-8", errors="replace")}


def _onnx(path: Path) -> dict[str, Any]:
    import onnx_ir as ir

    model = ir.load(path)
    weights = {
        name: torch.from_numpy(value.const_value.numpy().copy())
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    return {"the graph": "\n".join(map(str, model.graph)), **weights}


def _torchscript(path: Path) -> dict[str, Any]:
    module = archives.load_torchscript(path)
    return {"the code": str(module.graph), **module.state_dict()}


def _pt2(path: Path) -> dict[str, Any]:
    program = archives.load_pt2(path)
    return {"the graph": str(program.graph), **program.state_dict}


_INSIDE: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "reference.safetensors": load_file,
    ".onnx": _onnx,
    ".pt": _torchscript,
    ".pt2": _pt2,
    ".txt": _text,
    ".json": _text,
    ".pbtxt": _text,
}
