"""The table ``[register]``: the registered model in MLflow, and when its alias moves."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from optexport.config.validation import InvalidValueError, Table, show_value

DEFAULT_ALIAS = "champion"
# The alias is part of the names of tags, which MLflow limits to 250 characters.
_MAX_ALIAS_LENGTH = 200


def model_name(name: str) -> str:
    """Returns the name of a registered model unchanged, if MLflow can store and find it.

    Raises:
        InvalidValueError: MLflow rejects the name, or cannot find it again.
    """
    # MLflow cannot find a name with " or \ again. In models:/NAME@alias it reads a ? as the start of a query, and drops
    # line breaks. It rejects names of dots alone, and PostgreSQL rejects a NUL.
    if not name.strip() or not name.strip(".") or re.search(r'[/:"\\?\x00-\x1f\x7f-\x9f]', name):
        raise InvalidValueError(
            f"{show_value(name)} is not a valid name of a registered model",
            'Write a name without / : " \\ ? and control characters, which does not consist of dots alone.',
        )
    return name


def alias_name(alias: str) -> str:
    """Returns an alias unchanged, if MLflow accepts it.

    Raises:
        InvalidValueError: MLflow rejects the alias.
    """
    if len(alias) > _MAX_ALIAS_LENGTH:
        raise InvalidValueError(
            f"expected an alias of at most {_MAX_ALIAS_LENGTH} characters, found {len(alias)}", "Write a shorter alias."
        )
    if not re.fullmatch(r"[\w\-]+", alias) or re.fullmatch(r"(?i)latest|v\d+", alias):
        raise InvalidValueError(
            f"{show_value(alias)} is not a valid alias",
            'Write letters, digits, "_" and "-", but neither "latest" nor a version such as "v1".',
        )
    return alias


class MaxRegressionConfig(Table):
    """``[register.max_regression]``: how much worse than the champion a new version may be.

    All values are fractions of the champion's.

    Attributes:
        parity: For the distance from the original, in multiples of the noise floor. Distances below one noise floor are
            equal.
        latency: For the p50 latency, in addition to the two confidence intervals.
        size: For the bytes of a file.
    """

    parity: float = Field(default=0.25, ge=0)
    latency: float = Field(default=0.05, ge=0)
    size: float = Field(default=0.01, ge=0)


class RegisterConfig(Table):
    """``[register]``: registers the ONNX file as a version of a model, and may move an alias.

    Attributes:
        name: The name of the registered model.
        alias: An alias that moves to the new version if that is as good as the current one.
        max_regression: How much worse than the champion a new version may be, as a fraction.
    """

    name: Annotated[str, Field(max_length=256), AfterValidator(model_name)]
    alias: Annotated[str, AfterValidator(alias_name)] = DEFAULT_ALIAS
    max_regression: MaxRegressionConfig = MaxRegressionConfig()
