"""Tokenizers and processors in a bundle: saves and loads them.

They are data: JSON, texts and vocabularies. Custom code is neither saved nor run.
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

# The inputs that each kind returns, and the files that show that a model has one.
_INPUTS: dict[Kind, set[str]] = {
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
_BACKENDS: dict[Kind, dict[str, str]] = {"image_processor": {"backend": "pil"}}  # other backends need torchvision
# Neither code nor pickles.
SUFFIXES = {".json", ".txt", ".model", ".jinja", ".vocab", ".spm", ".bpe"}
# Local paths and load options, which have no use on another machine.
_LOCAL_SETTINGS = {
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
    """The saved kinds.

    Attributes:
        missing: Reasons for kinds that the source has, but that were not saved.
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
    """Saves the tokenizer or processor of a model to ``preprocessor/`` in a bundle, if any.

    Args:
        pretrained: The location of the model's tokenizer or processor.
        inputs: The names of the model's inputs.
        folder: The bundle's folder.
        longest: The most tokens that the model takes, if known; many tokenizers do not know it.
        gives_tokens: Whether a tokenizer decodes the model's outputs.
    """
    kinds: list[Kind] = []
    missing: list[str] = []
    if pretrained is None:
        return Saved()
    # For a model from a factory, only a name is known: nothing is downloaded for it.
    options = {"local_files_only": True, **pretrained.options}
    for kind, names in _INPUTS.items():
        if names.isdisjoint(inputs) and not (gives_tokens and kind == "tokenizer"):
            continue
        try:
            if not _is_available(pretrained, kind, options):
                continue
            if pretrained.name:
                _check_links(Path(pretrained.name))
            processor = _load(pretrained, kind, options)
            if kind == "tokenizer" and longest is not None:
                processor.model_max_length = min(processor.model_max_length, longest)
            _save(processor, folder / FOLDER)
            kinds.append(kind)
        except Exception as error:  # transformers raises many kinds; the model works without it
            missing.append(f"{kind.replace('_', ' ')}: {first_line(error)}")
    return Saved(tuple(kinds), tuple(missing))


def _check_links(source: Path) -> None:
    """Rejects links out of a model's folder, which could copy any local file into a bundle."""
    if not source.is_dir():  # a hub id: the hub's client writes the files
        return
    inside = source.resolve()
    blobs = inside.parent.parent / "blobs"  # the hub's cache has links to this folder
    for path in sorted(source.rglob("*")):
        if path.is_symlink() and (path.suffix in SUFFIXES or path.is_dir()):
            target = path.resolve()
            is_blob = inside.parent.name == "snapshots" and target.parent == blobs
            if not (target.is_relative_to(inside) or is_blob):
                raise ValueError(
                    f"{path.relative_to(source)} is a link out of the model's folder; copy the file into the folder"
                )


def _find_loaded(pretrained: Pretrained, kind: Kind) -> Any:
    """Returns the processor that was loaded with the model, or None."""
    return {"tokenizer": pretrained.tokenizer, "image_processor": pretrained.image_processor}.get(kind)


def _is_available(pretrained: Pretrained, kind: Kind, options: Mapping[str, Any]) -> bool:
    if _find_loaded(pretrained, kind) is not None:
        return True
    if not pretrained.name:  # a model in memory, with processors that were passed in Python
        return False
    return any(find(pretrained.name, name, options) is not None for name in _FILES[kind])


def _load(pretrained: Pretrained, kind: Kind, options: Mapping[str, Any]) -> Any:
    import transformers

    if (processor := _find_loaded(pretrained, kind)) is not None:
        return processor
    with panics_as_errors():
        return getattr(transformers, _AUTO_CLASSES[kind]).from_pretrained(
            pretrained.name, **_BACKENDS.get(kind, {}), **options
        )


def _save(processor: Any, folder: Path) -> None:
    """Writes the same files for the same processor, independent of its origin and use."""
    if not type(processor).__module__.startswith("transformers."):
        raise ValueError(f"{type(processor).__name__} is custom code, which is not saved in a bundle")
    if getattr(processor, "is_fast", False):  # calls change the padding and truncation settings
        processor.backend_tokenizer.no_padding()
        processor.backend_tokenizer.no_truncation()
    with signals.temporary_folder() as scratch:
        processor.save_pretrained(scratch)
        files = [path for path in sorted(scratch.rglob("*")) if path.is_file()]
        if unsafe := [path.name for path in files if path.suffix not in SUFFIXES]:
            raise ValueError(f"the files {', '.join(unsafe)} may contain code, so they are not saved")
        for path in files:
            target = folder / path.relative_to(scratch)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.name.endswith("_config.json"):
                settings = json.loads(path.read_text(encoding="utf-8"))
                portable = {key: value for key, value in settings.items() if key not in _LOCAL_SETTINGS}
                text = json.dumps(portable, indent=2, sort_keys=True, ensure_ascii=False)
                target.write_text(f"{text}\n", encoding="utf-8")
            else:
                shutil.copyfile(path, target)


def load(folder: Path, kind: Kind) -> Any:
    """Loads a tokenizer or processor of a bundle, with classes of transformers only.

    Args:
        folder: The bundle's folder.

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
            f"transformers cannot load the {kind.replace('_', ' ')}: {first_line(error)}",
            location=FOLDER,
            hint="Export the bundle again.",
        ) from error


def pad_token(tokenizer: Any) -> str | None:
    """Returns the token that a tokenizer pads with; by default the end token."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer.pad_token  # type: ignore[no-any-return]  # the tokenizer is untyped
