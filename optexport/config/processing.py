"""``[processing]``: pre- and post-processing that becomes part of the files, and what does not go with that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from optexport.config.metrics import MEASURES
from optexport.config.source import SourceKind, source_kind
from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.load import Config

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


def check_processing(config: Config, folder: Path, place: str) -> None:
    """Checks what the table says against the rest of the config.

    Args:
        folder: The config's, which paths are relative to.
        place: The config's name.

    Raises:
        ConfigError: The source is a program that is exported as it is, images would be no whole numbers, or a gate
            would be on labels.
    """
    table = config.processing
    if table is None:
        return
    if source_kind(config.model.source, folder) in (SourceKind.PT2, SourceKind.TORCHSCRIPT):
        for key in [key for key in ("normalize", "outputs") if getattr(table, key)]:
            raise ConfigError(
                "a .pt2 or TorchScript file is exported as it is",
                place=f"{place}: processing.{key}",
                mend="Give the model that it was made of as model.source, or leave it out.",
            )
    images = (config.inputs.tensors or {}).get(IMAGES)
    if table.normalize and images is not None and images.dtype != "uint8":
        raise ConfigError(
            f"it is {images.dtype}, and with processing.normalize the files take images as they are, in uint8",
            place=f"{place}: inputs.tensors.{IMAGES}",
            mend='Write dtype = "uint8", low = 0, high = 256.',
        )
    for measure, gate in (config.parity.decisions or {}).items():
        if table.outputs in OF_LABELS and measure in MEASURES and gate.output in (None, PROBABILITIES, LABELS):
            raise ConfigError(
                f'outputs = "{table.outputs}" leaves nothing that it could be measured on',
                place=f"{place}: parity.decisions.{measure}",
                mend='Write processing.outputs = "probabilities", or leave the gate out: labels must be equal anyway.',
            )
