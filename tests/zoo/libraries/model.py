"""Describes a model of a library: how it is built, and its inputs at several sizes."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from optexport.signature import Dim
from tests._helpers.models import randomise
from tests.zoo.libraries.absent import absent

Sizes = Mapping[str, int]
# What some libraries import, for parts that no model here uses. torchvision and torchaudio need another torch.
_ABSENT = ("torchvision", "torchaudio", "librosa", "resampy", "ray")
# Makes values of a shape; the second argument has the sizes of the named axes.
Values = Callable[[Sequence[int], Sizes, torch.Generator], torch.Tensor]


def normal(shape: Sequence[int], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Returns numbers of a standard normal distribution."""
    return torch.randn(*shape, generator=generator)


def uniform(shape: Sequence[int], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Returns numbers from 0 to 1."""
    return torch.rand(*shape, generator=generator)


def waves(shape: Sequence[int], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Returns quiet noise, like a sound."""
    return 0.1 * torch.randn(*shape, generator=generator)


def mask(shape: Sequence[int], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Returns a mask of bools that keeps a random beginning of each row."""
    lengths = torch.randint(1, shape[-1] + 1, tuple(shape[:-1]), generator=generator)
    return torch.arange(shape[-1]) < lengths[..., None]


def ids(count: int) -> Values:
    """Returns whole numbers below a count."""
    return lambda shape, sizes, generator: torch.randint(0, count, tuple(shape), generator=generator)


def indexes(axis: str) -> Values:
    """Returns whole numbers below the size of an axis."""
    return lambda shape, sizes, generator: torch.randint(0, sizes[axis], tuple(shape), generator=generator)


@dataclass(frozen=True)
class Input:
    """A tensor.

    Attributes:
        shape: Its axes: a size, or the name of a dynamic axis.
    """

    shape: tuple[int | str, ...]
    values: Values = normal

    def make(self, sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
        return self.values([axis if isinstance(axis, int) else sizes[axis] for axis in self.shape], sizes, generator)


@dataclass(frozen=True)
class Model:
    """A model of a library.

    Attributes:
        name: ``library/model``.
        make: Builds it; imports the library.
        inputs: The tensors by name of the argument of ``forward``.
        sizes: Sizes of the named axes: the traced ones, then others at which the files have to be right.
        dims: Limits of named axes, as the arguments of ``Dim``.
        constants: Arguments that are not tensors.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Input]
    sizes: Sequence[Sizes]
    dims: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def build(self) -> nn.Module:
        """Returns the model in eval mode, with random weights, biases and norm statistics."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return randomise(self.make().float(), self.seed)

    def batches(self) -> list[dict[str, Any]]:
        """Returns arguments at each of the sizes, each with other values."""
        return [self._batch(sizes, self.seed + index) for index, sizes in enumerate(self.sizes)]

    def _batch(self, sizes: Sizes, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        return {name: tensor.make(sizes, generator) for name, tensor in self.inputs.items()} | dict(self.constants)

    def dynamic(self) -> dict[str, dict[int, str | Dim]]:
        """Returns the dynamic axes as ``optexport.export`` takes them."""
        dims = {name: Dim(name, **limits) for name, limits in self.dims.items()}
        return {
            name: {index: dims.get(axis, axis) for index, axis in enumerate(tensor.shape) if isinstance(axis, str)}
            for name, tensor in self.inputs.items()
        }


def network(path: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    """Returns a function that imports ``package.module:Class`` and calls the class."""

    def make() -> nn.Module:
        module, _, name = path.partition(":")
        with absent(*_ABSENT):
            cls = getattr(importlib.import_module(module), name)
        model: nn.Module = cls(*arguments, **options)
        return model

    return make
