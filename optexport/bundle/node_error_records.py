"""Records of the error of every node in the manifest."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from optexport.bundle.parity_records import Count, Distance


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeErrorRecord(_Record):
    """Errors of a node, or the largest errors of neighboring nodes.

    Attributes:
        position: The position of the node in the traced graph.
        node: The name of the node, the one with the largest error among neighboring nodes.
        module: The path of its module; empty if it belongs to the model itself.
        errors: The error of each target, relative to the largest value of the node. It is null if the target does not
            compute the value.
    """

    position: Count
    node: str
    module: str
    errors: list[Distance | None]


class NodeErrorsRecord(_Record):
    """Errors of all nodes against float64, on the traced batch.

    Attributes:
        targets: The names of the targets.
        points: The errors, in the order of execution. Large graphs have a point for several nodes.
        skipped: The reason if the errors were not measured, or null.
    """

    targets: list[str]
    points: list[NodeErrorRecord]
    skipped: str | None = None

    @model_validator(mode="after")
    def _check_errors(self) -> NodeErrorsRecord:
        if any(len(point.errors) != len(self.targets) for point in self.points):
            raise ValueError("a point of node_errors must have an error for each target")
        return self
