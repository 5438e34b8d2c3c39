"""Tables and keys of a config file, as pydantic models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from optexport.config import format_passes
from optexport.config.benchmarks import BenchConfig, GateConfig, TuneConfig
from optexport.config.metrics import MetricGates
from optexport.config.registration import RegisterConfig
from optexport.config.tasks import AUTO_CLASSES
from optexport.config.tracking_uri import check_uri
from optexport.config.validation import InvalidValueError, Table, dimension_name, show_value
from optexport.errors import did_you_mean
from optexport.runtime.devices import Device
from optexport.transformations import registry

Format = Literal["torchscript", "onnx", "pt2"]
FORMATS: tuple[Format, ...] = ("torchscript", "onnx", "pt2")
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


LARGEST_SIZE = 2**31 - 1


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


def _size(size: Any) -> int | str:
    if isinstance(size, str):
        return dimension_name(size)
    if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
        raise InvalidValueError(
            f"expected a size from 1 to {LARGEST_SIZE} or the name of a dimension, found {show_value(size)}",
            'Write a whole number, such as 16, or a name in quotes, such as "batch".',
        )
    return size


def _constant(value: Any) -> bool | int | float | str | list[Any]:
    """Checks a number, a text, or nested lists of numbers or booleans that become a tensor."""
    if isinstance(value, list):
        _check_rows(value)
    elif not isinstance(value, bool | int | float | str):
        raise InvalidValueError(
            f"expected a number, a text, true, false or a list, found {show_value(value)}",
            "Write the value of the argument, such as 3, or a tensor as a list, such as [[1, 2], [3, 4]].",
        )
    return cast("bool | int | float | str | list[Any]", _finite(value))


def _check_rows(rows: list[Any]) -> tuple[int, ...]:
    """Returns the shape of nested lists, which must be rectangular."""
    for row in rows:
        if not isinstance(row, bool | int | float | list):
            raise InvalidValueError(
                f"expected a list of numbers or of true and false, found {show_value(row)} in it",
                "Write numbers only, or true and false only.",
            )
    sizes = [_check_rows(row) if isinstance(row, list) else () for row in rows]
    if any(size != sizes[0] for size in sizes):
        raise InvalidValueError("the lists inside a list differ in length", "Give all rows of a tensor one length.")
    return (len(rows), *(sizes[0] if sizes else ()))


def _finite(value: Any) -> Any:
    """Rejects infinite numbers: the manifest stores all values as JSON, which has none."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(inner)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValueError(f"expected a finite number, found {value}", "Write a number other than inf and nan.")
    return value


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
    arguments: dict[str, Annotated[Any, AfterValidator(_finite)]] = {}

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


class TensorConfig(Table):
    """``[inputs.tensors.NAME]``: an input of random numbers, the same in every run.

    Attributes:
        shape: Sizes, and names of dimensions, as ``["batch", 3, 224, 224]``.
        dtype: The dtype of the tensor.
        low: The smallest value.
        high: The upper bound of the values, exclusive.
    """

    shape: list[Annotated[int | str, PlainValidator(_size, json_schema_input_type=int | str)]]
    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"] = "float32"
    low: float | None = Field(default=None, allow_inf_nan=False, ge=-(2.0**62), le=2.0**62)
    high: float | None = Field(default=None, allow_inf_nan=False, ge=-(2.0**62), le=2.0**62)

    @model_validator(mode="after")
    def _check_order(self) -> TensorConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise InvalidValueError(
                f"expected a high above low, found low = {self.low:g} and high = {self.high:g}",
                "Write a smaller low, or a larger high.",
            )
        return self


def _dimensions(names: Any) -> list[str]:
    """Returns the names of one dimension or several as a list."""
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidValueError(
            f"expected the name of a dimension, found {show_value(names)}",
            'Write its name in quotes, such as "sequence".',
        )
    return [dimension_name(name) for name in names]


class ValuesConfig(Table):
    """``[inputs.values]``: the values of an input of whole numbers, as ``lengths = { indexes = "time" }``.

    Attributes:
        indexes: The dimension, or the dimensions, that the values are positions or lengths in. They are scaled with its
            size wherever the checks try another size.
    """

    indexes: Annotated[list[str], PlainValidator(_dimensions, json_schema_input_type=str | list[str])]


_Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class RangeConfig(Table):
    """The sizes of a dynamic dimension.

    Attributes:
        min: The smallest size.
        max: The largest size.
        multiple_of: Every size is a multiple of this number.
    """

    min: _Size = 1
    max: _Size
    multiple_of: _Size = 1

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest multiple in the range."""
        return -(-self.min // self.multiple_of) * self.multiple_of, self.max // self.multiple_of * self.multiple_of

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        return [self.min, self.max] if self.model_fields_set == {"min", "max"} else handler(self)


def _as_range(value: Any) -> Any:
    if isinstance(value, dict | RangeConfig):
        return value
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidValueError(
            f"expected the smallest and the largest size, found {show_value(value)}",
            "Write two sizes, such as [1, 64], or a table, such as { min = 64, max = 1024, multiple_of = 8 }.",
        )
    return dict(zip(("min", "max"), value, strict=True))


_Range = Annotated[
    RangeConfig,
    BeforeValidator(
        _as_range,
        json_schema_input_type=Annotated[list[_Size], Field(min_length=2, max_length=2)] | RangeConfig,
    ),
]


_Constant = Annotated[
    bool | int | float | str | list[Any],
    PlainValidator(_constant, json_schema_input_type=bool | int | float | str | list[Any]),
]


class InputsConfig(Table):
    """``[inputs]``: inputs for traces and checks; at most one of texts, images, data, tensors.

    Attributes:
        texts: Sentences, for the model's tokenizer.
        images: Image files, for the model's image processor; needs the extra ``images``.
        data: A ``.jsonl``, ``.npz`` or ``.safetensors`` file with the inputs by name.
        tensors: Random tensors, by the name of the input.
        constants: Arguments that are the same in every call, and not inputs of the files; lists are tensors.
        max_length: The most tokens of a text; longer texts are cut.
        axes: Names of an input's axes, instead of the usual names.
        values: Inputs of whole numbers that index an axis, such as lengths. By default, they are found by trying.
        dynamic: The smallest and the largest size of each dynamic dimension, as ``batch = [1, 64]`` or
            ``height = { min = 64, max = 1024, multiple_of = 8 }``. All others are fixed. By default, the model decides.
    """

    texts: list[str] | None = Field(default=None, min_length=1)
    images: list[str] | None = Field(default=None, min_length=1)
    data: str | None = None
    tensors: dict[str, TensorConfig] | None = Field(default=None, min_length=1)
    constants: dict[str, _Constant] = {}
    max_length: int | None = Field(default=None, ge=1)
    axes: dict[str, list[Annotated[str, AfterValidator(dimension_name)]]] = {}
    values: dict[str, ValuesConfig] = {}
    dynamic: dict[str, _Range] | None = None

    @model_validator(mode="after")
    def _check_kinds(self) -> InputsConfig:
        kinds = [name for name in ("texts", "images", "data", "tensors") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise InvalidValueError(f"{' and '.join(kinds)} exclude each other", "Keep one of them.")
        for name, sizes in (self.dynamic or {}).items():
            dimension_name(name)
            if sizes.min > sizes.max:
                raise InvalidValueError(
                    f"dynamic.{name}: the smallest size {sizes.min} is above the largest size {sizes.max}",
                    f"Write {name} = [{sizes.max}, {sizes.min}].",
                )
            if sizes.ends[0] > sizes.ends[1]:
                raise InvalidValueError(
                    f"dynamic.{name}: no multiple of {sizes.multiple_of} is in the range {sizes.min} to {sizes.max}",
                    f"Write a max of at least {sizes.ends[0]}.",
                )
        return self


class TransformationConfig(BaseModel):
    """``[[transformations]]``: a rule or a plugin; other keys are its options.

    Attributes:
        use: A rule of ``optexport transformations``, or ``python:module:Class``.
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
        _finite(self.options)
        return self


class ParityConfig(Table):
    """``[parity]``: the tolerance. It is measured if ``atol`` and ``rtol`` are not set.

    Attributes:
        noise_multiple: The tolerance as a multiple of the original's noise floor.
        atol: Replaces ``noise_multiple``: ``abs(result - original)`` may be at most ``atol + rtol * abs(original)``.
        rtol: The relative part of the same tolerance.
        effort: How much is checked.
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
        formats: The formats to export.
        output: The folder of the bundle.
        opset: The ONNX opset; by default the exporter's default. The exporter writes older opsets incorrectly, and ONNX
            Runtime does not read newer ones.
        passes: Format passes by format, as ``{ onnx = ["sum-residuals"] }``; ``optexport passes`` lists them.
        layout: The layout of the files in the bundle; by default next to the manifest.
        allow_fixed_shape: Whether a TorchScript file may accept only the traced sizes although axes are declared as
            dynamic. By default, this is an error.
    """

    formats: Annotated[list[Format], Field(min_length=1), AfterValidator(_without_duplicates)] = list(FORMATS)
    output: Annotated[str, Field(min_length=1), AfterValidator(_folder)] = "build/model"
    opset: int | None = Field(default=None, ge=18, le=26)
    passes: dict[Format, list[str]] = {}
    layout: Layout | None = None
    allow_fixed_shape: bool = False

    @model_validator(mode="after")
    def _check_passes(self) -> ExportConfig:
        for file_format, names in self.passes.items():
            passes = format_passes.list_passes(file_format)
            for name in names:
                if name not in passes:
                    raise InvalidValueError(
                        f'passes.{file_format}: unknown format pass "{name}"', did_you_mean(name, passes)
                    )
        needed = format_passes.ATTENTION_OPSET
        if self.opset is not None and self.opset < needed and "attention" in self.passes.get("onnx", ()):
            raise InvalidValueError(
                f'passes.onnx: the pass "attention" needs opset {needed}, found {self.opset}',
                f'Write opset = {needed}, or remove "attention".',
            )
        return self


class PrecisionConfig(Table):
    """``[precision]``: computes files in lower precision; needs gates in ``[parity.metrics]``.

    Attributes:
        onnx: Precision of the layers of the ONNX file.
        torchscript: Precision of the TorchScript file.
        pt2: Precision of the ``.pt2`` file.
        keep_float32: Layers, or modules with all layers in them, that always stay in float32.
    """

    onnx: Literal["int8", "int8-blocks", "int8-static"] | None = None
    torchscript: Half | None = None
    pt2: Half | None = None
    keep_float32: list[Annotated[str, Field(min_length=1)]] = []

    def of(self, file_format: str) -> str | None:
        """Returns the precision of a format's file; None if it is the model's precision."""
        precision: str | None = getattr(self, file_format)
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
        uri: The tracking URI of MLflow; a relative path starts at the config.
        experiment: The name of the experiment.
    """

    enabled: bool = True
    uri: Annotated[str, AfterValidator(check_uri)] = Field(default="sqlite:///mlflow.db", min_length=1)
    experiment: str = Field(default="optexport", min_length=1, max_length=500)


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
        """Returns the transformations to apply: the configured ones, or the preset."""
        if self.transformations is None:
            return [TransformationConfig(use=name) for name in registry.PRESET]
        return list(self.transformations)

    def output_path(self, folder: Path) -> Path:
        """Returns the bundle's folder, for a config file in ``folder``."""
        return (folder / Path(self.export.output).expanduser()).resolve()
