"""The table ``[inputs]`` of a config."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from optexport._utils.size_ranges import round_up
from optexport.config.validation import InvalidValueError, Table, check_finite, dimension_name, show_value

LARGEST_SIZE = 2**31 - 1


def _size(size: Any) -> int | str:
    if isinstance(size, str):
        return dimension_name(size)
    if type(size) is not int or not 1 <= size <= LARGEST_SIZE:
        raise InvalidValueError(
            f"expected a size from 1 to {LARGEST_SIZE} or the name of a dimension, found {show_value(size)}",
            'Write a whole number, such as 16, or a name in quotes, such as "batch".',
        )
    return size


def _constant(value: Any) -> bool | int | float | str | list[Any]:
    """Checks a number, a text, or nested lists of numbers or booleans that become a tensor."""
    if isinstance(value, list):
        _check_rows(value)
    elif not isinstance(value, bool | int | float | str):
        raise InvalidValueError(
            f"expected a number, a text, true, false or a list, found {show_value(value)}",
            "Write the value of the argument, such as 3, or a tensor as a list, such as [[1, 2], [3, 4]].",
        )
    return cast("bool | int | float | str | list[Any]", check_finite(value))


def _check_rows(rows: list[Any]) -> tuple[int, ...]:
    """Returns the shape of nested lists, which must be rectangular."""
    for row in rows:
        if not isinstance(row, bool | int | float | list):
            raise InvalidValueError(
                f"expected a list of numbers or of true and false, found {show_value(row)} in it",
                "Write numbers only, or true and false only.",
            )
    sizes = [_check_rows(row) if isinstance(row, list) else () for row in rows]
    if any(size != sizes[0] for size in sizes):
        raise InvalidValueError("the lists inside a list differ in length", "Give all rows of a tensor one length.")
    return (len(rows), *(sizes[0] if sizes else ()))


class TensorConfig(Table):
    """``[inputs.tensors.NAME]``: an input of random numbers, the same in every run.

    Attributes:
        shape: Sizes, and names of dimensions, as ``["batch", 3, 224, 224]``.
        dtype: The dtype of the tensor.
        low: The smallest value.
        high: The upper bound of the values, exclusive.
    """

    shape: list[Annotated[int | str, PlainValidator(_size, json_schema_input_type=int | str)]]
    dtype: Literal["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"] = "float32"
    low: float | None = Field(default=None, allow_inf_nan=False, ge=-(2.0**62), le=2.0**62)
    high: float | None = Field(default=None, allow_inf_nan=False, ge=-(2.0**62), le=2.0**62)

    @model_validator(mode="after")
    def _check_order(self) -> TensorConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise InvalidValueError(
                f"expected a high above low, found low = {self.low:g} and high = {self.high:g}",
                "Write a smaller low, or a larger high.",
            )
        return self


def _dimensions(names: Any) -> list[str]:
    """Returns the names of one dimension or several as a list."""
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidValueError(
            f"expected the name of a dimension, found {show_value(names)}",
            'Write its name in quotes, such as "sequence".',
        )
    return [dimension_name(name) for name in names]


class ValuesConfig(Table):
    """``[inputs.values]``: the values of an input of whole numbers, as ``lengths = { indexes = "time" }``.

    Attributes:
        indexes: The dimension, or the dimensions, that the values are positions or lengths in. They are scaled with its
            size wherever the checks try another size.
    """

    indexes: Annotated[list[str], PlainValidator(_dimensions, json_schema_input_type=str | list[str])]


_Size = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]


class RangeConfig(Table):
    """The sizes of a dynamic dimension.

    Attributes:
        min: The smallest size.
        max: The largest size that is checked.
        multiple_of: Every size is a multiple of this number.
    """

    min: _Size = 1
    max: _Size
    multiple_of: _Size = 1

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest multiple in the range."""
        return round_up(self.min, self.multiple_of), self.max // self.multiple_of * self.multiple_of

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler) -> Any:
        return [self.min, self.max] if self.model_fields_set == {"min", "max"} else handler(self)


def _as_range(value: Any) -> Any:
    if isinstance(value, dict | RangeConfig):
        return value
    if not isinstance(value, list) or len(value) != 2:
        raise InvalidValueError(
            f"expected the smallest and the largest size, found {show_value(value)}",
            "Write two sizes, such as [1, 64], or a table, such as { min = 64, max = 1024, multiple_of = 8 }.",
        )
    return dict(zip(("min", "max"), value, strict=True))


_Range = Annotated[
    RangeConfig,
    BeforeValidator(
        _as_range,
        json_schema_input_type=Annotated[list[_Size], Field(min_length=2, max_length=2)] | RangeConfig,
    ),
]


_Constant = Annotated[
    bool | int | float | str | list[Any],
    PlainValidator(_constant, json_schema_input_type=bool | int | float | str | list[Any]),
]


class InputsConfig(Table):
    """``[inputs]``: inputs for traces and checks; at most one of texts, images, data, tensors.

    Attributes:
        texts: Sentences, for the model's tokenizer.
        images: Image files, for the model's image processor; needs the extra ``images``.
        data: A ``.jsonl``, ``.npz`` or ``.safetensors`` file with the inputs by name.
        tensors: Random tensors, by the name of the input.
        constants: Arguments that are the same in every call, and not inputs of the files; lists are tensors.
        max_length: The most tokens of a text; longer texts are cut.
        axes: Names of an input's axes, instead of the usual names.
        values: Inputs of whole numbers that index an axis, such as lengths. By default, they are found by trying.
        dynamic: The smallest and the largest size of each dynamic dimension, as ``batch = [1, 64]`` or
            ``height = { min = 64, max = 1024, multiple_of = 8 }``. All others are fixed. By default, the model decides.
    """

    texts: list[str] | None = Field(default=None, min_length=1)
    images: list[str] | None = Field(default=None, min_length=1)
    data: str | None = None
    tensors: dict[str, TensorConfig] | None = Field(default=None, min_length=1)
    constants: dict[str, _Constant] = {}
    max_length: int | None = Field(default=None, ge=1)
    axes: dict[str, list[Annotated[str, AfterValidator(dimension_name)]]] = {}
    values: dict[str, ValuesConfig] = {}
    dynamic: dict[str, _Range] | None = None

    @model_validator(mode="after")
    def _check_kinds(self) -> InputsConfig:
        kinds = [name for name in ("texts", "images", "data", "tensors") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise InvalidValueError(f"{' and '.join(kinds)} exclude each other", "Keep one of them.")
        for name, sizes in (self.dynamic or {}).items():
            dimension_name(name)
            if sizes.min > sizes.max:
                raise InvalidValueError(
                    f"dynamic.{name}: the smallest size {sizes.min} is above the largest size {sizes.max}",
                    f"Write {name} = [{sizes.max}, {sizes.min}]."
                    if sizes.multiple_of == 1
                    else f"Write a max of at least {sizes.ends[0]}.",
                )
            if sizes.ends[0] > sizes.ends[1]:
                raise InvalidValueError(
                    f"dynamic.{name}: no multiple of {sizes.multiple_of} lies in the range {sizes.min} to {sizes.max}",
                    f"Write a max of at least {sizes.ends[0]}.",
                )
        return self
