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
from optexport.config.schema import IMAGES, LABELS, OF_LABELS, PROBABILITIES, ProcessingConfig
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
        best: How many of the most likely labels are returned; None for the probabilities of all classes.
        alone: Whether the single best label has no axis.
    """

    function: Function
    best: int | None = None
    alone: bool = False

    def of(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns probabilities and labels.

        Args:
            logits: Floating point, with the classes on the last axis, or on the second if there are four or more axes.

        Returns:
            ``probabilities``, with the dtype and shape of the logits. For the best labels, ``probabilities`` and
            ``labels`` (int64) are [batch, best], the most likely first, or [batch].

        Raises:
            ConfigError: The logits have only one class, several positions, or fewer classes than labels.
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
        # Uses the logits, because probabilities near 1 may be equal if the logits are not.
        labels = logits.argmax(-1, keepdim=True) if self.alone else logits.topk(self.best, -1).indices
        found = {LABELS: labels, PROBABILITIES: probabilities.gather(-1, labels)}
        return {name: tensor.squeeze(-1) for name, tensor in found.items()} if self.alone else found


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
        own = self.image_factor.dtype
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), own)
        scaled = (images.to(own) - self.image_shift) * self.image_factor
        return scaled if dtype == own else scaled.to(dtype)


def _with_classes(outputs: Any, classes: Classes) -> dict[str, Any]:
    """Replaces the logits of outputs by probabilities and labels; raises if there are none."""
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
    """Returns the processing that is part of a model."""
    return model._processing if isinstance(model, _Processes) else Processing(False, None)


def built_in(loaded: Loaded, config: ProcessingConfig | None) -> Loaded:
    """Returns a model with the configured processing; the given model is not changed.

    Raises:
        ConfigError: The model cannot be changed, takes no images, or has no image processor that defines their scale.
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
    """Returns the function for a model's logits from its config; by default softmax."""
    config: Any = getattr(model, "config", None)
    problem = getattr(config, "problem_type", None)
    if problem == "regression":
        raise ConfigError(
            "the model is a regression, whose results are no classes", location=_OUTPUTS, hint="Leave it out."
        )
    one = getattr(config, "num_labels", None) == 1
    return "sigmoid" if one or problem == "multi_label_classification" else "softmax"


def _joined(model: nn.Module, scale: ImageScale | None, classes: Classes | None) -> nn.Module:
    """Returns a model of a derived class, which shares all tensors under the same paths."""
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
    """Converts made-up images to uint8 from 0 to 255, if the model takes such images."""
    if not processing_of(model).scales or IMAGES not in batch:
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
    if processing_of(model).scales and images is not None and images.dtype != torch.uint8:
        raise ConfigError(
            f"it is {str(images.dtype).removeprefix('torch.')}, and with processing.normalize the files take images as "
            "they are, in uint8",
            location=f"inputs: {IMAGES}",
            hint='Give whole numbers from 0 to 255; of random ones dtype = "uint8", low = 0, high = 256.',
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
        raise ConfigError("the model has no image processor", location=location, hint="Leave it out.")
    options = {"local_files_only": True, **pretrained.options}
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(pretrained.name, backend="pil", **options)
    except Exception as error:  # transformers raises many kinds of errors
        raise ConfigError(
            f"its image processor cannot be loaded: {first_line(error)}",
            location=location,
            hint="Leave it out, or put the model's preprocessor_config.json beside it.",
        ) from error
    named = type(processor).__name__
    rescales, normalizes = (getattr(processor, key, None) for key in ("do_rescale", "do_normalize"))
    if not (rescales or normalizes):
        raise ConfigError(f"{named} neither rescales nor normalises images", location=location, hint="Leave it out.")
    divisor = 1 / float(processor.rescale_factor) if rescales else 1.0
    mean, deviation = (processor.image_mean, processor.image_std) if normalizes else (0.0, 1.0)
    shift = torch.tensor(mean, dtype=torch.float64).reshape(-1, 1, 1) * divisor
    factor = 1 / (torch.tensor(deviation, dtype=torch.float64).reshape(-1, 1, 1) * divisor)
    scale = ImageScale(shift.float(), factor.float())
    plain = copy.deepcopy(processor)
    plain.do_rescale = plain.do_normalize = False
    if (why := _why_another(processor, plain, scale)) is not None:
        raise ConfigError(
            f"{named} does more with images than to resize, crop, rescale and normalise them: {why}",
            location=location,
            hint="Leave it out.",
        )
    return scale, plain


def _why_another(processor: Any, plain: Any, scale: ImageScale) -> str | None:
    """Returns how a processor differs from a plain one followed by the scale, or None."""
    generator = np.random.default_rng(0)
    one, other = (generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in _SIZES)
    for images in ([one], [other], [one, other]):
        try:
            expected, given = (dict(each(images=images, return_tensors="np")) for each in (processor, plain))
        except Exception as error:  # transformers raises many kinds
            if len(images) == 1:
                return first_line(error)
            continue  # images of different sizes may be unsupported
        if expected.keys() != given.keys() or IMAGES not in given:
            return f"it makes {', '.join(expected)}"
        if given[IMAGES].dtype != np.uint8:
            return f"without a scale its images are {given[IMAGES].dtype}"
        scaled = (given[IMAGES] - scale.shift.numpy()) * scale.factor.numpy()
        wanted = expected[IMAGES]
        if scaled.shape != wanted.shape or np.abs(scaled - wanted).max() > _ROUNDING * max(1, np.abs(wanted).max()):
            return "its numbers are no scale of what it makes without"
    return None
