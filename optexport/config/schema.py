"""Tables and keys of a config file, as pydantic models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
    model_validator,
)

from optexport.config.benchmarks import BenchConfig, GateConfig, TuneConfig
from optexport.config.inputs import InputsConfig
from optexport.config.metrics import MetricGates
from optexport.config.providers import OnnxConfig
from optexport.config.registration import RegisterConfig
from optexport.config.tasks import AUTO_CLASSES
from optexport.config.tracking_uri import check_uri, find_environment_uri
from optexport.config.validation import InvalidValueError, Table, check_finite, show_value
from optexport.errors import did_you_mean
from optexport.exporters.registry import BUILT_IN, DEFAULT_FORMATS, get_format, list_formats
from optexport.runtime.devices import Device
from optexport.transformations import registry

Effort = Literal["quick", "standard", "exhaustive"]
Layout = Literal["triton"]
Half = Literal["bfloat16", "float16"]

# The name of the input for images.
IMAGES: Final = "pixel_values"

# The names of the outputs that replace the logits.
PROBABILITIES: Final = "probabilities"
LABELS: Final = "labels"
# Probabilities of all classes, or the most likely classes with their probabilities.
ProcessedOutputs = Literal["probabilities", "softmax", "sigmoid", "argmax", "top_k"]
LABEL_OUTPUTS = ("argmax", "top_k")


def _check_format(name: str) -> str:
    if name not in list_formats():
        raise InvalidValueError(f'unknown format "{name}"', did_you_mean(name, list_formats()))
    return name


# A format, built in or of an installed package.
Format = Annotated[
    str,
    AfterValidator(_check_format),
    WithJsonSchema({"anyOf": [{"enum": list(BUILT_IN)}, {"type": "string", "pattern": "^[a-z][a-z0-9]*$"}]}),
]
FORMATS = DEFAULT_FORMATS


def _hide_default(schema: dict[str, Any]) -> None:
    """Leaves out a default that `optexport.config.load` replaces by one with the name of the model."""
    schema.pop("default", None)


def _folder(path: str) -> str:
    if "\0" in path or Path(path) == Path("/"):
        raise InvalidValueError(
            f"{show_value(path)} cannot be the folder of a bundle", 'Write a path, such as "build/model".'
        )
    return path


def _without_duplicates(formats: list[Format]) -> list[Format]:
    if len(set(formats)) < len(formats):
        raise InvalidValueError("a format is listed more than once", "List each format once.")
    return formats


class ModelConfig(Table):
    """``[model]``: the model, and how to load it.

    Attributes:
        source: A folder, a hub id, ``package:NAME/PATH``, ``python:module:factory``, ``mlflow:models:/NAME@ALIAS``,
            a ``.pt2`` or a TorchScript file.
        task: Selects the AutoModel class; by default the class that the model's config names.
        revision: The revision of a model of the hub; by default the newest.
        dtype: The dtype to load the model in; by default as stored.
        device: The device that the files run on; ``"cuda"`` is an NVIDIA GPU.
        attn_implementation: The attention implementation, as in transformers; by default the model's.
        adapter: The folder of a LoRA adapter, which is merged first; needs the extra ``adapters``.
        trust_remote_code: Whether code in the model's folder may run.
        arguments: Arguments of a ``python:`` factory; no secrets.
    """

    source: str = Field(min_length=1)
    task: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "float64"] | None = None
    device: Device = "cpu"
    attn_implementation: str | None = None
    adapter: str | None = Field(default=None, min_length=1)
    trust_remote_code: bool = False
    arguments: dict[str, Annotated[Any, AfterValidator(check_finite)]] = {}

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str | None) -> str | None:
        if task is not None and task not in AUTO_CLASSES:
            raise InvalidValueError(f'unknown task "{task}"', did_you_mean(task, list(AUTO_CLASSES)))
        return task


class ProcessingConfig(Table):
    """``[processing]``: adds pre- and postprocessing to the files.

    Attributes:
        normalize: Whether the files take images as integers from 0 to 255.
        outputs: What the files return instead of logits.
        k: How many labels ``outputs = "top_k"`` returns; by default 5.
    """

    normalize: bool = False
    outputs: ProcessedOutputs | None = None
    k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_k(self) -> ProcessingConfig:
        if self.k is not None and self.outputs != "top_k":
            raise InvalidValueError(
                'k needs outputs = "top_k"', 'Remove k, or write outputs = "top_k" to return the k most likely labels.'
            )
        return self


_PRESET = "preset"


class TransformationConfig(BaseModel):
    """``[[transformations]]``: a rule or a plugin; other keys are its options.

    Attributes:
        use: A rule of ``optexport transformations``, ``python:module:Class``, or ``preset`` for the default rules.
        min_matches: The smallest number of matches of the rule; the run fails if there are fewer.
        formats: The formats that the rule is applied for; by default all.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    use: str = Field(min_length=1)
    min_matches: int | None = Field(default=None, ge=1)
    formats: list[Format] | None = Field(default=None, min_length=1)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the rule; lists become tuples, because rules are frozen."""
        options = self.__pydantic_extra__ or {}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}

    @model_serializer(mode="wrap")
    def _as_written(self, default: SerializerFunctionWrapHandler) -> dict[str, Any]:
        optional = ("min_matches", "formats")
        return {key: value for key, value in default(self).items() if key not in optional or value is not None}

    @model_validator(mode="after")
    def _check_options(self) -> TransformationConfig:
        check_finite(self.options)
        return self


class ParityConfig(Table):
    """``[parity]``: the tolerance. It is measured if ``atol`` and ``rtol`` are not set.

    Attributes:
        noise_multiple: The tolerance as a multiple of the original's noise floor.
        atol: Replaces ``noise_multiple``: ``abs(result - original)`` may be at most ``atol + rtol * abs(original)``.
        rtol: The relative part of the same tolerance.
        effort: How many cases are checked.
        seed: The seed of random inputs.
        metrics: Gates on the model's decisions, each a number or ``{ min = 0.99, output = "logits" }``.
    """

    # Below 1, the original would fail its own check.
    noise_multiple: float = Field(default=4.0, ge=1, le=1e6, allow_inf_nan=False)
    atol: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    rtol: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    effort: Effort = "standard"
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    metrics: MetricGates | None = None


class ExportConfig(Table):
    """``[export]``: the formats, and the output folder.

    Attributes:
        formats: The formats to export: ``"torchscript"``, ``"onnx"``, ``"pt2"``, ``"openvino"``, or one of an installed
            package.
        output: The folder of the bundle; by default ``build/NAME``, with the name of the model.
        opset: The ONNX opset; by default the exporter's default. The exporter writes older opsets incorrectly, and ONNX
            Runtime does not read newer ones.
        passes: Format passes by format, as ``{ onnx = ["sum-residuals"] }``; ``optexport passes`` lists them. By
            default, those that measurements showed to be faster on such a processor.
        onnx: Where the ONNX file will run.
        layout: The layout of the files in the bundle; by default next to the manifest.
        allow_fixed_shape: Whether a TorchScript file may accept only the traced sizes although axes are declared as
            dynamic. By default, this is an error.
    """

    formats: Annotated[list[Format], Field(min_length=1), AfterValidator(_without_duplicates)] = list(FORMATS)
    output: Annotated[str, AfterValidator(_folder)] = Field(
        default="build/model", min_length=1, json_schema_extra=_hide_default
    )
    opset: int | None = Field(default=None, ge=18, le=26)
    passes: dict[Format, list[str]] = {}
    onnx: OnnxConfig = OnnxConfig()
    layout: Layout | None = None
    allow_fixed_shape: bool = False

    @model_validator(mode="after")
    def _check_passes(self) -> ExportConfig:
        for file_format, names in self.passes.items():
            passes = {entry.name: entry for entry in get_format(file_format).passes}
            for name in names:
                if name not in passes:
                    raise InvalidValueError(
                        f'passes.{file_format}: unknown format pass "{name}"', did_you_mean(name, passes)
                    )
                needed = passes[name].min_opset
                if needed is not None and self.opset is not None and self.opset < needed:
                    raise InvalidValueError(
                        f'passes.{file_format}: the pass "{name}" needs opset {needed}, found {self.opset}',
                        f'Write opset = {needed}, or remove "{name}".',
                    )
        return self


class PrecisionConfig(Table):
    """``[precision]``: computes files in lower precision; needs gates in ``[parity.metrics]``.

    Attributes:
        onnx: Precision of the layers of the ONNX file.
        torchscript: Precision of the TorchScript file.
        pt2: Precision of the ``.pt2`` file.
        weight_bits: Bits of the weights in ``int8``, ``int8-rows`` and ``int8-static``. 8 is more exact, and only for
            processors with VNNI: others give wrong sums.
        keep_float32: Layers, or modules with all layers in them, that always stay in float32.
    """

    onnx: Literal["int8", "int8-rows", "int8-blocks", "int8-static", "int4-blocks"] | None = None
    torchscript: Half | None = None
    pt2: Half | None = None
    weight_bits: Literal[7, 8] = 7
    keep_float32: list[Annotated[str, Field(min_length=1)]] = []

    def of(self, file_format: str) -> str | None:
        """Returns the precision of a format's file; None if it is the model's precision."""
        precision: str | None = getattr(self, file_format, None)
        return precision


class GenerationConfig(Table):
    """``[generation]``: compares the tokens that the files and the model generate.

    Attributes:
        new_tokens: How many generated tokens are compared.
    """

    new_tokens: int = Field(default=64, ge=1, lt=2**20)


class TrackingConfig(Table):
    """``[tracking]``: the MLflow server or local database for the run.

    Attributes:
        enabled: Whether the run is tracked.
        uri: The tracking URI of MLflow; a relative path starts at the config. By default ``MLFLOW_TRACKING_URI``, or
            ``sqlite:///mlflow.db`` if that is not set.
        experiment: The name of the experiment; by default the name of the model.
    """

    enabled: bool = True
    uri: Annotated[str, AfterValidator(check_uri), Field(min_length=1)] | None = None
    experiment: str = Field(default="optexport", min_length=1, max_length=500, json_schema_extra=_hide_default)

    @property
    def store(self) -> str:
        """The URI of the config, of the environment, or of a database next to the config.

        Raises:
            ConfigError: The URI of the environment is invalid.
        """
        return self.uri or find_environment_uri() or "sqlite:///mlflow.db"


class Config(Table):
    """A complete config file."""

    model: ModelConfig
    processing: ProcessingConfig | None = None
    inputs: InputsConfig = InputsConfig()
    transformations: list[TransformationConfig] | None = None
    parity: ParityConfig = ParityConfig()
    export: ExportConfig = ExportConfig()
    precision: PrecisionConfig | None = None
    bench: BenchConfig = BenchConfig()
    tune: TuneConfig | None = None
    generation: GenerationConfig | None = None
    gate: GateConfig = GateConfig()
    tracking: TrackingConfig = TrackingConfig()
    # Not named `register`, because BaseModel inherits a method of this name from ABCMeta.
    registering: RegisterConfig | None = Field(default=None, alias="register")

    def rules(self) -> list[TransformationConfig]:
        """Returns the transformations to apply; by default, and in place of ``use = "preset"``, those of the preset."""
        listed = [TransformationConfig(use=_PRESET)] if self.transformations is None else self.transformations
        return [
            rule.model_copy(update={"use": name})
            for rule in listed
            for name in (registry.PRESET if rule.use == _PRESET else [rule.use])
        ]

    def output_path(self, folder: Path) -> Path:
        """Returns the bundle's folder, for a config file in ``folder``."""
        return (folder / Path(self.export.output).expanduser()).resolve()
