"""The manifest: a versioned document that describes a bundle, with a JSON schema.

It contains relative paths only and nothing that differs between equal runs. Times and hosts are in
``measurements.json``. This module and its imports need no torch.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from optexport._utils.size_ranges import describe_range
from optexport.bundle.node_error_records import NodeErrorsRecord
from optexport.bundle.parity_records import Count, ParityRecord
from optexport.exporters import registry
from optexport.runtime.devices import Device

VERSION: Literal[2] = 2
SCHEMA = Path(__file__).with_name("schemas") / "manifest.schema.json"
# Machine epsilon: the distance from 1 to the next larger number.
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(_Record):
    """Origin of the model.

    Attributes:
        source: The source in the config.
        revision: The revision of the source; null if it has none.
        class_name: The class of the model, with its module.
        weights_sha256: The SHA-256 of names, dtypes, shapes and bytes in the state_dict.
    """

    source: str
    revision: str | None
    class_name: str
    weights_sha256: str


class DimRecord(_Record):
    """Sizes that a dynamic dimension may take; ``max`` is null without an upper limit."""

    min: Count
    max: Count | None
    multiple_of: Annotated[int, Field(ge=1)] = 1

    def describe(self) -> str:
        """Returns the allowed sizes in words."""
        return describe_range(self.min, self.max, self.multiple_of)


class TensorRecord(_Record):
    """An input or output. The shape contains sizes and expressions of dynamic dimensions."""

    name: str
    dtype: str
    shape: list[Count | str]

    def describe(self) -> str:
        """Returns name, shape and dtype, such as ``x [batch, 4] float32``."""
        return f"{self.name} [{', '.join(map(str, self.shape))}] {self.dtype}"


class ValuesRecord(_Record):
    """Values of an input that index dynamic dimensions, from `low` to the smallest size plus `high`.

    Attributes:
        indexes: The names of the dimensions.
        low: 0 for positions, 1 for lengths.
        high: -1 for positions, 0 for lengths and for the ends of segments.
        adds_up: True for lengths of parts that add up to the size.
    """

    indexes: list[str]
    low: int
    high: int
    adds_up: bool = False


class ChangeRecord(_Record):
    """A change of the graph by a rule.

    Attributes:
        nodes: The new nodes.
        target: The target that the new nodes call.
        replaced: The nodes that they replaced.
    """

    nodes: list[str]
    target: str
    replaced: list[str]


class NearMissRecord(_Record):
    """A skip: a node that a rule almost matched, with the reason."""

    node: str
    reason: str


class TransformationRecord(_Record):
    """A transformation that was applied to the graph of a variant.

    Attributes:
        formats: The formats of the variant; empty if all formats share one graph.
        rule: The name of the transformation.
        options: Its options.
        signature: The signature of the transformation.
        preserves_computation: True if the transformation preserves the computation.
        reversible: True if the transformation can be undone.
        nodes_before: The number of nodes before the transformation.
        nodes_after: The number of nodes after the transformation.
        changes: The changes of the graph.
        near_misses: The skips.
    """

    formats: list[str] = []
    rule: str
    options: dict[str, Any]
    signature: str
    preserves_computation: bool
    reversible: bool
    nodes_before: Count
    nodes_after: Count
    changes: list[ChangeRecord]
    near_misses: list[NearMissRecord]


class GateValueRecord(_Record):
    """Value and minimum of a gate; the value is null if it could not be measured."""

    measure: str
    output: str | None
    value: float | None
    min: float


class LayerRecord(_Record):
    """A layer that can have a lower precision, or a module with all such layers in it.

    Attributes:
        layer: The name of the layer or module.
        kept: The reason for keeping the layer in float32; null if it has the lower precision.
        alone: The gate values with only this layer in the lower precision; empty if not measured.
    """

    layer: str
    kept: Literal["asked for", "measured"] | None
    alone: list[GateValueRecord]


class PrecisionRecord(_Record):
    """The lower precision of a file.

    Gate values here are of the cases that gates count. They are measured in the graph or with ONNX Runtime's
    optimizations, or without if only that fails. Values of the file itself are in the parity of its targets.

    Attributes:
        precision: The precision.
        layers: The layers that can have this precision.
        lowered: The gate values with the lower precision in all layers that the config does not exclude.
        chosen: The gate values with the final selection of layers.
        float32_operators: The number of operators with weights that this precision never lowers, by ONNX operator.
    """

    precision: Literal["int8", "int8-rows", "int8-blocks", "int8-static", "int4-blocks", "bfloat16", "float16"]
    layers: list[LayerRecord]
    lowered: list[GateValueRecord]
    chosen: list[GateValueRecord]
    float32_operators: dict[str, int] = {}

    @property
    def float32_text(self) -> str:
        """Returns the operators that this precision never lowers, in words, or an empty text."""
        names = {"Conv": "convolution", "ConvTranspose": "transposed convolution"}
        texts = [
            f"{count} {names.get(operator, f'{operator} layer')}{'' if count == 1 else 's'}"
            for operator, count in self.float32_operators.items()
        ]
        if not texts:
            return ""
        hint = " (int8-static also lowers convolutions)" if "Conv" in self.float32_operators else ""
        lowered = "linear layers and convolutions" if self.precision == "int8-static" else "linear layers"
        return f"{self.precision} lowers {lowered}; in float32: {', '.join(texts)}{hint}"

    @property
    def exception_text(self) -> str:
        """Returns the exception, in words, to "all layers" of `lowered`, or an empty text."""
        return "except those in keep_float32 " if any(layer.kept == "asked for" for layer in self.layers) else ""


class ArtifactRecord(_Record):
    """An exported model file.

    Attributes:
        format: The format of the file.
        path: The path of the file in the bundle.
        device: The device that the file was exported for and checked on.
        fixed_shape: The reason if the file works at the traced shape only, or null.
        passes: The format passes of the file, including those that changed nothing.
        precision: The lower precision; null if the file has the model's own precision.
    """

    format: Annotated[str, Field(pattern="^[a-z][a-z0-9]*$")]
    path: str
    device: Device = "cpu"
    fixed_shape: str | None
    passes: list[str] = []
    precision: PrecisionRecord | None = None

    @model_validator(mode="after")
    def _check_suffix(self) -> ArtifactRecord:
        """Checks the suffix, because other programs select the format by it."""
        if not registry.is_format(self.format):
            raise ValueError(f"the format {self.format!r} is not installed here")
        name, suffix = PurePosixPath(self.path).name, registry.get_format(self.format).suffix
        if not name.endswith(suffix):
            raise ValueError(f"the name of a file of {self.format} must end with {suffix} (found {name!r})")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths in the bundle of all files that may belong to the model, such as one for its weights."""
        path = PurePosixPath(self.path)
        return tuple(str(path.with_name(name)) for name in registry.get_format(self.format).list_files(path.name))


class ApplicationRecord(_Record):
    """Task of the model and its preprocessing.

    Attributes:
        task: The task, named as in the hub's pipelines; null if unknown.
        labels: The labels of the classes, in the order of the logits.
        scores: The function that turns logits into scores; null if the outputs are the result themselves.
        preprocessors: The parts in ``preprocessor/`` that turn texts or images into inputs.
        prompt: The text that precedes every input text.
        missing: The reasons for each tokenizer or processor of the source that is not in the bundle.
        outputs: The form of the result. ``logits`` are unnormalized, ``probabilities`` cover all classes, and
            ``labels`` are indices of the likeliest classes with their probabilities. For the last two, ``scores`` names
            the function that the files apply.
    """

    task: str | None
    labels: list[str] | None
    scores: Literal["softmax", "sigmoid"] | None
    preprocessors: list[Literal["tokenizer", "image_processor", "feature_extractor"]]
    prompt: str
    missing: list[str]
    outputs: Literal["logits", "probabilities", "labels"] = "logits"


class FileRecord(_Record):
    """A file of the bundle.

    Attributes:
        path: The relative path.
        size: The size in bytes.
        sha256: The SHA-256 in hexadecimal.
    """

    path: str
    size: Count
    sha256: str


class Manifest(_Record):
    """The whole manifest.

    Attributes:
        manifest_version: The version of the schema.
        optexport_version: The version of optexport.
        config: The resolved config, without secrets and absolute paths.
        versions: The versions of Python and of packages.
        processor_flags: The flags of the processor that chose the default format passes, among those that matter.
        model: The origin of the model.
        inputs: The inputs.
        constants: The arguments that the files do not take, with their values in the trace.
        outputs: The outputs.
        dims: The dynamic dimensions.
        values: The inputs whose values fit the size of a dimension wherever the checks change it.
        fixed_axes: The axes of inputs that the model fixes to one size, although the config does not.
        skipped_checks: The lines of the model that check values and raise; the files compute on instead.
        branches: The lines of the model that branch on values; the files compute both ways and choose.
        is_strict_trace: True if the trace used ``torch.export(strict=True)``, because the default trace failed or
            fixed more axes.
        nodes_before: The number of nodes after the trace.
        nodes_after: The number of nodes in the graph of the first artifact.
        transformations: The transformations.
        undone: The last transformations that were undone on a copy, which restored the graph before them bit by bit.
            That graph is the trace itself if they made all changes.
        parity: The result of the parity check.
        node_errors: The error of each node along the graphs; null in older bundles.
        reference_cases: The cases in ``reference.safetensors``.
        artifacts: The exported files.
        application: The task of the model; null in older bundles.
        files: The files of the bundle with their digests.
        digest: The SHA-256 of the document without this field.
    """

    manifest_version: Literal[2] = VERSION
    optexport_version: str
    config: dict[str, Any]
    versions: dict[str, str]
    processor_flags: list[str] = []
    model: ModelRecord
    inputs: list[TensorRecord]
    constants: dict[str, bool | int | float | str | list[Any]] = {}
    outputs: list[TensorRecord]
    dims: dict[str, DimRecord]
    values: dict[str, ValuesRecord] = {}
    fixed_axes: list[str]
    skipped_checks: list[str] = []
    branches: list[str] = []
    is_strict_trace: bool = False
    nodes_before: Count
    nodes_after: Count
    transformations: list[TransformationRecord]
    undone: list[str]
    parity: ParityRecord
    node_errors: NodeErrorsRecord | None = None
    reference_cases: list[str]
    artifacts: list[ArtifactRecord]
    application: ApplicationRecord | None = None
    files: list[FileRecord]
    digest: str | None = None

    @field_validator("artifacts")
    @classmethod
    def _check_formats(cls, artifacts: list[ArtifactRecord]) -> list[ArtifactRecord]:
        """Checks that formats are unique, because a second file could be used without a check."""
        if len({artifact.format for artifact in artifacts}) < len(artifacts):
            raise ValueError("two artifacts have the same format")
        return artifacts

    @model_validator(mode="after")
    def _check_dimensions(self) -> Manifest:
        sizes = [size for spec in self.inputs for size in spec.shape if isinstance(size, str)]
        if unknown := {name for size in sizes for name in size.split(" + ")} - self.dims.keys():
            raise ValueError(f"dims lacks the dimensions {', '.join(sorted(unknown))}")
        return self

    def size_of(self, artifact: ArtifactRecord) -> int:
        """Returns the bytes of a model, with all of its files."""
        return sum(file.size for file in self.files if file.path in artifact.paths)

    @property
    def few_digits(self) -> list[str]:
        """Returns the outputs whose noise floor leaves fewer than half the digits of their dtype.

        Each entry contains the noise floor and the largest value.
        """
        descriptions = []
        for output in self.outputs:
            bound, epsilon = self.parity.bounds[output.name], _EPSILONS.get(output.dtype)
            if epsilon and bound.largest and not bound.fixed and bound.floor > epsilon**0.5 * bound.largest:
                descriptions.append(f"{output.name} (noise floor {bound.floor:.2g}, largest value {bound.largest:.2g})")
        return descriptions

    @property
    def only_zeros(self) -> list[str]:
        """Returns the floating-point outputs that were zero or empty in all ordinary cases."""
        bounds = self.parity.bounds
        return [
            output.name for output in self.outputs if output.dtype in _EPSILONS and bounds[output.name].largest == 0
        ]

    @property
    def ungated(self) -> list[str]:
        """Returns the float outputs without a gate or a tolerance, for files of lower precision."""
        gated, bounds = {gate.output for gate in self.parity.gates}, self.parity.bounds
        floats = [output.name for output in self.outputs if "float" in output.dtype]
        measured = [name for name in floats if not bounds[name].fixed]
        return [] if None in gated else [name for name in measured if name not in gated]


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of the manifest, as published in the package."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
