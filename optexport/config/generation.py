"""``[generation]``: that a generative model is exported with its key/value cache, and what does not go with that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from optexport.errors import ConfigError

if TYPE_CHECKING:
    from optexport.config.load import Config


class GenerationConfig(BaseModel):
    """``[generation]``: for how many tokens the files must go on as the model does.

    Attributes:
        new_tokens: How many tokens are compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    new_tokens: int = Field(default=64, ge=1, lt=2**20)


def check_generation(config: Config, place: str) -> None:
    """Checks that nothing is asked for that is not done with the parts of a generative model.

    Raises:
        ConfigError: Something is.
    """
    if config.generation is None:
        return
    inputs = config.inputs
    asked = {
        "processing": config.processing is not None,
        "bench": config.bench.enabled,
        "tune": config.tune is not None,
        "gate": config.gate != type(config.gate)(),
        "precision": config.precision is not None,
        "register": config.registering is not None,
        "export.layout": config.export.layout is not None,
        "parity.decisions": config.parity.decisions is not None,
        "inputs.images": inputs.images is not None,
        "inputs.tensors": inputs.tensors is not None,
        "inputs.axes": bool(inputs.axes),
        "inputs.dynamic": inputs.dynamic is not None,
    }
    for key in [key for key, value in asked.items() if value]:
        raise ConfigError(
            "it does not go with [generation], which exports parts with inputs and sizes of their own",
            place=f"{place}: {key}",
            mend="Leave it out, or leave out [generation] to export one forward pass without a cache.",
        )
    if config.model.source.endswith(".pt2"):
        raise ConfigError(
            "a .pt2 file has no generate()",
            place=f"{place}: generation",
            mend="Give a model of transformers as model.source, or leave out [generation].",
        )
