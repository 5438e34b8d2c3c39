"""Modules in train mode, whose outputs may be random or depend on the other rows of a batch."""

from __future__ import annotations

import inspect

from torch import nn


def find_training_module(model: nn.Module) -> str | None:
    """Returns the name of the first module that computes in train mode; empty for the model itself, None without one.

    A module without code for train mode, such as an activation, does not count, except the model itself.
    """
    if getattr(model, "training", False):  # a frozen TorchScript program has no such attribute
        return ""
    return next((name for name, part in model.named_modules() if _trains(part)), None)


def _trains(part: nn.Module) -> bool:
    return getattr(part, "training", False) and _depends_on_training(part)


def _depends_on_training(module: nn.Module) -> bool:
    """Returns True if the code of a module reads ``self.training``."""
    try:
        return any(
            "self.training" in inspect.getsource(kind) for kind in type(module).__mro__[: -len(nn.Module.__mro__)]
        )
    except (OSError, TypeError):
        return True
