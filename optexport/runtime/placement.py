"""Moves models and programs, which are loaded and traced on the CPU, to the device that files are made for."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from optexport.runtime.devices import Device


def program_to(program: ExportedProgram, device: Device) -> ExportedProgram:
    """Moves a program, in place: its weights, and the devices that stand in its graph."""
    moved = move_to_device_pass(program, device)
    _write_device(moved.graph_module, torch.device(device))  # where the pass leaves its name
    return moved


def model_to(model: nn.Module, device: Device) -> nn.Module:
    """A copy of a model on a device, and of the devices that stand in it as far as it is a graph."""
    # Each tensor by itself: a copy of one on the CPU copies all that lies in its memory, of a mapped file all weights.
    there: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            made = tensor.detach().to(device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            there[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its output trees
        moved = copy.deepcopy(model, dict(there)).to(device)  # the latter for TorchScript, and other kinds of tensors
    _write_device(moved, torch.device(device))
    return moved


def _write_device(module: nn.Module, device: torch.device) -> None:
    """Has every operator of the graphs in a module that names a device name this one."""
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
