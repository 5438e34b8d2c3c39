"""Imports the libraries that are installed, so that processes forked from this one have them."""

from __future__ import annotations

import contextlib
import importlib
import warnings

from tests.zoo import warm
from tests.zoo.libraries.absent import absent

LIBRARIES = ("timm", "diffusers", "monai.networks.nets", "torch_geometric.nn", "x_transformers")

warm.export_tiny()
with warnings.catch_warnings(), absent("torchvision"):
    warnings.simplefilter("ignore")
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
