"""``[precision]``: which files are computed in fewer bits than the model, on the condition that its decisions stay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Half = Literal["bfloat16", "float16"]


class PrecisionConfig(BaseModel):
    """``[precision]``: the precision of files that are to be smaller or faster than proven to rounding.

    Attributes:
        onnx: What the layers of the ONNX file are computed in.
        torchscript: What those of the TorchScript file are.
        pt2: What those of the ``.pt2`` file are.
        keep_float32: Layers, or modules with all layers in them, that stay in float32 whatever is measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    onnx: Literal["int8", "int8-blocks", "int8-static"] | None = None
    torchscript: Half | None = None
    pt2: Half | None = None
    keep_float32: list[Annotated[str, Field(min_length=1)]] = []

    def of(self, file_format: str) -> str | None:
        """The precision of a format's file; None where it is the model's own."""
        own: str | None = getattr(self, file_format)
        return own
