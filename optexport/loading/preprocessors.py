"""Tokenizers and processors that travel in a bundle: written beside its files, and loaded from there.

They are data: JSON, texts and vocabularies. Code of others is neither written nor run when they are loaded.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optexport._utils import signals
from optexport.errors import BundleError, first_line, panics_as_errors
from optexport.loading.pretrained_files import find

if TYPE_CHECKING:
    from optexport.loading.loader import Pretrained

FOLDER = "preprocessor"
Kind = Literal["tokenizer", "image_processor", "feature_extractor"]

# What each kind makes of texts, images and sounds, and the files of which one at least lies where there is one.
_MAKES: dict[Kind, set[str]] = {
    "tokenizer": {"input_ids"},
    "image_processor": {"pixel_values"},
    "feature_extractor": {"input_values", "input_features"},
}
_VOCABULARIES = ("tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model")
_FILES: dict[Kind, tuple[str, ...]] = {
    "tokenizer": ("tokenizer_config.json", "tokenizer.json", *_VOCABULARIES),
    "image_processor": ("preprocessor_config.json", "processor_config.json"),
    "feature_extractor": ("preprocessor_config.json", "processor_config.json"),
}
_AUTO_CLASSES: dict[Kind, str] = {
    "tokenizer": "AutoTokenizer",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
}
_BACKENDS: dict[Kind, dict[str, str]] = {"image_processor": {"backend": "pil"}}  # others want torchvision
# Neither code nor pickles.
_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".vocab", ".spm", ".bpe"}
# Where the files came from and how they were loaded, which another machine has no use for.
_OF_THIS_MACHINE = {
    *(
        "name_or_path",
        "_name_or_path",
        "is_local",
        "local_files_only",
        "_commit_hash",
        "cache_dir",
        "token",
        "revision",
    ),
    *("tokenizer_file", "vocab_file", "merges_file", "spm_file", "special_tokens_map_file", "auto_map"),
}


@dataclass(frozen=True)
class Saved:
    """What was written.

    Attributes:
        missing: Why what the source has was not.
    """

    kinds: tuple[Kind, ...] = ()
    missing: tuple[str, ...] = ()


def save(
    pretrained: Pretrained | None,
    inputs: Collection[str],
    folder: Path,
    longest: int | None = None,
    *,
    gives_tokens: bool = False,
) -> Saved:
    """Writes what makes a model's inputs, if its source has it, to ``preprocessor/`` of a bundle.

    Args:
        pretrained: Where the model's tokenizer or processor is.
        inputs: The names of the model's inputs.
        folder: The bundle's.
        longest: How many tokens the model takes, where it tells; many a tokenizer does not.
        gives_tokens: Whether a tokenizer reads what the model gives, whatever it takes.
    """
    kinds: list[Kind] = []
    missing: list[str] = []
    if pretrained is None:
        return Saved()
    # Of a model that a factory made nothing but its name is known: nothing is fetched for that.
    options = {"local_files_only": True, **pretrained.options}
    for kind, makes in _MAKES.items():
        if makes.isdisjoint(inputs) and not (gives_tokens and kind == "tokenizer"):
            continue
        try:
            if not _is_there(pretrained, kind, options):
                continue
            _check_links(Path(pretrained.name))
            processor = _loaded(pretrained, kind, options)
            if kind == "tokenizer" and longest is not None:
                processor.model_max_length = min(processor.model_max_length, longest)
            _save(processor, folder / FOLDER)
            kinds.append(kind)
        except Exception as error:  # transformers raises many kinds; the model itself is good without it
            missing.append(f"{kind.replace('_', ' ')}: {first_line(error)}")
    return Saved(tuple(kinds), tuple(missing))


def _check_links(source: Path) -> None:
    """Refuses a link out of a model's folder: another's folder would carry any file of this machine into a bundle."""
    if not source.is_dir():  # a hub id, whose files the hub's own client lays down
        return
    inside = source.resolve()
    blobs = inside.parent.parent / "blobs"  # where the hub's cache keeps what its snapshots link to
    for path in sorted(source.rglob("*")):
        if path.is_symlink() and (path.suffix in _SUFFIXES or path.is_dir()):
            aim = path.resolve()
            if not (aim.is_relative_to(inside) or (inside.parent.name == "snapshots" and aim.parent == blobs)):
                raise ValueError(f"{path.relative_to(source)} is a link out of the model's folder: copy the file there")


def _at_hand(pretrained: Pretrained, kind: Kind) -> Any:
    """What was loaded with the model; None where nothing was."""
    return {"tokenizer": pretrained.tokenizer, "image_processor": pretrained.image_processor}.get(kind)


def _is_there(pretrained: Pretrained, kind: Kind, options: Mapping[str, Any]) -> bool:
    if _at_hand(pretrained, kind) is not None:
        return True
    return any(find(pretrained.name, name, options) is not None for name in _FILES[kind])


def _loaded(pretrained: Pretrained, kind: Kind, options: Mapping[str, Any]) -> Any:
    import transformers

    if (processor := _at_hand(pretrained, kind)) is not None:
        return processor
    with panics_as_errors():
        return getattr(transformers, _AUTO_CLASSES[kind]).from_pretrained(
            pretrained.name, **_BACKENDS.get(kind, {}), **options
        )


def _save(processor: Any, folder: Path) -> None:
    """Writes files that are the same for the same processor, wherever it came from and whatever it was used for."""
    if not type(processor).__module__.startswith("transformers."):
        raise ValueError(f"{type(processor).__name__} is code of the model's own, which no bundle holds")
    if getattr(processor, "is_fast", False):  # a call leaves its padding and its limit behind
        processor.backend_tokenizer.no_padding()
        processor.backend_tokenizer.no_truncation()
    with signals.temporary_folder() as scratch:
        processor.save_pretrained(scratch)
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        if odd := [path.name for path in files if path.suffix not in _SUFFIXES]:
            raise ValueError(f"it is kept in {', '.join(odd)}, which may hold code")
        for path in files:
            location = folder / path.relative_to(scratch)
            location.parent.mkdir(parents=True, exist_ok=True)
            if path.name.endswith("_config.json"):
                settings = json.loads(path.read_text(encoding="utf-8"))
                kept = {key: value for key, value in settings.items() if key not in _OF_THIS_MACHINE}
                text = json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False)
                location.write_text(f"{text}\n", encoding="utf-8")
            else:
                shutil.copyfile(path, location)


def load(folder: Path, kind: Kind) -> Any:
    """Loads a tokenizer or processor of a bundle, with classes of transformers alone.

    Args:
        folder: The bundle's.

    Raises:
        BundleError: It cannot be loaded.
    """
    import transformers

    try:
        with panics_as_errors():
            return getattr(transformers, _AUTO_CLASSES[kind]).from_pretrained(
                folder / FOLDER, local_files_only=True, trust_remote_code=False, **_BACKENDS.get(kind, {})
            )
    except Exception as error:  # transformers raises many kinds
        raise BundleError(
            f"transformers cannot load it: {first_line(error)}", location=f"{FOLDER}, {kind.replace('_', ' ')}"
        ) from error


def pad_token(tokenizer: Any) -> str | None:
    """What a tokenizer pads with: its own token, or else that of the end, as models without one do."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer.pad_token  # type: ignore[no-any-return]  # a tokenizer of any class
