"""Checks of keys that contradict each other, before any expensive work."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.outcomes import LEAST_ROUNDS
from optexport.config.metrics import GENERATION_METRIC, METRICS
from optexport.config.schema import FORMATS, IMAGES, LABEL_OUTPUTS, LABELS, PROBABILITIES
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError, did_you_mean
from optexport.exporters.registry import get_format
from optexport.transformations import registry

if TYPE_CHECKING:
    from optexport.config.benchmarks import BenchConfig, FormatLimits, GateConfig
    from optexport.config.inputs import InputsConfig, RangeConfig
    from optexport.config.schema import Config

# Precisions of a decoder with a cache: they need no calibration, and no row depends on other rows of its batch.
_GENERATION_PRECISIONS = ("int8-blocks", "int4-blocks")
_WEIGHT_BITS_PRECISIONS = ("int8", "int8-rows", "int8-static")
# The axes of a tokenizer's tensors, as `optexport.signature.signature` names them.
_TEXT_AXES = {"batch", "sequence", "decoder_sequence"}


def check_inputs(inputs: InputsConfig, *, is_program: bool, location: str) -> None:
    """Checks the names in ``[inputs]``, if the config alone defines the model's inputs.

    Args:
        is_program: Whether the model is a ``.pt2`` or TorchScript file, which has no tokenizer and no image processor.
        location: The path of the config.

    Raises:
        ConfigError: No input has the named dimension or axis, or the model cannot read this kind of input.
    """
    for key, processor in (("texts", "tokenizer"), ("images", "image processor")):
        if is_program and getattr(inputs, key) is not None:
            raise ConfigError(
                f"a .pt2 or TorchScript file has no {processor}",
                location=f"{location}: inputs.{key}",
                hint="Set inputs.data to a file with the inputs, or describe them in [inputs.tensors].",
            )
    if inputs.tensors is not None:
        for key, name in [("axes", name) for name in inputs.axes] + [("values", name) for name in inputs.values]:
            if name not in inputs.tensors:
                raise ConfigError(
                    f'[inputs.tensors] has no input "{name}"',
                    location=f"{location}: inputs.{key}.{name}",
                    hint=did_you_mean(name, list(inputs.tensors)),
                )
        axes = {
            size if isinstance(size, str) else re.sub(r"\W", "_", f"{name}_{axis}")
            for name, spec in inputs.tensors.items()
            for axis, size in enumerate(spec.shape)
        }
        named = {size for spec in inputs.tensors.values() for size in spec.shape if isinstance(size, str)}
        hint = "Use this name in the shape of an input."
    elif inputs.texts is not None:
        named = _TEXT_AXES | {name for names in inputs.axes.values() for name in names}
        # A tokenizer may return inputs that this package does not know; their axes are numbered.
        axes = named | {name for name, _ in _named_dimensions(inputs) if name.rpartition("_")[2].isdecimal()}
        hint = 'Name the axes of an input in [inputs.axes], such as x = ["batch", "time"].'
    else:
        return  # only the data or the model defines the inputs
    for name, key in _named_dimensions(inputs):
        if name not in axes:
            raise ConfigError(
                f'no input has a dimension "{name}"',
                location=f"{location}: inputs.{key}",
                hint=f"{did_you_mean(name, sorted(named))} {hint}",
            )


def _named_dimensions(inputs: InputsConfig) -> list[tuple[str, str]]:
    """Returns the names of dimensions in ``[inputs]``, each with its key."""
    indexed = [(dim, f"values.{name}") for name, values in inputs.values.items() for dim in values.indexes]
    return [(name, f"dynamic.{name}") for name in inputs.dynamic or ()] + indexed


def check_formats(config: Config, location: str) -> None:
    """Checks that keys for single formats name exported ones, and that the layout has a file.

    Raises:
        ConfigError: A key names a format that is not exported, no exported file fits the layout, or a rule for all
            files is restricted.
    """
    exported = config.export.formats
    named = {f"transformations[{index}].formats": rule.formats or [] for index, rule in enumerate(config.rules())}
    named |= {"export.passes": list(config.export.passes)}
    named |= {"export.onnx.providers": ["onnx"]} if config.export.onnx.providers else {}
    for key, formats in named.items():
        _check_exported(formats, exported, f"{location}: {key}")
    if config.export.layout is not None and not {"onnx", "torchscript"}.intersection(exported):
        raise ConfigError(
            f"Triton serves ONNX and TorchScript files, and export.formats is {', '.join(exported)}",
            location=f"{location}: export.layout",
            hint='Add "onnx" or "torchscript" to export.formats, or remove export.layout.',
        )
    for index, rule in enumerate(config.rules()):
        if rule.formats is not None and registry.canonical_name(rule.use) == "keep-outputs":
            raise ConfigError(
                "keep-outputs applies to all formats, because all files have the same outputs",
                location=f"{location}: transformations[{index}].formats",
                hint="Remove formats from this rule.",
            )


def _check_exported(formats: Iterable[str], exported: Sequence[str], location: str) -> None:
    for file_format in formats:
        if file_format not in exported:
            raise ConfigError(
                f"the format {file_format} is not exported (export.formats is {', '.join(exported)})",
                location=location,
                hint=f'Add "{file_format}" to export.formats, or remove {file_format} here.',
            )


def check_tolerance(config: Config, without: Collection[str], location: str) -> None:
    """Checks that there is a tolerance if a rule changes the numbers.

    Plugins are not checked: only their class says if they preserve the computation.

    Args:
        without: Names of rules that the run omits.
        location: The path of the config.

    Raises:
        ConfigError: The config sets no tolerance, so the parity check would fail at the end of the run.
    """
    if config.parity.atol is not None or config.parity.rtol is not None:
        return
    omitted = {registry.canonical_name(name) for name in without}
    for index, rule in enumerate(config.rules()):
        name = registry.canonical_name(rule.use)
        if name is not None and name not in omitted and not registry.RULES[name].preserves_computation:
            raise ConfigError(
                f"{name} changes the numbers, so it needs a tolerance",
                location=f"{location}: transformations[{index}]",
                hint="Set parity.atol or parity.rtol, or remove the rule.",
            )


def check_device(config: Config, location: str) -> None:
    """Checks that a config for another device than the CPU uses no feature of the CPU alone.

    Raises:
        ConfigError: It uses one.
    """
    device = config.model.device
    if device == "cpu":
        return
    features = {
        "generation": config.generation is not None,
        "precision": config.precision is not None,
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
        "export.onnx.providers": bool(config.export.onnx.providers),
    }
    for file_format in config.export.formats:
        features[f"export.formats: {file_format}"] = device not in get_format(file_format).devices
    for file_format, names in config.export.passes.items():
        supported = get_format(file_format).list_passes(device)
        features |= {f"export.passes.{file_format}: {name}": name not in supported for name in names}
    for key in [key for key, is_used in features.items() if is_used]:
        name = key.rpartition(": ")[2]
        raise ConfigError(
            f'{name} is only supported on the CPU, and model.device is "{device}"',
            location=f"{location}: {key}",
            hint=f"Remove {name}, or remove model.device.",
        )


def check_generation(config: Config, location: str) -> None:
    """Checks that a config with ``[generation]`` has no table that generation cannot use.

    Raises:
        ConfigError: It has one.
    """
    if config.generation is None:
        return
    inputs = config.inputs
    unsupported = {
        "processing": config.processing is not None,
        "bench": config.bench.enabled,
        "tune": config.tune is not None,
        "gate": config.gate != type(config.gate)(),
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
        "parity.metrics": config.parity.metrics is not None and config.precision is None,
        "inputs.images": inputs.images is not None,
        "inputs.tensors": inputs.tensors is not None,
        "inputs.axes": bool(inputs.axes),
        "inputs.values": bool(inputs.values),
        "inputs.dynamic": inputs.dynamic is not None,
    }
    for key in [key for key, is_used in unsupported.items() if is_used]:
        raise ConfigError(
            f"{key} cannot be combined with [generation], which exports a model in parts",
            location=f"{location}: {key}",
            hint=f"Remove {key}, or remove [generation] to export one forward pass without a cache.",
        )
    check_generation_precision(config, location)
    if config.model.source.endswith(".pt2"):
        raise ConfigError(
            "a .pt2 file has no generate()",
            location=f"{location}: generation",
            hint="Set model.source to a transformers model, or remove [generation].",
        )


def check_generation_precision(config: Config, location: str) -> None:
    """Checks ``[precision]`` and its gates for a model that is exported in parts.

    Raises:
        ConfigError: The decoder cannot have this precision, or its tokens have no gate.
    """
    if config.precision is None:
        return
    for name in FORMATS:
        precision = config.precision.of(name)
        if precision is not None and (name != "onnx" or precision not in _GENERATION_PRECISIONS):
            raise ConfigError(
                f"a decoder with a cache cannot be exported in {precision}",
                location=f"{location}: precision.{name}",
                hint=f"Write onnx = {' or '.join(map(json.dumps, _GENERATION_PRECISIONS))}, or remove {name}.",
            )
    metrics = config.parity.metrics or {}
    if GENERATION_METRIC not in metrics:
        raise ConfigError(
            "a decoder of lower precision needs a gate on its tokens",
            location=f"{location}: parity.metrics",
            hint=f"Add {GENERATION_METRIC} = 0.95 to [parity.metrics].",
        )
    for name, gate in metrics.items():
        if gate.output not in (None, "logits"):
            raise ConfigError(
                f"gates of a decoder apply to its logits, found {gate.output}",
                location=f"{location}: parity.metrics.{name}",
                hint="Remove output.",
            )


def check_precision(config: Config, location: str) -> None:
    """Checks ``[precision]`` against the rest of the config.

    Raises:
        ConfigError: It lowers no file or a file that is not exported, or the lowered files have no gate.
    """
    table = config.precision
    if table is None:
        return
    lowered = [name for name in FORMATS if table.of(name) is not None]
    if not lowered:
        raise ConfigError(
            "no format gets a precision here",
            location=f"{location}: precision",
            hint='Write a precision for a format, such as onnx = "int8", or remove [precision].',
        )
    if table.weight_bits != 7 and table.onnx not in _WEIGHT_BITS_PRECISIONS:
        raise ConfigError(
            "no format has a precision with weights of 7 or 8 bits",
            location=f"{location}: precision.weight_bits",
            hint=f"Write onnx = {' or '.join(map(json.dumps, _WEIGHT_BITS_PRECISIONS))}, or remove weight_bits.",
        )
    for name in lowered:
        _check_exported([name], config.export.formats, f"{location}: precision.{name}")
    if config.parity.metrics is None:
        raise ConfigError(
            "a file of lower precision differs by more than rounding, so it needs a gate on its decisions",
            location=f"{location}: precision.{lowered[0]}",
            hint="Add a gate to [parity.metrics], such as cosine = 0.99.",
        )
    gates = config.parity.metrics.items()
    if all(name in METRICS and gate.min <= METRICS[name][0] for name, gate in gates):
        minima = ", ".join(f"{name} = {gate.min:g}" for name, gate in gates)
        raise ConfigError(
            f"every gate of the lower-precision files accepts any result ({minima})",
            location=f"{location}: parity.metrics",
            hint="Write a larger number, such as cosine = 0.99.",
        )
    if config.model.dtype not in (None, "float32"):
        raise ConfigError(
            f"only a model in float32 can be converted to a lower precision, and model.dtype is {config.model.dtype}",
            location=f"{location}: precision.{lowered[0]}",
            hint="Remove model.dtype, or remove [precision].",
        )


def check_processing(config: Config, folder: Path, location: str) -> None:
    """Checks ``[processing]`` against the rest of the config.

    Args:
        folder: The folder of the config; paths are relative to it.
        location: The path of the config.

    Raises:
        ConfigError: The source is a program that cannot be changed, images are not integers, or a gate would compare
            labels.
    """
    table = config.processing
    if table is None:
        return
    if source_kind(config.model.source, folder) in (SourceKind.PT2, SourceKind.TORCHSCRIPT):
        for key in [key for key in ("normalize", "outputs") if getattr(table, key)]:
            raise ConfigError(
                "processing cannot be added to a .pt2 or TorchScript file",
                location=f"{location}: processing.{key}",
                hint=f"Set model.source to the original model, or remove processing.{key}.",
            )
    images = (config.inputs.tensors or {}).get(IMAGES)
    if table.normalize and images is not None and images.dtype != "uint8":
        raise ConfigError(
            f"processing.normalize needs images in uint8, found {images.dtype}",
            location=f"{location}: inputs.tensors.{IMAGES}",
            hint='Write dtype = "uint8", low = 0, high = 256.',
        )
    for metric, gate in (config.parity.metrics or {}).items():
        if table.outputs in LABEL_OUTPUTS and metric in METRICS and gate.output in (None, PROBABILITIES, LABELS):
            raise ConfigError(
                f'{metric} cannot be measured with processing.outputs = "{table.outputs}"',
                location=f"{location}: parity.metrics.{metric}",
                hint='Write processing.outputs = "probabilities", or remove the gate: labels must always be equal.',
            )


def check_register(config: Config, location: str) -> None:
    """Checks that a config with ``[register]`` exports an ONNX file and uses MLflow.

    Raises:
        ConfigError: It does not.
    """
    if config.registering is None:
        return
    if "onnx" not in config.export.formats:
        raise ConfigError(
            f"the ONNX file is registered, and export.formats is {', '.join(config.export.formats)}",
            location=f"{location}: register",
            hint='Add "onnx" to export.formats, or remove [register].',
        )
    if not config.tracking.enabled:
        raise ConfigError(
            "models are registered in MLflow, and tracking.enabled is false",
            location=f"{location}: register",
            hint="Remove tracking.enabled = false, or remove [register].",
        )


def check_benchmarks(
    bench: BenchConfig,
    gate: GateConfig,
    formats: Sequence[str],
    dynamic: Mapping[str, RangeConfig] | None,
    location: str,
) -> None:
    """Checks ``[bench]`` and ``[gate]`` against the rest of the config.

    Args:
        formats: The exported formats.
        dynamic: The sizes of each declared dimension; None if the model decides.
        location: The location for errors, as the path of the config.

    Raises:
        ConfigError: A gate applies to a format that is not exported, or a shape has an undeclared dimension.
    """
    for key in ("max_size_mb", "max_latency_ms", "min_speedup"):
        limits: FormatLimits | None = getattr(gate, key)
        if limits is not None and not limits.by_format:
            raise ConfigError(
                "the gate has no bound",
                location=f"{location}: gate.{key}",
                hint=f"Write a number, such as {key} = 2, or remove gate.{key}.",
            )
        for name in limits.by_format if limits is not None else ():
            if name != "every":
                _check_exported([name], formats, f"{location}: gate.{key}.{name}")
    if gate.min_speedup is not None and bench.rounds < LEAST_ROUNDS:
        raise ConfigError(
            f"gate.min_speedup needs at least {LEAST_ROUNDS} rounds, found {bench.rounds}",
            location=f"{location}: bench.rounds",
            hint=f"Write rounds = {LEAST_ROUNDS} or more, or remove gate.min_speedup.",
        )
    if dynamic is None:  # the dimensions are known only after the trace
        return
    for index, shape in enumerate(bench.shapes):
        for dimension, size in shape.items():
            key = f"{location}: bench.shapes[{index}].{dimension}"
            if dimension not in dynamic:
                raise ConfigError(
                    f'inputs.dynamic has no dimension "{dimension}"',
                    location=key,
                    hint=did_you_mean(dimension, dynamic),
                )
            low, high = dynamic[dimension].ends
            multiple_of = dynamic[dimension].multiple_of
            if not low <= size <= high or size % multiple_of:
                kind = "size" if multiple_of == 1 else f"multiple of {multiple_of}"
                raise ConfigError(
                    f"expected a {kind} from {low} to {high}, the range of inputs.dynamic.{dimension}, found {size}",
                    location=key,
                    hint=f"Write a size in this range, or extend inputs.dynamic.{dimension}.",
                )
