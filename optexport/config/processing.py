"""The table ``[processing]``: pre- and postprocessing that becomes part of the files."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_K = 5

# The name of the input for images.
IMAGES: Final = "pixel_values"

# The names of the outputs that replace the logits.
PROBABILITIES: Final = "probabilities"
LABELS: Final = "labels"
# Probabilities of all classes, or the most likely classes with their probabilities.
ProcessedOutputs = Literal["probabilities", "softmax", "sigmoid", "argmax", "top_k"]
OF_LABELS = ("argmax", "top_k")


class ProcessingConfig(BaseModel):
    """``[processing]``: adds pre- and postprocessing to the files.

    Attributes:
        normalize: Whether the files take images as integers from 0 to 255.
        outputs: What the files return instead of logits.
        k: How many labels ``outputs = "top_k"`` returns; by default 5.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    normalize: bool = False
    outputs: ProcessedOutputs | None = None
    k: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _k_of_top_k(self) -> ProcessingConfig:
        if self.k is not None and self.outputs != "top_k":
            raise ValueError('k is how many labels outputs = "top_k" gives')
        return self
