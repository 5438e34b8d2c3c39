"""``[register]``: the name that the ONNX model gets in MLflow's registry, and when its alias moves to it."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

DEFAULT_ALIAS = "champion"
# It is a part of the names of tags, which MLflow lets be 250 characters long.
_LONGEST_ALIAS = 200


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def model_name(name: str) -> str:
    """A name of a registered model as it is; a ValueError where MLflow would not take it, or not find it again."""
    # By a name with " or \ MLflow finds nothing again, and of models:/NAME@alias it takes a ? and what follows for a
    # query, and leaves out ends of lines. One of dots alone it refuses, and PostgreSQL one that holds a NUL.
    if not name.strip() or not name.strip(".") or re.search(r'[/:"\\?\x00-\x1f\x7f-\x9f]', name):
        raise ValueError(
            f'{name!r} is no name of a registered model: it may hold none of / : " \\ ? and no control characters, '
            "and not be dots alone"
        )
    return name


def alias_name(alias: str) -> str:
    """An alias as it is; a ValueError where MLflow would not take it."""
    if len(alias) > _LONGEST_ALIAS:
        raise ValueError(f"it is {len(alias)} characters long, and may be {_LONGEST_ALIAS}")
    if not re.fullmatch(r"[\w\-]+", alias) or re.fullmatch(r"(?i)latest|v\d+", alias):
        raise ValueError(f'{alias!r} is no alias: write letters, digits, "_" and "-", but not "latest" or "v1"')
    return alias


class MaxRegressionConfig(_Table):
    """``[register.max_regression]``: by how much, as a part of the champion's figure, a new version may be worse.

    Attributes:
        parity: Of the distance from the original, as a multiple of the noise floor. One floor is as good as none.
        latency: Of the p50, beyond what the two intervals leave open.
        size: Of the bytes of a file.
    """

    parity: float = Field(default=0.25, ge=0)
    latency: float = Field(default=0.05, ge=0)
    size: float = Field(default=0.01, ge=0)


class RegisterConfig(_Table):
    """``[register]``: the registered model that gets the ONNX file as a version, and the alias that may move to it.

    Attributes:
        name: What the registered model is called.
        alias: Moves to the new version if that is as good as the one that holds it.
        max_regression: By how much, as a part of the champion's figure, a new version may be worse.
    """

    name: Annotated[str, Field(max_length=256), AfterValidator(model_name)]
    alias: Annotated[str, AfterValidator(alias_name)] = DEFAULT_ALIAS
    max_regression: MaxRegressionConfig = MaxRegressionConfig()
