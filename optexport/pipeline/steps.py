"""Steps with the original model: trace, call, and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from optexport._utils import memory
from optexport._utils.module_state import copy_shared_outputs
from optexport.cache import model_key
from optexport.job import Job
from optexport.parity import data_batches, size_probe
from optexport.parity.cases import cases
from optexport.parity.reference import Call, Reference, graph_runner
from optexport.parity.reference_run import run_original
from optexport.parity.special_values import special_cases
from optexport.parity.vocabulary import attention_masks, sized_by_values
from optexport.signature.signature import Batch, as_arguments, flatten_outputs
from optexport.tracing import randomness
from optexport.tracing.serializable import check_writable
from optexport.tracing.trace import Traced, trace
from optexport.tracing.transformers_exporter import one_pass
from optexport.transformations import KeepOutputs
from optexport.transformations.apply import Transformed

# In bytes of weights. A single run of a larger model is slow, and its weights may be on disk.
_TOO_LARGE = 1 << 30
# How many times more sizes are tried at exhaustive effort.
_TIMES_EXHAUSTIVE = 16


def trace_original(job: Job) -> tuple[Traced, Call]:
    """Traces the model.

    Returns:
        The trace, with only the outputs that the rules leave, and a function that runs the model or a graph for these.
    """
    traced = trace(job.loaded.to_trace, job.example, job.dynamic)
    check_writable(traced.graph_module.graph)
    wanted = [set(rule.transformation.outputs) for rule in job.rules if isinstance(rule.transformation, KeepOutputs)]
    everything, kept = traced.signature, traced.signature.keeping(set.intersection(*wanted) if wanted else ())
    randomness.check_none(traced.graph_module, everything.output_names, kept.output_names)

    def call(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        copied = {name: tensor.clone() for name, tensor in batch.items()}  # a model may change its inputs in place
        with one_pass(model):
            outputs = copy_shared_outputs(model, flatten_outputs(model(**as_arguments(copied))).values())
        names = (kept if len(outputs) == len(kept.outputs) else everything).output_names
        named = dict(zip(names, outputs, strict=True))
        return {name: named[name].detach() for name in kept.output_names}  # a model may turn gradients on

    return replace(traced, signature=kept), call


def sizes_apart(job: Job, traced: Traced, graphs: Sequence[Transformed], call: Call) -> list[dict[str, int]]:
    """Returns sizes at which the results of the original and a graph differ.

    Returns none at quick effort, or for large models.

    Args:
        traced: The trace before the rules.
        graphs: The transformed graphs.
    """
    effort, model = job.config.parity.effort, job.loaded.model
    if effort == "quick" or memory.weight_bytes(model) >= _TOO_LARGE:
        return []
    found = [*traced.suspect_sizes]
    for graph in graphs:
        found += size_probe.parting_sizes(
            graph_runner(model, call),
            graph_runner(graph.graph_module, call),
            job.example,
            traced.signature,
            found,
            times=_TIMES_EXHAUSTIVE if effort == "exhaustive" else 1,
            rounded_anew=any(applied.report.changes for applied in graph.applied),
        )
    return found[len(traced.suspect_sizes) :]


def run_reference(
    job: Job, traced: Traced, call: Call, ids: Mapping[str, int], suspect_sizes: Sequence[dict[str, int]] = ()
) -> Reference:
    """Runs the original on all cases; the effort decides their number.

    Args:
        ids: The number of ids in the vocabulary of each input that has one.
        suspect_sizes: Sizes to check in addition to the trace's suspect sizes.
    """
    signature, effort = traced.signature, job.config.parity.effort
    checked = cases(job.example, job.real, signature, [*traced.suspect_sizes, *suspect_sizes], effort)
    checked += special_cases(
        job.example,
        ids,
        effort,
        job.config.parity.seed,
        declared=job.config.inputs.tensors or {},
        attention_masks=attention_masks(traced.graph_module, signature),
        sized_by_values=sized_by_values(traced.graph_module),
    )
    reference = run_original(
        call,
        job.loaded.model,
        checked,
        declared=job.sizes_declared,
        batched=None if effort == "quick" else signature.batched,
        device=job.config.model.device,
        computation=model_key.of(traced.graph_module, job.loaded.model),
    )
    unchecked = data_batches.why_unchecked(job.real, job.rows, reference.cases)
    return replace(reference, left_out=(*unchecked, *reference.left_out))
