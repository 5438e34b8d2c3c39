"""``[generation]``: that a generative model is exported with its key/value cache, and what does not go with that."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GenerationConfig(BaseModel):
    """``[generation]``: for how many tokens the files must go on as the model does.

    Attributes:
        new_tokens: How many tokens are compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    new_tokens: int = Field(default=64, ge=1, lt=2**20)
