"""``[processing]``: pre- and post-processing that becomes part of the files, and what does not go with that."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_K = 5

# The input that holds images.
IMAGES: Final = "pixel_values"

# The outputs that stand in place of the logits.
PROBABILITIES: Final = "probabilities"
LABELS: Final = "labels"
# What stands for the logits: probabilities of all classes, or the likeliest classes with theirs.
ProcessedOutputs = Literal["probabilities", "softmax", "sigmoid", "argmax", "top_k"]
OF_LABELS = ("argmax", "top_k")


class ProcessingConfig(BaseModel):
    """``[processing]``: what the files do besides what the model does.

    Attributes:
        normalize: Whether they take images as whole numbers from 0 to 255.
        outputs: What they give in place of logits.
        k: How many labels with ``outputs = "top_k"``; by default 5.
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
