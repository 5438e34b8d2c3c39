"""The only file that calls ``transformers.exporters`` to trace a model.

Its authors call it experimental: adapt to a new version of transformers here and in
`optexport.exporters.onnx.transformers_fixes`. It brings the patches that several hundred architectures need before
``torch.export`` takes them.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from transformers import AttentionInterface, PreTrainedModel, exporters, masking_utils
from transformers.exporters import DynamoConfig, DynamoExporter, exporter_dynamo
from transformers.exporters import utils as _utils
from transformers.exporters.utils import (
    decompose_for_generation,
    precompute_export_inputs,
)

from optexport.signature.arguments import find_fixed_tensors
from optexport.tracing.patches import transformers_functions
from optexport.tracing.patches.expert_loops import loop_over_all_experts
from optexport.tracing.patches.read_floats import forgetting_values
from optexport.tracing.recurrent import keep_recurrent_operators
from optexport.tracing.size_simplification import simplifying_sizes

# The folder of the exporters' code, which is not part of any model.
FOLDER = Path(str(exporters.__file__)).parent


# True if torch.export reads the model's bytecode.
_STRICT: ContextVar[bool] = ContextVar("strict", default=False)


@contextlib.contextmanager
def tracing_strictly() -> Iterator[None]:
    """Makes `export_module` trace with ``strict=True`` within the block."""
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Returns True within `tracing_strictly`."""
    return _STRICT.get()


def has_transformers_model(module: torch.nn.Module) -> bool:
    """Returns True if a module is, or contains, a transformers model."""
    return any(isinstance(child, PreTrainedModel) for child in module.modules())


def export_module(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a module without patches; neither the module nor the inputs are changed."""
    return torch.export.export(
        module,
        args=(),
        kwargs=copy.deepcopy(dict(inputs)),
        dynamic_shapes=dict(dynamic_shapes),
        strict=is_strict(),
        # Assert the declared ranges at run time; torch.export would refuse ranges that it cannot prove.
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def export_program(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a transformers model with patches; the model is not changed."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), _utils.patch_attributes([*_PATCHES, *_expert_patches(model)]):
            exporter = DynamoExporter()
            program: ExportedProgram = exporter.export(
                model,  # type: ignore[arg-type]  # modules that contain a model work as well
                dict(inputs),
                DynamoConfig(
                    dynamic=True,
                    dynamic_shapes=dict(dynamic_shapes),
                    prefer_deferred_runtime_asserts_over_guards=True,  # as in export_module
                ),
            ).program
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # the exporter does not remove its own forward
    return program


# Without these, a trace fails, contains calls that no format supports, or computes something else than the model.
_PATCHES = [
    (torch.nn.Module, "to", transformers_functions.skip_needless_moves),
    (AttentionInterface, "_global_mapping", transformers_functions.allow_unknown_length),
    (masking_utils.AttentionMaskInterface, "_global_mapping", transformers_functions.remember_padding),
    # Masks that are made with torch.vmap, and how these index tensors. Gemma3 needs the first.
    (masking_utils, "_vmap_expansion_sdpa", _utils._patch_broadcast_mask_expansion),
    (masking_utils, "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
    (masking_utils, "_ignore_bidirectional_mask_sdpa", transformers_functions.omit_empty_mask),
    (exporter_dynamo, "_reshaped_vision_attention_forward", transformers_functions.apply_head_norms),
    # The exporter computes missing inputs from others; here all inputs are present or constant.
    (_utils, "precompute_export_inputs", lambda _: lambda *_: None),
]


def _expert_patches(model: torch.nn.Module) -> list[tuple[type, str, Callable[..., Any]]]:
    """Returns the patches for the classes of a model's experts."""
    classes = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__.endswith("Experts"))
    return [(cls, "forward", loop_over_all_experts) for cls in classes]


def find_computed_inputs(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns missing inputs that a model computes from values of other inputs.

    An input that is only needed for another attention implementation has the value None. An input that is present, but
    whose numbers the model reads, has a list as its value.
    """
    present = {**inputs, **find_fixed_tensors(model)}
    extended: dict[str, Any] = dict(present)
    with torch.no_grad(), quiet():
        precompute_export_inputs(model, extended)
    return {n: value for n, value in extended.items() if n not in present or (n in inputs and isinstance(value, list))}


def decompose(model: torch.nn.Module, prompt: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Returns the inputs of a model's components, such as ``prefill`` and ``decode``."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), torch.no_grad():
            components = decompose_for_generation(model, dict(prompt), multi_token_decode=True)  # type: ignore[arg-type]
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # the function does not remove its own forward
    return {name: inputs for name, (_, inputs) in components.items()}


@contextlib.contextmanager
def one_pass(model: torch.nn.Module) -> Iterator[None]:
    """Makes models return neither a key/value cache nor a loss within the block."""
    configs = [c for child in model.modules() if (c := getattr(child, "config", None)) is not None]
    changed = []
    for config, flag in itertools.product(configs, ("use_cache", "return_loss")):
        if getattr(config, flag, False):
            changed.append((config, flag))
            setattr(config, flag, False)
    try:
        yield
    finally:
        for config, flag in changed:
            setattr(config, flag, True)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Silences ``torch.export``, keeps recurrent layers whole, simplifies sizes but no floats, caches no fake tensors.

    With symbolic sizes, a lookup takes longer than the computation: a small export takes 0.6 to 0.9 times the CPU time
    without the cache.
    """
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        keep_recurrent_operators(),
        simplifying_sizes(),
        forgetting_values(is_strict=is_strict()),
        quiet(),
    ):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings, logs and standard error of the exporters; exceptions still propagate."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for category in (UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logging.disable(disabled)
