"""The table ``[generation]``: exports a generative model with its key/value cache."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class GenerationConfig(BaseModel):
    """``[generation]``: compares the tokens that the files and the model generate.

    Attributes:
        new_tokens: How many generated tokens are compared.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    new_tokens: int = Field(default=64, ge=1, lt=2**20)
