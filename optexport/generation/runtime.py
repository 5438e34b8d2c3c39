"""Generation with exported files, without the original model; only texts need transformers, for the tokenizer.

::

    generator = Generator.load("build/llama")  # written by optexport.export_generation
    ids = generator.generate(input_ids, attention_mask, max_new_tokens=64)
    texts = generator.generate_text(["once upon a time"], do_sample=True, temperature=0.8)
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optexport._utils import atomic_dir
from optexport._utils.paths import as_path
from optexport.bundle.layout import GENERATION
from optexport.bundle.manifest import ArtifactRecord, Manifest, TensorRecord
from optexport.bundle.parts import read_generation
from optexport.errors import ConfigError, first_line
from optexport.exporters import targets
from optexport.exporters.format import Run
from optexport.generation.names import next_past
from optexport.generation.sampling import Sampling
from optexport.inference.arrays import as_input
from optexport.loading import preprocessors

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """The parts of a generative model, ready to run.

    Attributes:
        encoder: The encoder, or None. Without it, ``start`` is None too.
        caches: The decoder's inputs for its self-attention cache.
        start: The first token of a decoder with an encoder.
        recompute_length: The number of tokens after which the cache is recomputed, or None.
    """

    decoder: Run
    caches: tuple[TensorRecord, ...]
    encoder: Run | None = None
    start: int | None = None
    recompute_length: int | None = None

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """Returns the first inputs of the decoder: prompt or start, masks, and caches."""
        rows = next(iter(inputs.values())).shape[0]
        sizes = {"batch": rows, "past_sequence": 0}
        empty = {}
        for spec in self.caches:
            shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
            empty[spec.name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        if self.encoder is None:
            return {**inputs, **empty}
        mask = {"encoder_attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
        start = torch.full((rows, 1), self.start or 0, dtype=torch.int64)
        return {"input_ids": start, **mask, **empty, **next_past(self.encoder(inputs))}

    def step(self, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Runs the decoder once.

        Returns:
            The logits of the next token, [batch, vocabulary], and the cache, as inputs of the next call.
        """
        outputs = self.decoder(inputs)
        return outputs["logits"][:, -1], next_past(outputs)

    def generate(
        self,
        inputs: Mapping[str, torch.Tensor],
        tokens: int,
        eos: Sequence[int] = (),
        pad: int = 0,
        sampling: Sampling | None = None,
    ) -> torch.Tensor:
        """Returns new tokens until all rows end: int64 [batch, at most ``tokens``].

        A row that ended with a token of ``eos`` continues with ``pad``.
        """
        step_inputs, choose = self.begin(inputs), (sampling or Sampling()).start()
        text = step_inputs["input_ids"]
        prompt_length = text.shape[1]
        ended = torch.zeros(text.shape[0], dtype=torch.bool)
        while text.shape[1] < prompt_length + tokens and not bool(ended.all()):
            logits, past = self.step(step_inputs)
            mask = step_inputs.get("attention_mask")
            # The padding before a text is not part of it, but its last token is.
            real = text if mask is None else torch.where(mask == 0, text[:, -1:], text)
            token = torch.where(ended, pad, choose(logits, real))
            text = torch.cat([text, token[:, None]], 1)
            ended = ended | torch.isin(token, torch.tensor(list(eos), dtype=torch.int64))
            step_inputs = {**step_inputs, **past, "input_ids": token[:, None]}
            if mask is not None:
                step_inputs["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                if mask.shape[1] == self.recompute_length:
                    step_inputs = self.begin({"input_ids": text, "attention_mask": step_inputs["attention_mask"]})
        return text[:, prompt_length:]


class Generator:
    """Generates tokens or texts with exported files, with the most likely token or by sampling."""

    def __init__(
        self,
        parts: Parts,
        inputs: Sequence[TensorRecord],
        eos: Sequence[int],
        pad: int | None,
        bundle: Path | None = None,
    ) -> None:
        self._parts, self._inputs, self._eos, self._pad, self._bundle = parts, inputs, tuple(eos), pad, bundle

    @classmethod
    def load(cls, folder: str | Path, file_format: str = "onnx") -> Generator:
        """Opens the output of `optexport.export_generation`, after checking that it is unchanged.

        Args:
            file_format: A format that was exported.

        Raises:
            ConfigError: The folder is not such an export, or has no file in that format.
            BundleError: A file is missing, added or changed.
        """
        folder = as_path(folder, "folder")
        atomic_dir.recover(folder)
        if not (folder / GENERATION).is_file():
            raise ConfigError(
                f"the folder has no {GENERATION}", location=str(folder), hint="Give the output of export_generation."
            )
        document, manifests = read_generation(folder)
        parts = open_parts(folder, manifests, file_format, document["start"], document.get("recompute_length"))
        first = manifests.get("encoder", manifests["decoder"])
        specs = [spec for spec in first.inputs if spec not in parts.caches]
        application = manifests["decoder"].application
        has_tokenizer = application is not None and "tokenizer" in application.preprocessors
        bundle = folder / "decoder" if has_tokenizer else None
        return cls(parts, specs, document["eos"], document["pad"], bundle)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the export, loaded by transformers.

        Raises:
            ConfigError: The export has no tokenizer.
            BundleError: The tokenizer cannot be loaded.
        """
        if self._bundle is None:
            raise ConfigError(
                "the export has no tokenizer",
                location="generate",
                hint="Export again with export_generation(tokenizer=...), or from a folder that has one.",
            )
        return preprocessors.load(self._bundle, "tokenizer")

    def generate_text(self, texts: str | Sequence[str], **settings: Any) -> list[str]:
        """Returns the new text for each text, without special tokens.

        Args:
            texts: One text, or several; they are padded on the left, or on the right for an encoder.
            settings: As for `generate`, except its inputs.

        Raises:
            ConfigError: The export has no tokenizer, or a setting is invalid.
        """
        tokenizer = self.tokenizer
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError("expected one or more texts", location="generate_text")
        side = "left" if self._parts.encoder is None else "right"  # padding before a text changes its positions
        options = {"padding": True, "padding_side": side} if preprocessors.pad_token(tokenizer) is not None else {}
        encoded = tokenizer(texts, return_attention_mask=True, **options)
        ids = self.generate(encoded["input_ids"], encoded["attention_mask"], **settings)
        start = 1 if self._parts.encoder is not None else len(encoded["input_ids"][0])
        return [str(text) for text in tokenizer.batch_decode(ids[:, start:], skip_special_tokens=True)]

    def generate(  # noqa: PLR0913 - as in transformers
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        *,
        max_new_tokens: int = 64,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        **inputs: Any,
    ) -> Array:
        """Returns the tokens of ``model.generate`` with the same settings.

        Settings of the model's generation config are ignored, except its end tokens.

        Args:
            input_ids: int64 [batch, sequence], padded on the left where the mask is 0.
            attention_mask: int64 [batch, sequence]; by default all ones.
            max_new_tokens: The largest number of tokens to add.
            eos_token_id: The tokens that end a row; by default from the model's generation config, and none if ``()``.
            do_sample: Whether to draw each token at random; by default, each is the most likely one.
            temperature: Divides the logits before a draw: below 1, likely tokens become more likely.
            top_k: Draws only from this many of the most likely tokens; from all if 0 or None.
            top_p: Draws only from the most likely tokens that together have this probability.
            repetition_penalty: Makes tokens of the prompt and earlier ones less likely if above 1.
            seed: The seed of the draws. With ``torch.manual_seed(seed)`` first, ``model.generate`` draws the same.
            inputs: Other inputs of an encoder, such as ``input_features``.

        Returns:
            int64 [batch, sequence + new tokens]; for a model with an encoder [batch, 1 + new tokens].

        Raises:
            ConfigError: The arguments are invalid, or the files do not run with them.
        """
        tensors = self._prepare({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        if not isinstance(max_new_tokens, numbers.Integral) or max_new_tokens < 1:
            message = f"the number must be at least 1 (found {max_new_tokens})"
            raise ConfigError(message, location="generate: max_new_tokens")
        if self._parts.encoder is None:
            check_left_padded(tensors, "generate")
        sampling = Sampling(do_sample, temperature, top_k, top_p, repetition_penalty, seed)
        eos = self._eos if eos_token_id is None else _token_ids(eos_token_id)
        pad = self._pad if self._pad is not None else next(iter(eos), 0)
        try:
            new = self._parts.generate(tensors, int(max_new_tokens), eos, pad, sampling)
        except Exception as error:  # each runtime has its own exceptions
            raise ConfigError(
                f"the exported files fail on these inputs: {first_line(error)}",
                location="generate",
                hint="Use ids of the model's vocabulary, and at most as many tokens as the model has positions.",
            ) from error
        rows = new.shape[0]
        before = tensors["input_ids"] if self._parts.encoder is None else torch.full((rows, 1), self._parts.start or 0)
        return torch.cat([before, new], 1).numpy()

    def _prepare(self, inputs: Mapping[str, Any]) -> Tensors:
        """Returns the inputs of the first part, with a mask of ones by default."""
        arrays = {name: np.asarray(value) for name, value in _rectangular(inputs).items() if value is not None}
        specs = {spec.name: spec for spec in self._inputs}
        if "attention_mask" in specs and "input_ids" in arrays:
            arrays.setdefault("attention_mask", np.ones(arrays["input_ids"].shape, np.int64))
        hint = f"Give the inputs {', '.join(specs)}."
        for name in arrays:
            if name not in specs:
                raise ConfigError("the model has no input of this name", location=f"generate: {name}", hint=hint)
        if missing := [name for name in specs if name not in arrays]:
            raise ConfigError(f"inputs are missing: {', '.join(missing)}", location="generate", hint=hint)
        tensors = {
            name: torch.from_numpy(as_input(spec, arrays[name])).to(getattr(torch, spec.dtype))
            for name, spec in specs.items()
        }
        for name, tensor in tensors.items():
            if not tensor.numel():
                raise ConfigError(f"the input is empty (shape {list(tensor.shape)})", location=f"generate: {name}")
        return tensors


def _token_ids(value: Any) -> list[int]:
    """Converts a token id, or several, to a list."""
    tokens: list[Any] = [value] if isinstance(value, str | numbers.Number) else list(value)
    if not all(isinstance(token, numbers.Integral) for token in tokens):
        raise ConfigError(f"{value!r} is not a token id or a list of them", location="generate: eos_token_id")
    return [int(token) for token in tokens]


def _rectangular(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Converts lists to arrays; rejects rows of different lengths."""
    try:
        return {name: np.asarray(value) if isinstance(value, list | tuple) else value for name, value in inputs.items()}
    except ValueError as error:
        raise ConfigError(
            "the rows of an input have different lengths",
            location="generate",
            hint="Pad the rows (on the left if the model has no encoder), and give attention_mask.",
        ) from error


def check_left_padded(inputs: Mapping[str, torch.Tensor], location: str) -> None:
    """Checks that padding is on the left, so that the last token of every row is real.

    Raises:
        ConfigError: The last token of a row is padding, or the shapes of mask and tokens differ.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or ids.dim() != 2:
        raise ConfigError(
            "input_ids and attention_mask must both have the shape [batch, sequence] "
            f"(found {list(ids.shape)} and {list(mask.shape)})",
            location=location,
        )
    if not ids.shape[1] or not bool(mask[:, -1].all()):
        raise ConfigError(
            "a row has padding at its end, so new tokens would follow the padding",
            location=f"{location}: attention_mask",
            hint='Pad on the left: tokenizer.padding_side = "left".',
        )


def open_parts(
    folder: Path, manifests: Mapping[str, Manifest], file_format: str, start: int | None, recompute_length: int | None
) -> Parts:
    """Opens the files of one format.

    Raises:
        ConfigError: No file of that format was exported.
        OptexportError: A runtime rejects a file.
    """
    runs = {name: _open(folder / name, manifest, file_format) for name, manifest in manifests.items()}
    caches = tuple(spec for spec in manifests["decoder"].inputs if "past_sequence" in spec.shape)
    return Parts(runs["decoder"], caches, runs.get("encoder"), start, recompute_length)


def _open(folder: Path, manifest: Manifest, file_format: str) -> Run:
    artifacts: dict[str, ArtifactRecord] = {artifact.format: artifact for artifact in manifest.artifacts}
    if (artifact := artifacts.get(file_format)) is None:
        hint = f"Choose from: {', '.join(artifacts)}."
        raise ConfigError(f"no file was exported in the format {file_format}", location=str(folder), hint=hint)
    outputs = [output.name for output in manifest.outputs]
    *_, (_, run) = targets.open_file(folder / artifact.path, file_format, outputs)
    return run
