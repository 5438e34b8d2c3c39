"""Moves models and programs from the CPU to the device of the exported files."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from optexport.runtime.devices import Device


def move_program(program: ExportedProgram, device: Device) -> ExportedProgram:
    """Moves a program's weights, and the devices in its graph, to a device, in place."""
    moved = move_to_device_pass(program, device)
    _write_device(moved.graph_module, torch.device(device))  # the pass leaves some device arguments unchanged
    return moved


def move_model(model: nn.Module, device: Device) -> nn.Module:
    """Returns a copy of a model on a device; devices in graphs change too."""
    # Copy each tensor separately: deepcopy copies the whole storage, which is all weights for a memory-mapped file.
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            copied = tensor.detach().to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecated its own way to copy output trees
        moved = copy.deepcopy(model, dict(copies)).to(device)  # .to for TorchScript and other tensor types
    _write_device(moved, torch.device(device))
    return moved


def _write_device(module: nn.Module, device: torch.device) -> None:
    """Replaces every device in the graphs of a module."""
    for graph_module in module.modules():
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            node.args = fx.node.map_aggregate(node.args, lambda leaf: device if type(leaf) is torch.device else leaf)
            if "device" in node.kwargs:
                node.update_kwarg("device", device)
            if node.target is torch.ops.aten.to.device:
                node.update_arg(1, device)
        graph_module.recompile()
