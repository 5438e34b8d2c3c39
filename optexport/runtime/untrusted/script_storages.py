"""Checks that the tensors of a TorchScript file lie within the bytes of the file.

``torch.jit.load`` reads the sizes of storages and tensors from the pickles of an archive, and the bytes from its
records, but does not compare them. If a record is too short, it reads other memory of the process as weights. So this
module reads the pickles first, with classes that only record sizes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

# Dtypes by storage name. Newer storages are named like their dtypes.
_DTYPES = {**torch.storage._storage_type_to_dtype_map(), "ComplexHalfStorage": torch.complex32}
# torch frees nested values recursively: at millions of levels, the process ended by SIGSEGV. Saved models are nested
# as deeply as their modules.
_MAX_DEPTH = 2000
_REBUILD_FUNCTIONS = ("_rebuild_tensor_v2", "_rebuild_qtensor")


class OutOfBoundsError(ValueError):
    """Raised if a tensor reaches beyond the bytes of its record."""


@dataclass(frozen=True)
class _Storage:
    key: str
    elements: int


class _Inert:
    """Replaces every class and function that a pickle names, and only stores arguments."""

    content: list[object]

    def __new__(cls, *args: object) -> Self:
        instance = super().__new__(cls)
        instance.content = [*args]
        return instance

    def __setstate__(self, state: object) -> None:
        self.content.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.content += (key, value)

    def append(self, item: object) -> None:
        self.content.append(item)

    def extend(self, items: Iterable[object]) -> None:
        self.content.extend(items)


class _Tensor(_Inert):
    """Replaces functions that create a tensor from a storage, offset, sizes and strides.

    All numbers are in elements.
    """

    def __new__(cls, *args: Any) -> Self:
        storage, offset, sizes, strides, *_ = args
        if 0 in sizes:
            return super().__new__(cls)
        reach = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
        if min(offset, *sizes, *strides, 0) < 0 or offset + sum(reach) >= storage.elements:
            record = f"record {storage.key}, which has {storage.elements} elements"
            raise OutOfBoundsError(f"a tensor of sizes {list(sizes)} reaches beyond {record}")
        return super().__new__(cls)


class _Reader(pickle.Unpickler):
    """Reads a pickle of a TorchScript file without running anything.

    Args:
        content: The pickle.
        records: The number of bytes of each record, by its key.
    """

    def __init__(self, content: bytes, records: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(content))
        self._records = records

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_Tensor if name in _REBUILD_FUNCTIONS else _Inert,), {})

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, elements = pid
        name = kind.__name__
        dtype = _DTYPES.get(name) or getattr(torch, name.removesuffix("Storage").lower())
        available, needed = self._records.get(key, 0), elements * dtype.itemsize
        if not 0 <= needed <= available:
            raise OutOfBoundsError(f"record {key}: expected {needed} bytes, found {available}")
        return _Storage(key, elements)


def check(content: bytes, records: Mapping[str, int]) -> None:
    """Checks that the tensors in a pickle fit its records.

    Args:
        content: The content of ``data.pkl`` or ``constants.pkl``.
        records: The number of bytes of each record in the folder of that name, by its key.

    Raises:
        OutOfBoundsError: A tensor is larger than its record.
        ValueError: torch does not write such a pickle.
    """
    for opcode, argument, _ in pickletools.genops(content):
        # torch ended by SIGSEGV at a large index.
        if "PUT" in opcode.name and isinstance(argument, int) and argument > len(content):
            raise ValueError(
                f"the pickle stores a value at index {argument}, which is larger than its {len(content)} bytes"
            )
    try:
        value = _Reader(content, records).load()
    except OutOfBoundsError:
        raise
    except Exception as error:  # a damaged or foreign pickle may raise any type
        raise ValueError(f"the pickle cannot be read: {error}") from error
    _check_depth(value)


def _check_depth(root: object) -> None:
    depths: dict[int, int] = {}
    todo = [(root, False)]
    while todo:
        value, measured = todo.pop()
        inner = _inner(value)
        if measured:
            depths[id(value)] = 1 + max((depths.get(id(item), 0) for item in inner), default=0)
            if depths[id(value)] > _MAX_DEPTH:
                raise ValueError(f"the values in the pickle are nested more than {_MAX_DEPTH} levels deep")
        elif inner and id(value) not in depths:
            depths[id(value)] = 0
            todo += [(value, True), *((item, False) for item in inner)]


def _inner(value: object) -> Collection[object]:
    match value:
        case tuple() | list() | set() | frozenset():
            return value
        case dict():
            return [*value, *value.values()]
        case _Inert():
            return value.content
    return ()
