"""Greedy decoding over exported files. Needs neither transformers nor the original model.

generator = Generator.load("build/llama")  # what `optexport.export_generation` wrote
ids = generator.generate(input_ids, attention_mask, max_new_tokens=64)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optexport import bundle_files, runtimes, sealed_json
from optexport.errors import BundleError, ConfigError
from optexport.generation.names import next_past
from optexport.manifest import Manifest, TensorRecord
from optexport.runtimes import Run

DOCUMENT = "generation.json"

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """The parts of a generative model, ready to run.

    Attributes:
        encoder: None of a model without one; ``start`` is then None too.
        caches: The inputs of the decoder that hold its own cache.
        start: The token that a decoder behind an encoder begins with.
    """

    decoder: Run
    caches: tuple[TensorRecord, ...]
    encoder: Run | None = None
    start: int | None = None

    def begin(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """What the decoder is given first: prompt or start, masks, an empty cache, and what the encoder gives."""
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

    def step(self, given: Tensors) -> tuple[torch.Tensor, Tensors]:
        """One call of the decoder.

        Returns:
            The logits of the next token, [batch, vocabulary], and the cache, as inputs of the next call.
        """
        outputs = self.decoder(given)
        return outputs["logits"][:, -1], next_past(outputs)

    def greedy(
        self, inputs: Mapping[str, torch.Tensor], tokens: int, eos: Sequence[int] = (), pad: int = 0
    ) -> torch.Tensor:
        """The likeliest token again and again, until all rows have ended: int64 [batch, up to that many tokens].

        A row that has ended with one of ``eos`` goes on with ``pad``.
        """
        given = self.begin(inputs)
        taken: list[torch.Tensor] = []
        ended = torch.zeros(given["input_ids"].shape[0], dtype=torch.bool)
        while len(taken) < tokens and not bool(ended.all()):
            logits, past = self.step(given)
            token = torch.where(ended, pad, logits.argmax(-1))
            ended = ended | torch.isin(token, torch.tensor(list(eos), dtype=torch.int64))
            taken.append(token)
            given = {**given, **past, "input_ids": token[:, None]}
            if "attention_mask" in given:
                mask = given["attention_mask"]
                given["attention_mask"] = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return torch.stack(taken, 1)


class Generator:
    """Generates text with the files of an export, always with the likeliest token."""

    def __init__(self, parts: Parts, eos: Sequence[int], pad: int) -> None:
        self._parts, self._eos, self._pad = parts, tuple(eos), pad

    @classmethod
    def load(cls, folder: str | Path, file_format: str = "onnx") -> Generator:
        """Opens what `optexport.export_generation` wrote, after checking that nothing was changed.

        Args:
            file_format: "onnx", "torchscript" or "pt2", as far as it was exported.

        Raises:
            ConfigError: The folder is no such export, or holds no file of that format.
            BundleError: A file is missing, added or changed.
        """
        folder = Path(folder)
        if not (folder / DOCUMENT).is_file():
            raise ConfigError(f"it holds no {DOCUMENT}", place=str(folder), mend="Give what export_generation wrote.")
        document = sealed_json.read(folder / DOCUMENT)
        manifests = {name: bundle_files.read_manifest(folder / name) for name in document["parts"]}
        for name, digest in document["parts"].items():
            if manifests[name].digest != digest:
                raise BundleError("it belongs to another export", place=name)
        parts = open_parts(folder, manifests, file_format, document["start"])
        return cls(parts, document["eos"], document["pad"])

    def generate(
        self,
        input_ids: Array | None = None,
        attention_mask: Array | None = None,
        *,
        max_new_tokens: int = 64,
        eos_token_id: int | Sequence[int] | None = None,
        **inputs: Array,
    ) -> Array:
        """The tokens of ``model.generate(do_sample=False)``, as far as that only takes the likeliest.

        What a generation config may ask for besides (penalties, forced or forbidden tokens, beams) is not done.

        Args:
            input_ids: int64 [batch, sequence], padded at the left where the mask is 0.
            attention_mask: int64, of the same shape; by default all ones.
            max_new_tokens: How many tokens are added at the most.
            eos_token_id: What ends a row; by default what the model's generation config says, and nothing if ``()``.
            inputs: What an encoder takes besides, such as ``input_features``.

        Returns:
            int64 [batch, sequence + new tokens]; of a model with an encoder [batch, 1 + new tokens].

        Raises:
            ConfigError: The arguments do not fit.
        """
        given = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in inputs.items()}
        if input_ids is not None:
            ids = torch.from_numpy(np.ascontiguousarray(input_ids, dtype=np.int64))
            mask = np.ones(ids.shape, np.int64) if attention_mask is None else attention_mask
            given |= {"input_ids": ids, "attention_mask": torch.from_numpy(np.ascontiguousarray(mask, dtype=np.int64))}
        if not given:
            raise ConfigError("neither input_ids nor other inputs are given", place="generate")
        if max_new_tokens < 1:
            raise ConfigError(f"it must be at least 1, not {max_new_tokens}", place="generate: max_new_tokens")
        if self._parts.encoder is None:
            check_left_padded(given, "generate")
        eos = self._eos if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        new = self._parts.greedy(given, max_new_tokens, eos, self._pad)
        rows = new.shape[0]
        before = given["input_ids"] if self._parts.encoder is None else torch.full((rows, 1), self._parts.start or 0)
        return torch.cat([before, new], 1).numpy()


def check_left_padded(inputs: Mapping[str, torch.Tensor], place: str) -> None:
    """Checks that every row of a prompt ends with a token.

    Raises:
        ConfigError: One does not, or mask and tokens are of other shapes.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if ids.shape != mask.shape or ids.dim() != 2:
        raise ConfigError(
            f"input_ids are {list(ids.shape)} and attention_mask is {list(mask.shape)}, not both [batch, sequence]",
            place=place,
        )
    if not ids.shape[1] or not bool(mask[:, -1].all()):
        raise ConfigError(
            "a row ends with padding, and the new tokens would come after it",
            place=f"{place}: attention_mask",
            mend='Pad at the left: tokenizer.padding_side = "left".',
        )


def open_parts(folder: Path, manifests: Mapping[str, Manifest], file_format: str, start: int | None) -> Parts:
    """Opens the files of one format.

    Raises:
        ConfigError: There are none of that format.
        OptexportError: A runtime refuses a file.
    """
    runs = {name: _open(folder / name, manifest, file_format) for name, manifest in manifests.items()}
    own = tuple(spec for spec in manifests["decoder"].inputs if "past_sequence" in spec.shape)
    return Parts(runs["decoder"], own, runs.get("encoder"), start)


def _open(folder: Path, manifest: Manifest, file_format: str) -> Run:
    found = [artifact for artifact in manifest.artifacts if artifact.format == file_format]
    if not found:
        known = ", ".join(artifact.format for artifact in manifest.artifacts)
        raise ConfigError(f"no {file_format} file was exported", place=str(folder), mend=f"There is: {known}.")
    outputs = [output.name for output in manifest.outputs]
    *_, (_, run) = runtimes.open_file(folder / found[0].path, file_format, outputs)
    return run
