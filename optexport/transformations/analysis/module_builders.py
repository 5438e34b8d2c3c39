"""Builds the modules that replace ATen calls, from the arguments of the calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

aten = torch.ops.aten

# Builds a module on the meta device, without its tensors, from the arguments of a call.
_Builder = Callable[[dict[str, Any], dict[str, torch.Tensor | None]], nn.Module | None]


def _linear(_: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
    weight, bias = tensors["weight"], tensors["bias"]
    assert weight is not None
    return nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")


def _conv(cls: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]) -> _Builder:
    def build(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
        weight, bias = tensors["weight"], tensors["bias"]
        assert weight is not None
        rank = weight.dim() - 2
        groups = values["groups"]

        def per_axis(value: Any) -> Any:
            if isinstance(value, str):
                return value
            return tuple(value) * rank if len(value) == 1 else tuple(value)

        return cls(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),  # type: ignore[arg-type]
            stride=per_axis(values["stride"]),
            padding=per_axis(values["padding"]),
            dilation=per_axis(values["dilation"]),
            groups=groups,
            bias=bias is not None,
            device="meta",
        )

    return build


def _conv_transpose(cls: type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d]) -> _Builder:
    def build(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module:
        weight, bias = tensors["weight"], tensors["bias"]
        assert weight is not None
        rank = weight.dim() - 2
        sizes = {
            name: tuple(values[name]) * (rank if len(values[name]) == 1 else 1)
            for name in ("stride", "padding", "output_padding", "dilation")
        }
        return cls(
            weight.shape[0],
            weight.shape[1] * values["groups"],
            tuple(weight.shape[2:]),  # type: ignore[arg-type]
            groups=values["groups"],
            bias=bias is not None,
            device="meta",
            **sizes,  # type: ignore[arg-type]
        )

    return build


def _batch_norm(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    mean, weight, bias = tensors["running_mean"], tensors["weight"], tensors["bias"]
    value = values["input"].meta.get("val")
    if mean is None or values["training"] or value is None or (weight is None) != (bias is None):
        return None
    classes = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    if value.dim() not in classes:
        return None
    norm = classes[value.dim()](
        mean.shape[0], values["eps"], values["momentum"], affine=weight is not None, device="meta"
    )
    # The graph does not read the counter, which would only add an unused buffer to the state_dict.
    norm.num_batches_tracked = None
    return norm


def _layer_norm(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    weight, bias = tensors["weight"], tensors["bias"]
    if weight is None and bias is not None:
        return None
    return nn.LayerNorm(
        list(values["normalized_shape"]),
        values["eps"],
        elementwise_affine=weight is not None,
        bias=bias is not None,
        device="meta",
    )


def _embedding(values: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> nn.Module | None:
    weight = tensors["weight"]
    if weight is None or values["scale_grad_by_freq"] or values["sparse"]:
        return None
    padding = values["padding_idx"]
    return nn.Embedding(
        weight.shape[0],
        weight.shape[1],
        padding_idx=None if padding < 0 else padding,
        device="meta",
    )


@dataclass(frozen=True)
class Kind:
    """Describes the module class that replaces calls of one ATen operator.

    Attributes:
        module: The class, or classes, of modules that make such calls.
        build: Builds the module.
        tensors: The operator's arguments that become parameters and buffers.
        input: The operator's argument that becomes the module's input.
    """

    module: type[nn.Module] | tuple[type[nn.Module], ...]
    build: _Builder
    tensors: tuple[str, ...] = ("weight", "bias")
    input: str = "input"


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
KINDS: dict[Any, Kind] = {
    aten.linear.default: Kind(nn.Linear, _linear),
    aten.conv1d.default: Kind(nn.Conv1d, _conv(nn.Conv1d)),
    aten.conv1d.padding: Kind(nn.Conv1d, _conv(nn.Conv1d)),
    aten.conv2d.default: Kind(nn.Conv2d, _conv(nn.Conv2d)),
    aten.conv2d.padding: Kind(nn.Conv2d, _conv(nn.Conv2d)),
    aten.conv3d.default: Kind(nn.Conv3d, _conv(nn.Conv3d)),
    aten.conv3d.padding: Kind(nn.Conv3d, _conv(nn.Conv3d)),
    aten.conv_transpose1d.default: Kind(nn.ConvTranspose1d, _conv_transpose(nn.ConvTranspose1d)),
    aten.conv_transpose2d.input: Kind(nn.ConvTranspose2d, _conv_transpose(nn.ConvTranspose2d)),
    aten.conv_transpose3d.input: Kind(nn.ConvTranspose3d, _conv_transpose(nn.ConvTranspose3d)),
    aten.batch_norm.default: Kind(_BATCH_NORMS, _batch_norm, ("weight", "bias", "running_mean", "running_var")),
    aten.layer_norm.default: Kind(nn.LayerNorm, _layer_norm),
    aten.embedding.default: Kind(nn.Embedding, _embedding, ("weight",), input="indices"),
}


def find_path(node: fx.Node) -> tuple[str, Any]:
    """Returns the path of the innermost module of a call, and its class or the name of its class.

    The path is empty for calls of the whole model, and if it is unknown. The weight's name does not identify the
    module: a tied weight has the name of only one of its owners.
    """
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path, cls = stack[-1] if stack else ("", None)
    # Repeated calls of a module are named "path@1", "path@2", ...; saved programs have "L['self']." before the path.
    return re.sub(r"@\d+", "", path).removeprefix("L['self']."), cls


def find_owner(node: fx.Node, module_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
    """Returns the path of the innermost module of a call, if it has the expected type."""
    path, cls = find_path(node)
    if isinstance(cls, str):
        module_name, _, class_name = cls.rpartition(".")
        cls = getattr(sys.modules.get(module_name), class_name, None)
    return path or None if isinstance(cls, type) and issubclass(cls, module_type) else None
