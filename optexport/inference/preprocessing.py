"""Conversion of texts, images and sounds to a bundle's inputs, with its own tokenizer or processor."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optexport._utils.size_ranges import round_up
from optexport.bundle.manifest import ApplicationRecord, Manifest
from optexport.errors import ConfigError, first_line, panics_as_errors
from optexport.inference import images, sounds
from optexport.inference.arrays import Arrays, describe_inputs, numpy_dtype
from optexport.loading import preprocessors

_logger = logging.getLogger(__name__)

# Tokenizers without a maximum length report 1e30.
_UNLIMITED = 10**9


class Preprocessing:
    """The tokenizer and processors of a bundle, each loaded on first use.

    Attributes:
        manifest: The manifest of the bundle.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._folder = folder

    @property
    def application(self) -> ApplicationRecord:
        """The use of the model; without a record, it has no task, labels or preprocessors."""
        return self.manifest.application or ApplicationRecord(
            task=None, labels=None, scores=None, preprocessors=[], prompt="", missing=[]
        )

    def __call__(self, texts: str | Sequence[str] | None = None, images: Any = None, sounds: Any = None) -> Arrays:
        """Converts texts, images or sounds, see `Bundle.preprocess`."""
        arrays: Arrays = {}
        if texts is not None:
            arrays |= self._from_texts(
                list(texts) if isinstance(texts, Iterable) and not isinstance(texts, str) else [texts]
            )
        if images is not None:
            arrays |= self._from_images(list(images) if isinstance(images, list | tuple) else [images])
        if sounds is not None:
            arrays |= self._from_sounds(list(sounds) if isinstance(sounds, list | tuple) else [sounds])
        specs = {spec.name: spec for spec in self.manifest.inputs}
        return {name: array.astype(numpy_dtype(specs[name])) for name, array in arrays.items() if name in specs}

    @cached_property
    def tokenizer(self) -> Any:
        """The bundle's tokenizer, loaded by transformers.

        Raises:
            ConfigError: The bundle has no tokenizer.
            BundleError: The tokenizer cannot be loaded.
        """
        self._check_preprocessor("tokenizer")
        return preprocessors.load(self._folder, "tokenizer")

    @cached_property
    def image_processor(self) -> Any:
        """The bundle's image processor, loaded by transformers; raises like `tokenizer`."""
        self._check_preprocessor("image_processor")
        return preprocessors.load(self._folder, "image_processor")

    @cached_property
    def feature_extractor(self) -> Any:
        """The bundle's feature extractor, loaded by transformers; raises like `tokenizer`."""
        self._check_preprocessor("feature_extractor")
        return preprocessors.load(self._folder, "feature_extractor")

    def _check_preprocessor(self, kind: preprocessors.Kind) -> None:
        if kind not in self.application.preprocessors:
            title = kind.replace("_", " ")
            reasons = [reason for reason in self.application.missing if reason.startswith(title)]
            reason = reasons[0] if reasons else "the source had none, or the bundle is a part of a generative model"
            raise ConfigError(
                f"the bundle has no {title} ({reason})",
                location=str(self._folder),
                hint=f"Give the inputs by name, with bundle(**inputs). {describe_inputs(self.manifest)}",
            )

    def _from_texts(self, texts: Sequence[str]) -> Arrays:
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError("expected one or more texts", location="texts")
        tokenizer, names = self.tokenizer, {spec.name for spec in self.manifest.inputs}
        shortest, longest, step = self._lengths()
        limit = min(longest, tokenizer.model_max_length)
        truncation = {"truncation": True, "max_length": limit} if limit < _UNLIMITED else {}
        texts = [self.application.prompt + text for text in texts]
        encoded = _encoded(tokenizer, texts, **truncation)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        if truncation and max(lengths) == limit:
            whole = max(len(ids) for ids in _encoded(tokenizer, texts)["input_ids"])
            if whole > limit:
                _logger.warning("A text has %d tokens and is cut to %d, the longest that was checked.", whole, limit)
        width = round_up(max(shortest, *lengths), step)
        if min(lengths) < width:
            has_mask, pad_token = "attention_mask" in names, preprocessors.pad_token(tokenizer)
            if not has_mask or pad_token is None:
                missing = "the tokenizer has no padding token" if has_mask else "the model has no attention mask"
                can_run_alone = all(length == round_up(max(shortest, length), step) for length in lengths)
                raise ConfigError(
                    f"the texts have {', '.join(map(str, lengths))} tokens and need padding to {width}, but {missing}",
                    location="texts",
                    hint="Pass one text at a time." if can_run_alone else None,
                )
            # Always on the right: padding before a text would change its positions.
            pad = {"padding": "max_length", "padding_side": "right", "truncation": True, "max_length": width}
            encoded = _encoded(tokenizer, texts, **pad)
        arrays = {name: np.asarray(rows) for name, rows in encoded.items()}
        return {"token_type_ids": np.zeros_like(arrays["input_ids"]), **arrays}

    def _lengths(self) -> tuple[int, int, int]:
        """Returns the smallest and the largest verified number of tokens, and ``multiple_of``."""
        shape = next((spec.shape for spec in self.manifest.inputs if spec.name == "input_ids"), [])
        size = shape[-1] if shape else ""
        if isinstance(size, int):
            return size, size, 1
        dim = self.manifest.dims.get(size)
        return (1, _UNLIMITED, 1) if dim is None else (dim.min, dim.max or _UNLIMITED, dim.multiple_of)

    def _from_images(self, sources: Sequence[Any]) -> Arrays:
        if not sources:
            raise ConfigError("expected one or more images", location="images")
        processor = self.image_processor
        try:
            return dict(processor(images=[images.read(image) for image in sources], return_tensors="np"))
        except ConfigError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(f"the images cannot be processed: {first_line(error)}", location="images") from error

    def _from_sounds(self, sources: Sequence[Any]) -> Arrays:
        if not sources:
            raise ConfigError("expected one or more sounds", location="sounds")
        extractor = self.feature_extractor
        rate = int(extractor.sampling_rate)
        waves = [sounds.read(sound, rate) for sound in sources]
        has_mask = any(spec.name == "attention_mask" for spec in self.manifest.inputs)
        options = {"return_attention_mask": True} if has_mask else {}
        try:
            arrays = {
                name: np.asarray(rows)
                for name, rows in extractor(waves, sampling_rate=rate, return_tensors="np", **options).items()
            }
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(f"the sounds cannot be processed: {first_line(error)}", location="sounds") from error
        if any(array.dtype == object for array in arrays.values()):  # rows of different lengths
            lengths = ", ".join(str(len(wave)) for wave in waves)
            raise ConfigError(
                f"the sounds have different lengths ({lengths} samples)",
                location="sounds",
                hint="Pass one sound at a time.",
            )
        return arrays


def _encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> Any:
    try:
        with panics_as_errors():
            return tokenizer(texts, **options)
    except Exception as error:  # for example half a surrogate pair, from a wrong encoding
        raise ConfigError(f"the tokenizer rejects the texts: {first_line(error)}", location="texts") from error
