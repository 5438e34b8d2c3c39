"""Pre- and post-processing that becomes part of the exported files: images as they are, probabilities, best labels.

The model that does it is the original: it is traced, run in float64 and compared with as any other is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn

from optexport.config.processing import DEFAULT_K, IMAGES, LABELS, OF_LABELS, PROBABILITIES, ProcessingConfig
from optexport.errors import ConfigError
from optexport.loading.image_scale import ImageScale, image_scale
from optexport.signature.signature import call_signature, flatten_outputs

if TYPE_CHECKING:
    from optexport.loading.loader import Loaded

Function = Literal["softmax", "sigmoid"]

_LOGITS = "logits"
_OUTPUTS = "processing.outputs"
_NORMALIZE = "processing.normalize"


@dataclass(frozen=True)
class Classes:
    """What a model gives in place of its logits.

    Attributes:
        function: What makes probabilities of them.
        best: How many of the likeliest labels are given; None where all classes keep their place.
        alone: Whether the one best label has no axis of its own.
    """

    function: Function
    best: int | None = None
    alone: bool = False

    def of(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Probabilities and labels.

        Args:
            logits: Floating point, classes along the last axis, or along the second where there are four or more.

        Returns:
            ``probabilities``, of the dtype and shape of the logits. Of the best labels these are [batch, best], or
            [batch], the likeliest first, beside ``labels``, int64 of the same shape.

        Raises:
            ConfigError: There are no several classes to choose from, several positions, or fewer classes than labels.
        """
        axis = 1 if logits.dim() > 3 else -1
        if self.function == "softmax" and (logits.dim() < 2 or logits.shape[axis] == 1):
            raise ConfigError(
                f"the logits are {list(logits.shape)}, and softmax of one class is 1 whatever the input",
                location=_OUTPUTS,
                hint='Write outputs = "sigmoid".',
            )
        probabilities = torch.softmax(logits, axis) if self.function == "softmax" else torch.sigmoid(logits)
        if self.best is None:
            return {PROBABILITIES: probabilities}
        if logits.dim() != 2:
            raise ConfigError(
                f"labels are of logits [batch, classes], and these have {logits.dim()} axes: of many positions one is "
                "nearly a tie, so that no file could be proven to give the same labels",
                location=_OUTPUTS,
                hint='Write outputs = "probabilities", and choose among them outside of the file.',
            )
        if self.best > logits.shape[-1]:
            raise ConfigError(
                f"it is {self.best}, and there are {logits.shape[-1]} classes",
                location="processing.k",
                hint="Write a smaller one.",
            )
        # Of the logits, since probabilities that are near 1 may be equal where logits are not.
        labels = logits.argmax(-1, keepdim=True) if self.alone else logits.topk(self.best, -1).indices
        found = {LABELS: labels, PROBABILITIES: probabilities.gather(-1, labels)}
        return {name: tensor.squeeze(-1) for name, tensor in found.items()} if self.alone else found


@dataclass(frozen=True)
class Processing:
    """What a model does besides: scales its images, names its classes, or both.

    Attributes:
        scales: Whether it takes images as they are, and scales them by its ``image_shift`` and ``image_factor``.
        classes: What stands in place of logits; None where these are given.
    """

    scales: bool
    classes: Classes | None


class _Processes(nn.Module):
    """What a model's class is joined with."""

    _processing: Processing
    image_shift: torch.Tensor
    image_factor: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        bound = inspect.signature(forward).bind(*args, **kwargs)
        if self._processing.scales and bound.arguments.get(IMAGES) is not None:
            bound.arguments[IMAGES] = self._scaled(bound.arguments[IMAGES])
        outputs = forward(*bound.args, **bound.kwargs)
        return outputs if self._processing.classes is None else _with_classes(outputs, self._processing.classes)

    def _scaled(self, images: torch.Tensor) -> torch.Tensor:
        own = self.image_factor.dtype
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), own)
        scaled = (images.to(own) - self.image_shift) * self.image_factor
        return scaled if dtype == own else scaled.to(dtype)


def _with_classes(outputs: Any, classes: Classes) -> dict[str, Any]:
    """What a model gives, with probabilities and labels where the logits were.

    Raises:
        ConfigError: There are no logits, or an output of another meaning is called so.
    """
    if isinstance(outputs, torch.Tensor):
        return {**classes.of(outputs)}
    given = dict(outputs) if isinstance(outputs, Mapping) else {}
    if not isinstance(given.get(_LOGITS), torch.Tensor):
        raise ConfigError(
            f"the model gives no logits, but {', '.join(flatten_outputs(outputs))}",
            location=_OUTPUTS,
            hint="Choose the model.task that its head is for, or leave it out.",
        )
    if taken := {PROBABILITIES, LABELS} & set(given):
        raise ConfigError(f"the model has an output {taken.pop()} of its own", location=_OUTPUTS, hint="Leave it out.")
    made: dict[str, Any] = {}
    for name, value in given.items():
        made |= classes.of(value) if name == _LOGITS else {name: value}
    return made


def processing_of(model: nn.Module) -> Processing:
    """What a model does besides; nothing of one that `built_in` was not asked for."""
    return model._processing if isinstance(model, _Processes) else Processing(False, None)


def built_in(loaded: Loaded, config: ProcessingConfig | None) -> Loaded:
    """The model with what the config asks for as a part of it; the one that is given is not changed.

    Raises:
        ConfigError: The model cannot be joined with it, takes no images, or has no image processor that says how these
            are scaled.
    """
    if config is None or not (config.normalize or config.outputs):
        return loaded
    model, pretrained = loaded.model, loaded.pretrained
    location = _NORMALIZE if config.normalize else _OUTPUTS
    if loaded.program is not None or isinstance(model, torch.jit.ScriptModule | fx.GraphModule):
        raise ConfigError("the source is a graph already, which is exported as it is", location=location)
    if "forward" in vars(model):
        raise ConfigError(f"{type(model).__name__} has had its forward replaced", location=location)
    scale: ImageScale | None = None
    if config.normalize:
        if IMAGES not in call_signature(model).parameters:
            raise ConfigError(
                f"{type(model).__name__} takes no images ({IMAGES})", location=location, hint="Leave it out."
            )
        scale, processor = image_scale(pretrained, location)
        assert pretrained is not None
        pretrained = replace(pretrained, image_processor=processor)
    return replace(loaded, model=_joined(model, scale, _classes(config, model)), pretrained=pretrained)


def _classes(config: ProcessingConfig, model: nn.Module) -> Classes | None:
    if config.outputs is None:
        return None
    function = config.outputs if config.outputs in ("softmax", "sigmoid") else _function_of(model)
    assert function == "softmax" or function == "sigmoid"
    if config.outputs not in OF_LABELS:
        return Classes(function)
    return Classes(function, 1, alone=True) if config.outputs == "argmax" else Classes(function, config.k or DEFAULT_K)


def _function_of(model: nn.Module) -> Function:
    """What makes probabilities of a model's logits, as its config says; where that says nothing, softmax.

    Raises:
        ConfigError: It is a regression.
    """
    config: Any = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        raise ConfigError(
            "the model is a regression, whose results are no classes", location=_OUTPUTS, hint="Leave it out."
        )
    one = getattr(config, "num_labels", None) == 1
    return "sigmoid" if one or problem == "multi_label_classification" else "softmax"


def _joined(model: nn.Module, scale: ImageScale | None, classes: Classes | None) -> nn.Module:
    """A model of a class made of the model's own, which shares all of it under the same paths."""
    cls = type(model)
    forward: Callable[..., Any] = functools.wraps(cls.forward)(lambda self, *a, **k: _Processes.forward(self, *a, **k))
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    made = copy.copy(model)
    made.__class__ = type(cls.__name__, (_Processes, cls), names)
    made._buffers = dict(model._buffers)
    if scale is not None:
        made.register_buffer("image_shift", scale.shift)
        made.register_buffer("image_factor", scale.factor)
    made.__dict__["_processing"] = Processing(scale is not None, classes)
    return made


def as_whole_numbers(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Made-up inputs, with images of whole numbers where the model takes these: uint8, over all of 0 to 255."""
    if not processing_of(model).scales or IMAGES not in batch:
        return batch
    images = batch[IMAGES].double()
    low, high = images.min(), images.max()
    return {**batch, IMAGES: ((images - low) / (high - low) * 255).round().to(torch.uint8)}


def check_images(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Checks that images are whole numbers where the model scales them itself.

    Raises:
        ConfigError: They are not.
    """
    images = batch.get(IMAGES)
    if processing_of(model).scales and images is not None and images.dtype != torch.uint8:
        raise ConfigError(
            f"it is {str(images.dtype).removeprefix('torch.')}, and with processing.normalize the files take images as "
            "they are, in uint8",
            location=f"inputs: {IMAGES}",
            hint='Give whole numbers from 0 to 255; of random ones dtype = "uint8", low = 0, high = 256.',
        )
