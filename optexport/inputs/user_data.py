"""Reads the user's texts, images or data file as one batch of model inputs."""

from __future__ import annotations

import inspect
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from optexport._utils.platform import free_memory
from optexport.config.inputs import InputsConfig
from optexport.errors import ConfigError, first_line, panics_as_errors
from optexport.inference import images
from optexport.inputs.data_lines import find_texts, read_lines, stack_records
from optexport.loading.loader import Pretrained
from optexport.signature import dtypes
from optexport.signature.signature import Batch
from optexport.signature.token_limit import find_token_limit

# Tokenizers without a maximum length report 1e30.
_UNLIMITED = 10**9


def read_data(config: InputsConfig, folder: Path, model: nn.Module, pretrained: Pretrained | None) -> tuple[Batch, ...]:
    """Reads the user's texts, images or file as one batch; returns nothing without data."""
    if config.texts is not None:
        return (_from_texts(config.texts, model, pretrained, config.max_length, "inputs.texts"),)
    if config.images is not None:
        return (_from_images([folder / Path(image).expanduser() for image in config.images], pretrained),)
    if config.data is not None:
        return (_from_file(folder / Path(config.data).expanduser(), model, pretrained, config.max_length),)
    return ()


def _from_texts(
    texts: Sequence[str], model: nn.Module, pretrained: Pretrained | None, max_length: int | None, location: str
) -> Batch:
    import transformers

    if pretrained is None:
        raise ConfigError("the model has no tokenizer", location=location, hint="Give its inputs as data instead.")
    try:
        if (tokenizer := pretrained.tokenizer) is None:
            with panics_as_errors():
                tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained.name, **pretrained.options)
    except Exception as error:  # transformers raises many types without a tokenizer
        raise ConfigError(
            f"the model's tokenizer cannot be loaded: {first_line(error)}",
            location=location,
            hint="Give token ids as data instead.",
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None and len(texts) > 1:
        raise ConfigError(
            "the model's tokenizer has no padding token",
            location=location,
            hint="Give a single text, or token ids as data.",
        )
    config: Any = model.config
    # RoBERTa has more positions than it takes tokens; only its tokenizer has the right limit.
    limit = max_length or min(find_token_limit(config) or _UNLIMITED, tokenizer.model_max_length)
    cut = {"truncation": True, "max_length": limit} if limit < _UNLIMITED else {}
    prompted = [pretrained.prompt + text for text in texts]
    try:
        with panics_as_errors():
            encoded = tokenizer(prompted, padding=len(texts) > 1, return_tensors="pt", **cut)
    except Exception as error:  # transformers raises many types of exceptions
        raise ConfigError(
            f"the model's tokenizer rejects the texts: {first_line(error)}",
            location=location,
            hint="Give token ids as data instead.",
        ) from error
    ids = encoded["input_ids"]
    words = ~torch.isin(ids, torch.tensor([i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id]))
    if not words.any() or (tokenizer.unk_token_id is not None and (ids[words] == tokenizer.unk_token_id).all()):
        if len(tokenizer) == len({*tokenizer.all_special_ids}):  # transformers creates an empty tokenizer without files
            raise ConfigError(
                "the model has no tokenizer, or one that knows only special tokens",
                location=location,
                hint="Save the tokenizer with its vocabulary beside the model, or give token ids as data instead.",
            )
        raise ConfigError(
            "the tokenizer knows none of the words: all tokens of the texts are unknown",
            location=location,
            hint="Use the model's own tokenizer and texts in its language, or give token ids as data instead.",
        )
    accepted = inspect.signature(model.forward).parameters
    batch = {name: value for name, value in encoded.items() if name in accepted}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        start = config.decoder_start_token_id or 0
        batch["decoder_input_ids"] = torch.cat(
            [torch.full_like(ids[:, :1], start), ids[:, : max(ids.shape[1] // 2, 1)]], 1
        )
    return batch


def _from_images(paths: Sequence[Path], pretrained: Pretrained | None) -> Batch:
    import transformers

    if pretrained is None:
        raise ConfigError(
            "the model has no image processor",
            location="inputs.images",
            hint="Give its inputs with inputs.data, such as an .npz file of arrays by name, or with inputs.tensors.",
        )
    loaded = [_image(path) for path in paths]
    try:
        processor = pretrained.image_processor or transformers.AutoImageProcessor.from_pretrained(
            pretrained.name, backend="pil", **pretrained.options
        )
        return dict(processor(images=loaded, return_tensors="pt"))
    except Exception as error:  # transformers raises many types of exceptions
        raise ConfigError(f"the images cannot be processed: {first_line(error)}", location="inputs.images") from error


def _image(path: Path) -> Any:
    try:
        return images.read(path)
    except ConfigError as error:
        raise ConfigError(error.message, location=f"inputs.images: {path.name}", hint=error.hint) from error


def _from_file(path: Path, model: nn.Module, pretrained: Pretrained | None, max_length: int | None) -> Batch:
    location = f"inputs.data: {path.name}"
    batch = _read(path, location, model, pretrained, max_length)
    if not batch or any(not tensor.numel() for tensor in batch.values()):
        raise ConfigError("an input in the file is empty" if batch else "the file has no inputs", location=location)
    dtypes.check(batch, location)
    return batch


def _read(path: Path, location: str, model: nn.Module, pretrained: Pretrained | None, max_length: int | None) -> Batch:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if path.suffix == ".npz":
            if not zipfile.is_zipfile(path):
                raise ValueError("not an archive of arrays")
            _check_memory(path, location)
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if path.suffix == ".jsonl":
            records = read_lines(path.read_text(encoding="utf-8-sig"), location)
            texts = find_texts(records, location)
            if texts is not None:
                return _from_texts(texts, model, pretrained, max_length, location)
            return stack_records(records, model, location)
    except ConfigError:
        raise
    except Exception as error:  # each format raises other types
        raise ConfigError(f"the file cannot be read: {first_line(error)}", location=location) from error
    raise ConfigError(
        f"unknown file format ({path.suffix or path.name})",
        location=location,
        hint="Use .safetensors, .npz or .jsonl.",
    )


def _check_memory(path: Path, location: str) -> None:
    """Checks that an archive's arrays fit into memory; zeros compress a thousandfold."""
    with zipfile.ZipFile(path) as archive:
        needed = sum(info.file_size for info in archive.infolist())
    if needed > (free := free_memory()):
        raise ConfigError(
            f"the arrays do not fit into memory (expected {needed / 2**30:.1f} GiB free, found {free / 2**30:.1f} GiB)",
            location=location,
            hint="Give fewer rows, or free memory.",
        )
