"""Adds pre- and postprocessing to a model: image normalization, probabilities, labels.

The resulting model is the original of the run: it is traced, and run in float64 as the reference.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import fx, nn

from optexport.config.metrics import DEFAULT_K
from optexport.config.schema import IMAGES, LABEL_OUTPUTS, LABELS, PROBABILITIES, ProcessingConfig
from optexport.errors import ConfigError, first_line
from optexport.signature.signature import call_signature, flatten_outputs

if TYPE_CHECKING:
    from optexport.loading.loader import Loaded, Pretrained

Function = Literal["softmax", "sigmoid"]

_LOGITS = "logits"
_OUTPUTS = "processing.outputs"
_NORMALIZE = "processing.normalize"

# Heights and widths of the test images. The tolerance is relative to the largest number: some units in the last place
# of float32.
_SIZES = ((37, 61), (70, 50))
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Classes:
    """The outputs that replace a model's logits.

    Attributes:
        function: The function that computes probabilities.
        label_count: How many of the most likely labels are returned; None for the probabilities of all classes.
        is_single: Whether the single best label has no axis.
    """

    function: Function
    label_count: int | None = None
    is_single: bool = False

    def of(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns probabilities and labels.

        Args:
            logits: Floating point, with the classes on the last axis, or on the second if there are four or more axes.

        Returns:
            ``probabilities``, with the dtype and shape of the logits. For the best labels, ``probabilities`` and
            ``labels`` (int64) are [batch, label_count], the most likely first, or [batch].

        Raises:
            ConfigError: The logits have only one class, several positions, or fewer classes than labels.
        """
        axis = 1 if logits.dim() > 3 else -1
        if self.function == "softmax" and (logits.dim() < 2 or logits.shape[axis] == 1):
            raise ConfigError(
                f"softmax of a single class is always 1 (the logits have shape {list(logits.shape)})",
                location=_OUTPUTS,
                hint='Write outputs = "sigmoid".',
            )
        probabilities = torch.softmax(logits, axis) if self.function == "softmax" else torch.sigmoid(logits)
        if self.label_count is None:
            return {PROBABILITIES: probabilities}
        if logits.dim() != 2:
            raise ConfigError(
                f"labels need logits of shape [batch, classes], found {logits.dim()} axes. With many positions, some "
                "labels are nearly tied, so rounding would change them",
                location=_OUTPUTS,
                hint='Write outputs = "probabilities", and choose the labels outside of the file.',
            )
        if self.label_count > logits.shape[-1]:
            raise ConfigError(
                f"expected at most {logits.shape[-1]}, the number of classes, found {self.label_count}",
                location="processing.k",
                hint=f"Write k = {logits.shape[-1]} or a smaller number.",
            )
        # Uses the logits, because probabilities near 1 may be equal if the logits are not.
        labels = logits.argmax(-1, keepdim=True) if self.is_single else logits.topk(self.label_count, -1).indices
        outputs = {LABELS: labels, PROBABILITIES: probabilities.gather(-1, labels)}
        return {name: tensor.squeeze(-1) for name, tensor in outputs.items()} if self.is_single else outputs


@dataclass(frozen=True)
class Processing:
    """The processing that is part of a model.

    Attributes:
        scales: Whether the model takes uint8 images, and scales them by its ``image_shift`` and ``image_factor``.
        classes: The outputs that replace the logits, or None.
    """

    scales: bool
    classes: Classes | None


class _Processes(nn.Module):
    """A mixin for a model's class that adds processing to ``forward``."""

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
        scale_dtype = self.image_factor.dtype
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), scale_dtype)
        scaled = (images.to(scale_dtype) - self.image_shift) * self.image_factor
        return scaled if dtype == scale_dtype else scaled.to(dtype)


def _with_classes(outputs: Any, classes: Classes) -> dict[str, Any]:
    """Replaces the logits of outputs by probabilities and labels; raises if there are none."""
    if isinstance(outputs, torch.Tensor):
        return {**classes.of(outputs)}
    named = dict(outputs) if isinstance(outputs, Mapping) else {}
    if not isinstance(named.get(_LOGITS), torch.Tensor):
        raise ConfigError(
            f"the model has no output logits (found {', '.join(flatten_outputs(outputs))})",
            location=_OUTPUTS,
            hint=f"Set model.task to the task of the model's head, or remove {_OUTPUTS}.",
        )
    if conflicts := {PROBABILITIES, LABELS} & set(named):
        raise ConfigError(
            f"the model already has an output {conflicts.pop()}", location=_OUTPUTS, hint=f"Remove {_OUTPUTS}."
        )
    processed: dict[str, Any] = {}
    for name, value in named.items():
        processed |= classes.of(value) if name == _LOGITS else {name: value}
    return processed


def get_processing(model: nn.Module) -> Processing:
    """Returns the processing that is part of a model."""
    return model._processing if isinstance(model, _Processes) else Processing(False, None)


def add_processing(loaded: Loaded, config: ProcessingConfig | None) -> Loaded:
    """Returns a model with the configured processing; the argument is not changed.

    Raises:
        ConfigError: The model cannot be changed, takes no images, or has no image processor that defines their scale.
    """
    if config is None or not (config.normalize or config.outputs):
        return loaded
    model, pretrained = loaded.model, loaded.pretrained
    location = _NORMALIZE if config.normalize else _OUTPUTS
    if loaded.program is not None or isinstance(model, torch.jit.ScriptModule | fx.GraphModule):
        raise ConfigError(
            "processing cannot be added to a model that is already a graph",
            location=location,
            hint=f"Set model.source to the original model, or remove {location}.",
        )
    if "forward" in vars(model):
        raise ConfigError(
            f"processing cannot be added to {type(model).__name__}, because its forward was replaced",
            location=location,
            hint=f"Add the processing in the code of the model, or remove {location}.",
        )
    scale: ImageScale | None = None
    if config.normalize:
        if IMAGES not in call_signature(model).parameters:
            raise ConfigError(
                f"{type(model).__name__} takes no images: it has no input {IMAGES}",
                location=location,
                hint=f"Remove {location}.",
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
    if config.outputs not in LABEL_OUTPUTS:
        return Classes(function)
    if config.outputs == "argmax":
        return Classes(function, 1, is_single=True)
    return Classes(function, config.k or DEFAULT_K)


def _function_of(model: nn.Module) -> Function:
    """Returns the function for a model's logits from its config; by default softmax."""
    config: Any = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        raise ConfigError(
            "the model is a regression model, which has no classes", location=_OUTPUTS, hint=f"Remove {_OUTPUTS}."
        )
    is_single = getattr(config, "num_labels", None) == 1
    return "sigmoid" if is_single or problem == "multi_label_classification" else "softmax"


def _joined(model: nn.Module, scale: ImageScale | None, classes: Classes | None) -> nn.Module:
    """Returns a model of a derived class, which shares all tensors under the same paths."""
    cls = type(model)
    forward: Callable[..., Any] = functools.wraps(cls.forward)(lambda self, *a, **k: _Processes.forward(self, *a, **k))
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    processed = copy.copy(model)
    processed.__class__ = type(cls.__name__, (_Processes, cls), names)
    processed._buffers = dict(model._buffers)
    if scale is not None:
        processed.register_buffer("image_shift", scale.shift)
        processed.register_buffer("image_factor", scale.factor)
    processed.__dict__["_processing"] = Processing(scale is not None, classes)
    return processed


def convert_to_uint8(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts made-up images to uint8 from 0 to 255, if the model takes such images."""
    if not get_processing(model).scales or IMAGES not in batch:
        return batch
    images = batch[IMAGES].double()
    low, high = images.min(), images.max()
    return {**batch, IMAGES: ((images - low) / (high - low) * 255).round().to(torch.uint8)}


def check_images(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """Checks that images are uint8 if the model scales them.

    Raises:
        ConfigError: They have another dtype.
    """
    images = batch.get(IMAGES)
    if get_processing(model).scales and images is not None and images.dtype != torch.uint8:
        raise ConfigError(
            f"processing.normalize needs images in uint8, found {str(images.dtype).removeprefix('torch.')}",
            location=f"inputs: {IMAGES}",
            hint='Use whole numbers from 0 to 255; for random images, dtype = "uint8", low = 0, high = 256.',
        )


@dataclass(frozen=True)
class ImageScale:
    """The scale of an image processor: ``(images - shift) * factor``.

    Attributes:
        shift, factor: float32, [channels, 1, 1].
    """

    shift: torch.Tensor
    factor: torch.Tensor


def image_scale(pretrained: Pretrained | None, location: str) -> tuple[ImageScale, Any]:
    """Returns the scale of a model's image processor, and the processor without it.

    Checks on images that both together equal the processor. Some processors normalize before padding, or round between
    steps, which a scale at the end cannot reproduce.

    Args:
        location: The location for errors.

    Raises:
        ConfigError: The image processor is missing, does not scale, or its scale is not such a shift and factor.
    """
    import transformers

    if pretrained is None:
        raise ConfigError("the model has no image processor", location=location, hint=f"Remove {location}.")
    options = {"local_files_only": True, **pretrained.options}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(pretrained.name, backend="pil", **options)
    except Exception as error:  # transformers raises many kinds of errors
        raise ConfigError(
            f"the image processor of the model cannot be loaded: {first_line(error)}",
            location=location,
            hint=f"Add the preprocessor_config.json to the model's folder, or remove {location}.",
        ) from error
    class_name = type(processor).__name__
    rescales, normalizes = (getattr(processor, key, None) for key in ("do_rescale", "do_normalize"))
    if not (rescales or normalizes):
        raise ConfigError(
            f"{class_name} neither rescales nor normalizes images", location=location, hint=f"Remove {location}."
        )
    divisor = 1 / float(processor.rescale_factor) if rescales else 1.0
    mean, deviation = (processor.image_mean, processor.image_std) if normalizes else (0.0, 1.0)
    shift = torch.tensor(mean, dtype=torch.float64).reshape(-1, 1, 1) * divisor
    factor = 1 / (torch.tensor(deviation, dtype=torch.float64).reshape(-1, 1, 1) * divisor)
    scale = ImageScale(shift.float(), factor.float())
    plain = copy.deepcopy(processor)
    plain.do_rescale = plain.do_normalize = False
    if (problem := _find_scale_problem(processor, plain, scale)) is not None:
        raise ConfigError(
            f"{class_name} does more than resize, crop, rescale and normalize images: {problem}",
            location=location,
            hint=f"Remove {location}.",
        )
    return scale, plain


def _find_scale_problem(processor: Any, plain: Any, scale: ImageScale) -> str | None:
    """Returns how a processor differs from a plain one followed by the scale, or None."""
    generator = np.random.default_rng(0)
    first, second = (generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES)
    for images in ([first], [second], [first, second]):
        try:
            expected, unscaled = (dict(process(images=images, return_tensors="np")) for process in (processor, plain))
        except Exception as error:  # transformers raises many kinds
            if len(images) == 1:
                return first_line(error)
            continue  # images of different sizes may be unsupported
        if expected.keys() != unscaled.keys() or IMAGES not in unscaled:
            return f"the processor returns {', '.join(expected)}"
        if unscaled[IMAGES].dtype != np.uint8:
            return f"without a scale, the images are {unscaled[IMAGES].dtype}"
        scaled = (unscaled[IMAGES] - scale.shift.numpy()) * scale.factor.numpy()
        pixels = expected[IMAGES]
        if scaled.shape != pixels.shape or np.abs(scaled - pixels).max() > _ROUNDING * max(1, np.abs(pixels).max()):
            return "the results are not a scale of the unscaled images"
    return None
