"""Checks of single tables against the rest of a config."""

from __future__ import annotations

import re
from pathlib import Path

from optexport.config.metrics import MEASURES
from optexport.config.schema import IMAGES, LABELS, OF_LABELS, PROBABILITIES, Config
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError


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


def check_beside(config: Config, path: Path) -> None:
    """Checks that MLflow can open a database next to a config.

    Args:
        path: The path of the config.

    Raises:
        ConfigError: The folder's name has characters with a special meaning in a URI.
    """
    folder, uri = str(path.parent.resolve()), config.tracking.uri
    odd = re.search(r"\?|%[\da-fA-F]{2}", folder)
    is_relative = uri.startswith("sqlite:///") and not uri.startswith("sqlite:////")
    if odd is not None and config.tracking.enabled and is_relative:
        raise ConfigError(
            f'MLflow cannot keep a database in a folder with "{odd[0]}" in its name',
            location=f"{path}: tracking.uri",
            hint="Name a database elsewhere, as sqlite:////PATH/mlflow.db, or set enabled = false.",
        )
