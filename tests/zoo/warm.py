"""Exports a tiny model, so that processes forked from this one have all imports done: 7 s of CPU time for each."""

from __future__ import annotations

import tempfile
import warnings

import torch
from torch import nn

import optexport


def export_tiny() -> None:
    """Exports a linear layer in both formats."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="optexport-zoo-") as folder:
        warnings.simplefilter("ignore")
        optexport.export(model, (torch.ones(2, 4),), f"{folder}/bundle", formats=["onnx", "torchscript"])
        torch.onnx.export(model, (torch.ones(2, 4),), f"{folder}/model.onnx", dynamo=False)
