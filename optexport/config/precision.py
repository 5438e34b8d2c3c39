"""``[precision]``: which files are computed in fewer bits than the model, on the condition that its decisions stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from optexport.config.metrics import MEASURES
from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.load import Config

Half = Literal["bfloat16", "float16"]


class PrecisionConfig(BaseModel):
    """``[precision]``: the precision of files that are to be smaller or faster than proven to rounding.

    Attributes:
        onnx: What the layers of the ONNX file are computed in.
        torchscript: What those of the TorchScript file are.
        pt2: What those of the ``.pt2`` file are.
        keep: Layers, or modules with all layers in them, that stay in float32 whatever is measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    onnx: Literal["int8", "int8-blocks", "int8-static"] | None = None
    torchscript: Half | None = None
    pt2: Half | None = None
    keep: list[Annotated[str, Field(min_length=1)]] = []

    def of(self, file_format: str) -> str | None:
        """The precision of a format's file; None where it is the model's own."""
        own: str | None = getattr(self, file_format)
        return own


def check_precision(config: Config, place: str) -> None:
    """Checks what the table says against the rest of the config.

    Raises:
        ConfigError: It lowers nothing, or a file that is not made, or nothing says what the file must keep to.
    """
    table = config.precision
    if table is None:
        return
    lowered = [name for name in ("onnx", "torchscript", "pt2") if table.of(name) is not None]
    if not lowered:
        raise ConfigError(
            "it lowers nothing", place=f"{place}: precision", mend='Say of a format what it is to be: onnx = "int8".'
        )
    for name in lowered:
        if name not in config.export.formats:
            raise ConfigError(
                f"no {name} file is exported",
                place=f"{place}: precision.{name}",
                mend=f"export.formats is {', '.join(config.export.formats)}.",
            )
    if config.parity.decisions is None:
        raise ConfigError(
            "a file of lower precision is not near enough to be proven to rounding, and nothing says what it must keep",
            place=f"{place}: precision.{lowered[0]}",
            mend="Set a gate in [parity.decisions], as cosine = 0.99.",
        )
    gates = config.parity.decisions.items()
    if all(name in MEASURES and gate.min <= MEASURES[name][0] for name, gate in gates):
        raise ConfigError(
            "a file of lower precision is held to gates alone, and these let anything pass",
            place=f"{place}: parity.decisions",
            mend="Demand more than the least that there is: " + ", ".join(f"{n} = {g.min:g}" for n, g in gates) + ".",
        )
    if config.model.dtype not in (None, "float32"):
        raise ConfigError(
            f"only a model in float32 can be lowered, and model.dtype is {config.model.dtype}",
            place=f"{place}: precision.{lowered[0]}",
        )
