"""The table ``[precision]``: files in lower precision, checked by metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Half = Literal["bfloat16", "float16"]


class PrecisionConfig(BaseModel):
    """``[precision]``: computes files in lower precision; needs gates in ``[parity.metrics]``.

    Attributes:
        onnx: Precision of the layers of the ONNX file.
        torchscript: Precision of the TorchScript file.
        pt2: Precision of the ``.pt2`` file.
        keep_float32: Layers, or modules with all layers in them, that always stay in float32.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    onnx: Literal["int8", "int8-blocks", "int8-static"] | None = None
    torchscript: Half | None = None
    pt2: Half | None = None
    keep_float32: list[Annotated[str, Field(min_length=1)]] = []

    def of(self, file_format: str) -> str | None:
        """Returns the precision of a format's file; None if it is the model's precision."""
        own: str | None = getattr(self, file_format)
        return own
