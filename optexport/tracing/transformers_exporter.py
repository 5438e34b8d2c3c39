"""The only file that calls ``transformers.exporters`` to trace a model.

Its authors call it experimental: adapt to a new version of transformers here and in
`optexport.exporters.onnx.transformers_exporter`. It brings the patches that several hundred architectures need before
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

from optexport.signature.arguments import held_tensors
from optexport.tracing.patches import functions as patches_functions
from optexport.tracing.patches.expert_loops import over_all_experts

# Where the exporters' own code lies: no line of it is a model's.
FOLDER = Path(str(exporters.__file__)).parent


def holds_transformers(module: torch.nn.Module) -> bool:
    """Whether a module is, or wraps, a model of transformers."""
    return any(isinstance(child, PreTrainedModel) for child in module.modules())


def export_module(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a module that needs no patches, as `export_program` exports others; neither it nor inputs are changed."""
    return torch.export.export(
        module,
        args=(),
        kwargs=copy.deepcopy(dict(inputs)),
        dynamic_shapes=dict(dynamic_shapes),
        strict=False,
        # Named ranges are promises: check them when the graph runs instead of refusing to prove them.
        prefer_deferred_runtime_asserts_over_guards=True,
    )


def export_program(
    model: torch.nn.Module, inputs: Mapping[str, torch.Tensor], dynamic_shapes: Mapping[str, Any]
) -> ExportedProgram:
    """Exports a model of transformers under the patches of its architecture; the model itself is not changed."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), _utils.patch_attributes([*_PATCHES, *_expert_patches(model)]):
            exporter = DynamoExporter()
            program: ExportedProgram = exporter.export(
                model,  # type: ignore[arg-type]  # typed for its own models, and made for modules that hold one too
                dict(inputs),
                DynamoConfig(
                    dynamic=True,
                    dynamic_shapes=dict(dynamic_shapes),
                    prefer_deferred_runtime_asserts_over_guards=True,  # as in export_module
                ),
            ).program
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # the exporter leaves its bound method behind
    return program


# What stops a trace, leaves calls in it which no format holds, or makes it compute something else than the model.
_PATCHES = [
    (torch.nn.Module, "to", patches_functions.unless_it_is),
    (AttentionInterface, "_global_mapping", patches_functions.of_unknown_length),
    (masking_utils.AttentionMaskInterface, "_global_mapping", patches_functions.that_know_their_padding),
    # Masks that are made under torch.vmap, and how it has them index tensors.
    (masking_utils, "_vmap_expansion_sdpa", _utils._patch_broadcast_mask_expansion),
    (masking_utils, "TransformGetItemToIndex", lambda _: contextlib.nullcontext),
    (masking_utils, "_ignore_bidirectional_mask_sdpa", patches_functions.none_that_hides_nothing),
    (exporter_dynamo, "_reshaped_vision_attention_forward", patches_functions.with_norms_of_heads),
    # Inputs that are computed of others: of a model that is exported all are given, or held.
    (_utils, "precompute_export_inputs", lambda _: lambda *given: None),
]


def _expert_patches(model: torch.nn.Module) -> list[tuple[type, str, Callable[..., Any]]]:
    """Patches of the classes of a model's experts."""
    classes = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__.endswith("Experts"))
    return [(cls, "forward", over_all_experts) for cls in classes]


def computed_outside(model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Inputs that a model computes from the values of those given, if it is not given them, as no graph can.

    None are those that it would only compute with another kind of attention. A list stands for an input that is given,
    and of which the model wants numbers.
    """
    given = {**inputs, **held_tensors(model)}
    extended: dict[str, Any] = dict(given)
    with torch.no_grad(), quiet():
        precompute_export_inputs(model, extended)
    return {n: value for n, value in extended.items() if n not in given or (n in inputs and isinstance(value, list))}


def decompose(model: torch.nn.Module, prompt: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """What ``generate`` gives the parts of a model for a prompt, by part: ``prefill`` and ``decode`` of most."""
    had_forward = "forward" in vars(model)
    try:
        with quiet(), torch.no_grad():
            found = decompose_for_generation(model, dict(prompt), multi_token_decode=True)  # type: ignore[arg-type]
    finally:
        if not had_forward:
            vars(model).pop("forward", None)  # as the exporter does, it leaves a bound method behind
    return {name: inputs for name, (_, inputs) in found.items()}


@contextlib.contextmanager
def one_pass(model: torch.nn.Module) -> Iterator[None]:
    """Within it, models return neither a key/value cache nor a loss: one forward pass is exported, and no decoding."""
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
    """Within it, ``torch.export`` is quiet, and looks no results of operators up among earlier ones.

    Of sizes that are symbols that takes longer than to compute them: a small export was seen to take 0.6 to 0.9 times
    the CPU time without.
    """
    with torch.no_grad(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False), quiet():
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the exporters' own chatter (drift of versions, deprecated calls, whole graphs); errors still raise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            for category in (UserWarning, FutureWarning, DeprecationWarning, RuntimeWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logging.disable(disabled)
