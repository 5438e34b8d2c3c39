"""What a bundle says of itself: a versioned document with a published JSON schema.

Only relative paths stand in it, and nothing that differs between two equal runs; times and hosts are in
``measurements.json``. Neither this module nor what it imports needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from optexport.runtime.devices import Device

VERSION: Literal[1] = 1
SCHEMA = Path(__file__).with_name("schemas") / "manifest.schema.json"


# Sizes and counts: what 64 bits hold, so that whoever computes with them gets no overflow.
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
# The distance from 1 to the next number.
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
# What the files of each format are called.
SUFFIXES = {"torchscript": ".pt", "onnx": ".onnx", "pt2": ".pt2"}
# How far two values are apart.
Distance = Annotated[float, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(_Record):
    """Where the model came from. ``weights_sha256`` is over names, dtypes, shapes and bytes of its state_dict."""

    source: str
    revision: str | None
    class_name: str
    weights_sha256: str


class DimRecord(_Record):
    """The sizes that a dynamic dimension may take; no upper end where ``max`` is null."""

    min: Count
    max: Count | None


class TensorRecord(_Record):
    """An input or output. A shape holds sizes, and expressions of dynamic dimensions."""

    name: str
    dtype: str
    shape: list[Count | str]


class ChangeRecord(_Record):
    """The nodes that stand in the graph now, what they call, and the nodes that they replaced."""

    nodes: list[str]
    target: str
    replaced: list[str]


class NearMissRecord(_Record):
    """A node that a rule nearly matched, and why it was left alone."""

    node: str
    reason: str


class TransformationRecord(_Record):
    """One transformation, as it was applied to the graph of some formats; none are named where there is one graph."""

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


class CaseRecord(_Record):
    """How one output compares at one case, with why it fails if it does. No limit is null where only NaN, shape and
    dtype are checked, no distance where none could be measured."""

    case: str
    distance: Distance | None
    limit: float | None
    failure: str | None


class OutputRecord(_Record):
    """How near one output is, at one place; distances are from float64 unless atol or rtol was set.

    ``multiple`` is the distance as a multiple of the floor, null where the floor is zero; ``step`` the distance from
    the place that it was made from; ``tolerance`` the absolute tolerance against the original itself that would just
    have passed. Null stands for a distance that could not be measured.
    """

    output: str
    max_abs: Distance | None
    max_rel: Distance | None
    cosine: float
    multiple: Distance | None
    step: Distance | None
    argmax_agreement: float
    tolerance: Distance | None
    worst_case: str
    cases: list[CaseRecord]


class GateRecord(_Record):
    """What the config demands of decisions: the least value of a measure on an output, null where a metric gets all.

    ``slack`` is how far rounding alone may move a value: what it can change is forgiven. ``cases`` are those that
    count; ``real`` says whether they are the user's data.
    """

    measure: str
    output: str | None
    min: float
    k: int = Field(ge=1, le=2**63 - 1)
    classes: bool
    slack: float
    cases: list[str]
    real: bool


class CaseDecisionRecord(_Record):
    """What a measure gives at one case: the sum of its values, the smallest, null of none, and how many there are."""

    case: str
    total: float
    smallest: float | None
    count: Count


class DecisionRecord(_Record):
    """One measure at one place: the value that its gate is on, the mean of what was counted, and its 95 % interval.

    Null stands for the value of nothing, and for the interval where there is none.
    """

    measure: str
    output: str | None
    value: float | None
    mean: float | None
    low: float | None
    high: float | None
    count: Count
    ties: Count
    min: float
    failure: str | None
    cases: list[CaseDecisionRecord]


class TargetRecord(_Record):
    """Parity at one place: the original, the transformed graph, or a file in its runtime.

    ``precision`` is what it was lowered to: then the gates on decisions stand in for limits on distances.
    """

    target: str
    made_from: str
    outputs: list[OutputRecord]
    decisions: list[DecisionRecord]
    precision: str | None = None

    @property
    def title(self) -> str:
        """The place, and its precision where that is not the original's."""
        return self.target if self.precision is None else f"{self.target} ({self.precision})"


class ToleranceRecord(_Record):
    """The noise floor of an output, and how far from the reference it may be.

    ``extremes`` holds the limits of extreme cases, null where only NaN, shape and dtype are checked. ``largest`` is the
    largest magnitude of the original's finite values in the other cases; null of a bundle that does not tell.
    """

    floor: float
    limit: float
    atol: float | None
    rtol: float | None
    extremes: dict[str, float | None]
    largest: float | None = None

    @property
    def fixed(self) -> bool:
        """Whether a tolerance is given, and distances are from the original in its own precision."""
        return self.atol is not None or self.rtol is not None


class ParityRecord(_Record):
    """The proof: the one document that every report is made from.

    ``ways`` says how else the original was run for its floor; ``fallback`` why float64 could not be had, where not.

    ``unguided`` names outputs and cases that are compared with the original itself, float64 being no guide there, and
    ``left_out`` cases that were not checked, with the reason, or how much of the data was. ``extreme_cases`` are those
    of values unlike data, on which no gate counts.
    """

    cases: list[str]
    bounds: dict[str, ToleranceRecord]
    ways: list[str]
    fallback: str | None
    unguided: list[str]
    left_out: list[str]
    gates: list[GateRecord]
    targets: list[TargetRecord]
    extreme_cases: list[str] = []

    @property
    def compared_with(self) -> str:
        """What distances are from, in words: float64, but of outputs that a tolerance is given for."""
        fixed = [name for name, bound in self.bounds.items() if bound.fixed]
        if self.fallback is not None or len(fixed) == len(self.bounds):
            return "the original in its own precision"
        return ", ".join(["the original in float64", *fixed]) + (" in its own precision" if fixed else "")


class GateValueRecord(_Record):
    """What a gate is on, and the least value that passes; null where it could not be measured."""

    measure: str
    output: str | None
    value: float | None
    min: float


class LayerRecord(_Record):
    """A layer that can be lowered, or a module with all such layers in it.

    ``kept`` says why it stayed in float32, null where it was lowered; ``alone`` what the gates are on when nothing
    else is lowered, empty where that was not measured.
    """

    layer: str
    kept: Literal["asked for", "measured"] | None
    alone: list[GateValueRecord]


class PrecisionRecord(_Record):
    """To what a file was lowered, and what of it.

    ``lowered`` is what the gates are on with all layers lowered that the config does not keep, ``chosen`` with the
    layers that were. Both, and those of single layers, are of the cases that the gates count, in the graph or with ONNX
    Runtime's optimisations; what the file itself gives stands in the parity of its places.
    """

    precision: Literal["int8", "int8-blocks", "int8-static", "bfloat16", "float16"]
    layers: list[LayerRecord]
    lowered: list[GateValueRecord]
    chosen: list[GateValueRecord]

    @property
    def but_asked_for(self) -> str:
        """What stands between "all" and "lowered" of what ``lowered`` is of."""
        return "but those asked for " if any(layer.kept == "asked for" for layer in self.layers) else ""


class ArtifactRecord(_Record):
    """One exported model, and the passes that were applied to its file, whether or not they found work.

    ``fixed_shape`` says why it works at the traced shape only, where it does. ``precision`` is null where the file is
    of the model's own. ``device`` is the one that it was made for, and proven on.
    """

    format: Literal["torchscript", "onnx", "pt2"]
    path: str
    device: Device = "cpu"
    fixed_shape: str | None
    passes: list[str] = []
    precision: PrecisionRecord | None = None

    @model_validator(mode="after")
    def _opened_as_what_it_is(self) -> ArtifactRecord:
        """By its name alone others open a file, and would not check it as what it is for them."""
        if not self.path.endswith(SUFFIXES[self.format]):
            raise ValueError(f"a file of {self.format} is not called {PurePosixPath(self.path).name!r}")
        return self


class ApplicationRecord(_Record):
    """What a person uses the model for, and what lies in ``preprocessor/`` that turns texts or images into its inputs.

    ``outputs`` says what the files give of classes: logits; probabilities of all in their place, or labels of the
    likeliest, as indices, with their probabilities. ``scores`` then says what made these.

    ``task`` is named as the hub names its pipelines; null where nothing tells. ``labels`` are those of the classes, in
    the order of the logits; ``scores`` says what makes scores of these, null where they are the result themselves.
    ``prompt`` stands before every text. ``missing`` says why a tokenizer or processor that the source has is not here.
    """

    task: str | None
    labels: list[str] | None
    scores: Literal["softmax", "sigmoid"] | None
    preprocessors: list[Literal["tokenizer", "image_processor", "feature_extractor"]]
    prompt: str
    missing: list[str]
    outputs: Literal["logits", "probabilities", "labels"] = "logits"


class FileRecord(_Record):
    """One file of the bundle."""

    path: str
    size: Count
    sha256: str


class Manifest(_Record):
    """The whole document; ``digest`` is the SHA-256 of the document without it.

    ``constants`` are the arguments that the files do not take, with what they were when the model was traced.

    ``nodes_after`` is that of the first artifact's graph. ``application`` is null in bundles that do not tell.

    ``undone`` names the last transformations, which were undone on a copy and gave back the graph before them, to the
    bit: the trace itself where they are all that changed it.
    """

    manifest_version: Literal[1] = VERSION
    optexport_version: str
    config: dict[str, Any]
    versions: dict[str, str]
    model: ModelRecord
    inputs: list[TensorRecord]
    constants: dict[str, bool | int | float | str | list[Any]] = {}
    outputs: list[TensorRecord]
    dims: dict[str, DimRecord]
    fixed_axes: list[str]
    nodes_before: Count
    nodes_after: Count
    transformations: list[TransformationRecord]
    undone: list[str]
    parity: ParityRecord
    reference_cases: list[str]
    artifacts: list[ArtifactRecord]
    application: ApplicationRecord | None = None
    files: list[FileRecord]
    digest: str | None = None

    @field_validator("artifacts")
    @classmethod
    def _one_of_a_format(cls, artifacts: list[ArtifactRecord]) -> list[ArtifactRecord]:
        """Of two, one would be checked and another used."""
        if len({artifact.format for artifact in artifacts}) < len(artifacts):
            raise ValueError("two files are of one format")
        return artifacts

    @model_validator(mode="after")
    def _tells_of_every_dimension(self) -> Manifest:
        sizes = [size for spec in self.inputs for size in spec.shape if isinstance(size, str)]
        if unknown := {name for size in sizes for name in size.split(" + ")} - self.dims.keys():
            raise ValueError(f"dims lacks {', '.join(sorted(unknown))}")
        return self

    @property
    def few_digits(self) -> list[str]:
        """Of each output whose floor leaves fewer than half the digits of its dtype, how far away float64 is."""
        found = []
        for output in self.outputs:
            bound, epsilon = self.parity.bounds[output.name], _EPSILONS.get(output.dtype)
            if epsilon and bound.largest and not bound.fixed and bound.floor > epsilon**0.5 * bound.largest:
                found.append(f"{output.name} by {bound.floor:.2g}, of {bound.largest:.2g} at the most")
        return found

    @property
    def only_zeros(self) -> list[str]:
        """The outputs of floating point that were nothing but zeros, or empty, on all ordinary batches."""
        bounds = self.parity.bounds
        return [
            output.name for output in self.outputs if output.dtype in _EPSILONS and bounds[output.name].largest == 0
        ]

    @property
    def ungated(self) -> list[str]:
        """The outputs of which nothing is demanded where a file is of lower precision: no gate, and no tolerance."""
        gated, bounds = {gate.output for gate in self.parity.gates}, self.parity.bounds
        real = [output.name for output in self.outputs if "float" in output.dtype]
        free = [name for name in real if not bounds[name].fixed]
        return [] if None in gated else [name for name in free if name not in gated]


def json_schema() -> dict[str, Any]:
    """The document's JSON schema, as it is published in the package."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
