"""Calls a model that is not being traced, and leaves it as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from optexport._utils.module_state import restoring_state
from optexport._utils.platform import is_of_memory
from optexport._utils.user_lines import describe_error_and_line
from optexport.errors import ModelError, OptexportError, TraceError, describe_error
from optexport.signature.signature import as_arguments, flatten_outputs
from optexport.tracing import dynamo_exporter


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Makes a model run eagerly within the block, and return neither a key/value cache nor a loss.

    By default, ``torch.cond`` compiles itself, and fails after some calls in float64 or with other threads.
    """
    with dynamo_exporter.one_pass(model), torch.compiler.set_stance("force_eager"):
        yield


def run(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Returns what a model returns, and restores its state and the random numbers."""
    with (
        restoring_state(model),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        eager(model),
    ):
        return model(**copy.deepcopy(as_arguments(inputs)))


def check_runs(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Checks that a model runs on its inputs, and returns its outputs.

    The result is None for a graph, whose inputs `trace` checks by name.

    Raises:
        ModelError: The model's code raises an exception.
        TraceError: There is not enough memory.
    """
    if isinstance(model, fx.GraphModule):
        return None
    try:
        return run(model, inputs)
    except OptexportError:  # a mistake in the config that the added processing finds
        raise
    except Exception as error:  # the model's code may raise anything
        raise model_error(model, inputs, error) from error


def model_error(model: nn.Module, inputs: Mapping[str, torch.Tensor], error: Exception) -> TraceError:
    """Returns the error for a model that fails on its inputs without being traced."""
    if is_of_memory(error):
        message = f"there is not enough memory to run the model: {describe_error(error)}"
        return TraceError(message, location=type(model).__name__, hint="Free memory, or use smaller inputs.")
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
    return ModelError(
        f"the model itself fails on the inputs {shapes}: {describe_error_and_line(error)}",
        location=type(model).__name__,
        hint="Register its hooks with with_kwargs=True: all inputs are passed by name."
        if model._forward_pre_hooks or model._forward_hooks
        else "Use inputs with dtypes, ranges and sizes that the model accepts.",
    )


def run_or_error(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor] | Exception:
    """Returns the output tensors of a model, in the order of their names, or the exception that its code raises."""
    try:
        return [tensor for _, tensor in sorted(flatten_outputs(run(model, inputs)).items())]
    except Exception as error:  # the model's code may raise anything
        return error
