"""Checks of keys that contradict each other, before any expensive work."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optexport.bundle.outcomes import LEAST_ROUNDS
from optexport.config import format_passes
from optexport.config.metrics import MEASURES
from optexport.config.schema import IMAGES, LABELS, OF_LABELS, PROBABILITIES
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError, did_you_mean
from optexport.transformations import registry

if TYPE_CHECKING:
    from optexport.config.benchmarks import BarConfig, BenchConfig, GateConfig
    from optexport.config.schema import Config, InputsConfig

# The axes of a tokenizer's tensors, as `optexport.signature.signature` names them.
_OF_TEXT = {"batch", "sequence", "decoder_sequence"}


def check_inputs(inputs: InputsConfig, *, of_program: bool, location: str) -> None:
    """Checks the names in ``[inputs]``, if the config alone defines the model's inputs.

    Args:
        of_program: Whether the model is a ``.pt2`` or TorchScript file, which has no tokenizer and no image processor.
        location: The path of the config.

    Raises:
        ConfigError: No input has the named dimension or axis, or the model cannot read this kind of input.
    """
    for key, what in (("texts", "tokenizer"), ("images", "image processor")):
        if of_program and getattr(inputs, key) is not None:
            raise ConfigError(
                f"a .pt2 or TorchScript file has no {what}",
                location=f"{location}: inputs.{key}",
                hint="Give its inputs as data instead.",
            )
    if inputs.tensors is not None:
        for name in inputs.axes:
            if name not in inputs.tensors:
                raise ConfigError(
                    "there is no such input",
                    location=f"{location}: inputs.axes.{name}",
                    hint=did_you_mean(name, list(inputs.tensors)),
                )
        axes = {
            size if isinstance(size, str) else re.sub(r"\W", "_", f"{name}_{axis}")
            for name, spec in inputs.tensors.items()
            for axis, size in enumerate(spec.shape)
        }
        named = {size for spec in inputs.tensors.values() for size in spec.shape if isinstance(size, str)}
        hint = "Name it in the shape of an input."
    elif inputs.texts is not None:
        named = _OF_TEXT | {name for names in inputs.axes.values() for name in names}
        # A tokenizer may return inputs that this package does not know; their axes are numbered.
        axes = named | {name for name in inputs.dynamic or () if name.rpartition("_")[2].isdecimal()}
        hint = "Name the axes of an input with [inputs.axes]."
    else:
        return  # only the data or the model defines the inputs
    for name in inputs.dynamic or ():
        if name not in axes:
            raise ConfigError(
                "no input has such a dimension",
                location=f"{location}: inputs.dynamic.{name}",
                hint=f"{did_you_mean(name, sorted(named))} {hint}",
            )


def check_formats(config: Config, location: str) -> None:
    """Checks that keys for single formats name exported ones, and that the layout has a file.

    Raises:
        ConfigError: A key names a format that is not exported, no exported file fits the layout, or a rule for all
            files is restricted.
    """
    exported = config.export.formats
    said = {f"transformations[{index}].formats": rule.formats or [] for index, rule in enumerate(config.rules())}
    for key, formats in {**said, "export.passes": list(config.export.passes)}.items():
        for missing in [name for name in formats if name not in exported]:
            raise ConfigError(
                f"no {missing} file is exported", location=f"{location}: {key}", hint=f"export.formats is {exported}."
            )
    if config.export.layout is not None and set(exported) == {"pt2"}:
        raise ConfigError(
            "no file is exported that Triton serves",
            location=f"{location}: export.layout",
            hint='Add "onnx" or "torchscript" to export.formats, or leave it out.',
        )
    for index, rule in enumerate(config.rules()):
        if rule.formats is not None and registry.canonical_name(rule.use) == "keep-outputs":
            raise ConfigError(
                "all files have the same outputs",
                location=f"{location}: transformations[{index}].formats",
                hint="Leave it out.",
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
    left_out = {registry.canonical_name(name) for name in without}
    for index, rule in enumerate(config.rules()):
        name = registry.canonical_name(rule.use)
        if name is not None and name not in left_out and not registry.RULES[name].preserves_computation:
            raise ConfigError(
                f"{name} changes the numbers, and nothing says by how much it may",
                location=f"{location}: transformations[{index}]",
                hint="Set parity.atol or parity.rtol, or leave the rule out.",
            )


def check_device(config: Config, location: str) -> None:
    """Checks that a config for another device than the CPU uses no feature of the CPU alone.

    Raises:
        ConfigError: It uses one.
    """
    if config.model.device == "cpu":
        return
    asked = {
        "generation": config.generation is not None,
        "precision": config.precision is not None,
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
    }
    for file_format, names in config.export.passes.items():
        known = format_passes.of_format(file_format, config.model.device)
        asked |= {f"export.passes.{file_format}: {name}": name not in known for name in names}
    for key in [key for key, value in asked.items() if value]:
        raise ConfigError(
            f'it is done for the CPU alone, and model.device is "{config.model.device}"',
            location=f"{location}: {key}",
            hint="Leave it out, or leave out model.device.",
        )


def check_generation(config: Config, location: str) -> None:
    """Checks that a config with ``[generation]`` has no table that generation cannot use.

    Raises:
        ConfigError: It has one.
    """
    if config.generation is None:
        return
    inputs = config.inputs
    asked = {
        "processing": config.processing is not None,
        "bench": config.bench.enabled,
        "tune": config.tune is not None,
        "gate": config.gate != type(config.gate)(),
        "precision": config.precision is not None,
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
        "parity.metrics": config.parity.metrics is not None,
        "inputs.images": inputs.images is not None,
        "inputs.tensors": inputs.tensors is not None,
        "inputs.axes": bool(inputs.axes),
        "inputs.dynamic": inputs.dynamic is not None,
    }
    for key in [key for key, value in asked.items() if value]:
        raise ConfigError(
            "it does not go with [generation], which exports parts with inputs and sizes of their own",
            location=f"{location}: {key}",
            hint="Leave it out, or leave out [generation] to export one forward pass without a cache.",
        )
    if config.model.source.endswith(".pt2"):
        raise ConfigError(
            "a .pt2 file has no generate()",
            location=f"{location}: generation",
            hint="Give a model of transformers as model.source, or leave out [generation].",
        )


def check_precision(config: Config, location: str) -> None:
    """Checks ``[precision]`` against the rest of the config.

    Raises:
        ConfigError: It lowers no file or a file that is not exported, or the lowered files have no gate.
    """
    table = config.precision
    if table is None:
        return
    lowered = [name for name in ("onnx", "torchscript", "pt2") if table.of(name) is not None]
    if not lowered:
        raise ConfigError(
            "it lowers nothing",
            location=f"{location}: precision",
            hint='Say of a format what it is to be: onnx = "int8".',
        )
    for name in lowered:
        if name not in config.export.formats:
            raise ConfigError(
                f"no {name} file is exported",
                location=f"{location}: precision.{name}",
                hint=f"export.formats is {', '.join(config.export.formats)}.",
            )
    if config.parity.metrics is None:
        raise ConfigError(
            "a file of lower precision is not near enough to be proven to rounding, and nothing says what it must keep",
            location=f"{location}: precision.{lowered[0]}",
            hint="Set a gate in [parity.metrics], as cosine = 0.99.",
        )
    gates = config.parity.metrics.items()
    if all(name in MEASURES and gate.min <= MEASURES[name][0] for name, gate in gates):
        raise ConfigError(
            "a file of lower precision is held to gates alone, and these let anything pass",
            location=f"{location}: parity.metrics",
            hint="Demand more than the least that there is: " + ", ".join(f"{n} = {g.min:g}" for n, g in gates) + ".",
        )
    if config.model.dtype not in (None, "float32"):
        raise ConfigError(
            f"only a model in float32 can be lowered, and model.dtype is {config.model.dtype}",
            location=f"{location}: precision.{lowered[0]}",
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
                "a .pt2 or TorchScript file is exported as it is",
                location=f"{location}: processing.{key}",
                hint="Give the model that it was made of as model.source, or leave it out.",
            )
    images = (config.inputs.tensors or {}).get(IMAGES)
    if table.normalize and images is not None and images.dtype != "uint8":
        raise ConfigError(
            f"it is {images.dtype}, and with processing.normalize the files take images as they are, in uint8",
            location=f"{location}: inputs.tensors.{IMAGES}",
            hint='Write dtype = "uint8", low = 0, high = 256.',
        )
    for measure, gate in (config.parity.metrics or {}).items():
        if table.outputs in OF_LABELS and measure in MEASURES and gate.output in (None, PROBABILITIES, LABELS):
            raise ConfigError(
                f'outputs = "{table.outputs}" leaves nothing that it could be measured on',
                location=f"{location}: parity.metrics.{measure}",
                hint='Write processing.outputs = "probabilities", or leave the gate out: labels must be equal anyway.',
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
            "the ONNX file is what is registered, and none is exported",
            location=f"{location}: register",
            hint='Add "onnx" to export.formats.',
        )
    if not config.tracking.enabled:
        raise ConfigError(
            "only what MLflow keeps can be registered",
            location=f"{location}: register",
            hint="Leave out tracking.enabled = false.",
        )


_FORMATS = ("onnx", "torchscript", "pt2")


def check_measuring(
    bench: BenchConfig,
    gate: GateConfig,
    formats: Sequence[str],
    dynamic: Mapping[str, Sequence[int]] | None,
    location: str,
) -> None:
    """Checks ``[bench]`` and ``[gate]`` against the rest of the config.

    Args:
        formats: The exported formats.
        dynamic: The smallest and the largest size of each declared dimension; None if the model decides.
        location: The location for errors, as the path of the config.

    Raises:
        ConfigError: A gate applies to a format that is not exported, or a shape has an undeclared dimension.
    """
    for key in ("max_size_mb", "max_latency_ms", "min_speedup"):
        bar: BarConfig | None = getattr(gate, key)
        if bar is not None and not any(bar.of(name) for name in _FORMATS):
            raise ConfigError(
                "it demands nothing", location=f"{location}: gate.{key}", hint="Write a number, or leave it out."
            )
        for own in _FORMATS if bar is not None else ():
            if getattr(bar, own) is not None and own not in formats:
                raise ConfigError(
                    "no such file is exported",
                    location=f"{location}: gate.{key}.{own}",
                    hint=f"export.formats is {', '.join(formats)}.",
                )
    if gate.min_speedup is not None and bench.rounds < LEAST_ROUNDS:
        raise ConfigError(f"gate.min_speedup needs at least {LEAST_ROUNDS}", location=f"{location}: bench.rounds")
    if dynamic is None:  # the dimensions are known only after the trace
        return
    for index, shape in enumerate(bench.shapes):
        for name, size in shape.items():
            where = f"{location}: bench.shapes[{index}].{name}"
            if name not in dynamic:
                raise ConfigError(
                    "inputs.dynamic has no such dimension", location=where, hint=did_you_mean(name, dynamic)
                )
            low, high = dynamic[name]
            if not low <= size <= high:
                raise ConfigError(f"inputs.dynamic.{name} is {low} to {high}, not {size}", location=where)
