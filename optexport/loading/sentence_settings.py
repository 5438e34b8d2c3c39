"""Checks that the settings in a sentence-transformers folder are harmless.

sentence-transformers passes tables of ``sentence_bert_config.json`` to ``from_pretrained`` unchanged. There,
``weights_only = false`` unpickles the weights, which runs any code, and ``vocab_file`` reads any file of the machine.
Modules may have any class in sentence-transformers, and some load more files that their own files name:
``WordEmbeddings`` loads another model. Therefore only a list of harmless settings and classes is allowed.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from optexport.config.tasks import OR_TRANSFORMER_ALONE
from optexport.errors import SourceError, first_line
from optexport.loading import adapters
from optexport.loading.pretrained_files import find

MODULES = "modules.json"
# All settings files that a Transformer of sentence-transformers looks for.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_SETTINGS = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
_CONFIG_FILE = "config.json"
_ROUTERS = ("router_config.json", _CONFIG_FILE)  # of a module that contains others, in subfolders

# Modules that load only numbers and a tokenizer from their folder. Their Python modules vary between releases.
_CLASSES = {
    *("Transformer", "Pooling", "Dense", "Normalize", "LayerNorm", "Dropout", "CNN", "LSTM", "WeightedLayerPooling"),
    *("Router", "Asym", "StaticEmbedding", "BoW", "WordWeights"),
}
_OWN = "sentence_transformers."  # other classes are custom code, which sentence-transformers itself checks

_MODEL = {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype"}
_TOKENIZER = {
    *("add_bos_token", "add_eos_token", "do_lower_case", "max_length", "model_max_length", "padding", "padding_side"),
    *("truncation", "truncation_side", "use_fast"),
}
_CONFIG = {"add_pooling_layer", "is_decoder", "num_labels", "use_cache"}
_ALLOWED: Mapping[str, Collection[str]] = {
    "model_kwargs": _MODEL,
    "model_args": _MODEL,
    "processor_kwargs": _TOKENIZER,
    "tokenizer_args": _TOKENIZER,
    "config_kwargs": _CONFIG,
    "config_args": _CONFIG,
}
_MAX_MODULES = 200  # modules; circular links would otherwise repeat them
_IGNORED = "trust_remote_code"  # sentence-transformers ignores this setting of a folder
_ELSEWHERE = ("model_name_or_path", "tokenizer_name_or_path", "processor_name", "cache_dir")


def check(name: str, options: Mapping[str, Any]) -> None:
    """Checks that the files of a model's modules contain only harmless settings.

    Args:
        name: A folder, or a hub id.
        options: Options of ``from_pretrained``.

    Raises:
        SourceError: They contain another setting, or are not JSON objects.
    """
    modules = find(name, MODULES, options)
    listed = [] if modules is None else _read(modules)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise SourceError("the file is not a list of JSON objects", location=str(modules), hint="Save the model again.")
    pending = [("", ""), *((str(entry.get("path", "")), _check_class(entry.get("type"), modules)) for entry in listed)]
    checked: set[tuple[str, str]] = set()
    while pending:
        subfolder, kind = pending.pop()
        if (subfolder, kind) in checked:
            continue
        checked.add((subfolder, kind))
        if len(checked) > _MAX_MODULES:
            raise SourceError(
                f"the model has more than {_MAX_MODULES} modules",
                location=name,
                hint="Check the router_config.json of its modules for circular paths.",
            )
        inside = {**options, "subfolder": subfolder}
        for filename in _SETTINGS:
            if (path := find(name, filename, inside)) is not None:
                _check_settings(_read(path), path)
        if (path := find(name, adapters.CONFIG, inside)) is not None:
            adapters.check_config(path)
        if kind == "Dense" and not options.get("trust_remote_code"):
            _check_dense(find(name, _CONFIG_FILE, inside))
        for filename in _ROUTERS:
            types = None if (path := find(name, filename, inside)) is None else _read(path)
            types = types.get("types") if isinstance(types, dict) else None
            if isinstance(types, dict):
                pending += [(str(PurePosixPath(subfolder, key)), _check_class(cls, path)) for key, cls in types.items()]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise SourceError(
            f"the file is not valid JSON: {first_line(error)}", location=str(path), hint="Save the model again."
        ) from error


def _check_class(kind: Any, path: Path | None) -> str:
    """Returns the name of a class; rejects unknown classes of sentence-transformers."""
    name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
    if not name or (kind.startswith(_OWN) and name not in _CLASSES):
        raise SourceError(
            f"the class {kind} of a module is not supported, because it may read other files than its own",
            location=str(path),
            hint=f"Use modules of these classes: {', '.join(sorted(_CLASSES))}. {OR_TRANSFORMER_ALONE}",
        )
    return name


def _check_dense(path: Path | None) -> None:
    """Rejects settings that sentence-transformers replaces or ignores, with only a log entry."""
    from sentence_transformers.base.modules import Dense

    settings = None if path is None else _read(path)
    if not isinstance(settings, dict):
        return
    function = settings.get("activation_function")
    if function is not None and not str(function).startswith("torch."):
        raise SourceError(
            f"the activation_function {function} is not from torch, so sentence-transformers would replace it",
            location=str(path),
            hint="Set model.trust_remote_code = true if that code may run.",
        )
    if unknown := sorted(settings.keys() - inspect.signature(Dense).parameters.keys()):
        raise SourceError(
            f"the key {unknown[0]} is unknown to sentence-transformers, which would ignore it",
            location=str(path),
            hint=f"Remove the key if the model does not need it. {OR_TRANSFORMER_ALONE}",
        )


def _check_settings(settings: Any, path: Path) -> None:
    if not isinstance(settings, dict):
        raise SourceError("the file is not a JSON object", location=str(path), hint="Save the model again.")
    unsafe = [key for key in _ELSEWHERE if settings.get(key) is not None]
    for table, allowed in _ALLOWED.items():
        options = settings.get(table, {})
        if not isinstance(options, dict):
            raise SourceError(f"{table} is not a JSON object", location=str(path), hint="Save the model again.")
        for key, value in options.items():
            if key != _IGNORED and (key not in allowed or not _is_plain(value)):
                unsafe.append(f"{table}.{key}")
    if unsafe:
        raise SourceError(
            f"the setting {unsafe[0]} may run code, or read files outside of the model's folder",
            location=str(path),
            hint=f"Remove the setting if the model does not need it. {OR_TRANSFORMER_ALONE}",
        )


def _is_plain(value: Any) -> bool:
    """Returns True for a number, a boolean, or a name that is neither a path nor a hub id."""
    if isinstance(value, str):
        return re.fullmatch(r"[\w.]*", value) is not None
    return value is None or isinstance(value, bool | int | float)
