"""What the original computes, in its own precision and in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from optexport import distances
from optexport.cases import Batch, Case
from optexport.errors import TraceError, first_line

Outputs = dict[str, torch.Tensor]

# Noise this many times that of a quiet case that leaves fewer than half the digits is no noise: float64 goes another
# way there. The noise of a trained encoder was seen to differ by 120 times between sizes.
_UNGUIDED_TIMES = 64


@dataclass(frozen=True)
class Reference:
    """What the original computes.

    Attributes:
        outputs: In its own precision, per case.
        exact: In float64, per case; where the model does not run in float64, the same as `outputs`.
        fallback: Why float64 could not be had; None where it could.
        unguided: Outputs and cases of which float64 says nothing, so that `exact` holds the original's own values.
    """

    cases: tuple[Case, ...]
    outputs: tuple[Outputs, ...]
    exact: tuple[Outputs, ...]
    fallback: str | None = None
    unguided: tuple[str, ...] = ()

    def at_traced_shape(self) -> Reference:
        """Only the cases shaped as the first, the traced one: all that a file of fixed shape can be asked for."""

        def shapes(case: Case) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in case.batch.items()}

        kept = [i for i, case in enumerate(self.cases) if shapes(case) == shapes(self.cases[0])]
        return Reference(
            tuple(self.cases[i] for i in kept),
            tuple(self.outputs[i] for i in kept),
            tuple(self.exact[i] for i in kept),
            self.fallback,
            self.unguided,
        )


def run_original(
    run: Callable[[nn.Module, Batch], Outputs], model: nn.Module, cases: Sequence[Case], *, declared: bool = True
) -> Reference:
    """Runs the original on all cases, in its own precision and in float64.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original; a copy of it is made for float64.
        declared: Whether the user declared the sizes. If not, those that the original itself refuses are left out.

    Raises:
        TraceError: The original itself fails on a case that the user declared.
    """
    checked: list[Case] = []
    outputs: list[Outputs] = []
    with torch.no_grad(), _buffers_kept(model):
        for case in cases:
            try:
                outputs.append(run(model, case.batch))
                if not checked:
                    _check_repeatable(outputs[0], run(model, case.batch), type(model).__name__)
            except TraceError:
                raise
            except Exception as error:  # a model's own code may raise anything
                if not declared and checked:
                    continue
                raise TraceError(
                    f"the model itself fails at {case.name}: {type(error).__name__}: {first_line(error)}",
                    place=type(model).__name__,
                    mend="Declare in inputs.dynamic only the sizes that it takes."
                    if checked
                    else "Give inputs of the dtypes, ranges and sizes that it takes.",
                ) from error
            checked.append(case)
        if not any(tensor.is_floating_point() for tensor in [*model.parameters(), *outputs[0].values()]):
            return Reference(tuple(checked), tuple(outputs), tuple(outputs))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
                double = copy.deepcopy(model).double()
            exact = tuple(run(double, _double(case.batch)) for case in checked)
        except Exception as error:  # likewise; it may also hold a dtype of its own
            reason = f"{type(error).__name__}: {first_line(error)}"
            return Reference(tuple(checked), tuple(outputs), tuple(outputs), reason)
    return _guided(Reference(tuple(checked), tuple(outputs), exact))


def _guided(reference: Reference) -> Reference:
    """The same, but compared with the original itself where float64 computes something else.

    A mask of -1e9 on a whole row is all that is left of the scores in float32, but not in float64. The distance there
    is no rounding, and as a floor it would let faults pass everywhere else.
    """
    exact, unguided = [dict(outputs) for outputs in reference.exact], []
    for name, traced in reference.outputs[0].items():
        if not traced.is_floating_point():
            continue
        noise = [_relative_noise(o[name], e[name]) for o, e in zip(reference.outputs, exact, strict=True)]
        quiet, half_the_digits = sorted(noise)[len(noise) // 4], torch.finfo(traced.dtype).eps ** 0.5
        for index, case in enumerate(reference.cases):
            if noise[index] > max(_UNGUIDED_TIMES * quiet, half_the_digits):
                exact[index][name] = reference.outputs[index][name].double()
                unguided.append(f"{name} at {case.name}")
    return replace(reference, exact=tuple(exact), unguided=tuple(unguided))


def _relative_noise(original: torch.Tensor, exact: torch.Tensor) -> float:
    kept = ~distances.marks(original, exact)
    scale = distances.largest(distances.finite(original).abs()[kept])
    return (
        distances.largest(distances.distance(original, distances.known(exact, original))[kept]) / scale
        if scale
        else 0.0
    )


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Puts back, at its end, what a model that changes its own buffers has written there."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in kept:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _check_repeatable(first: Outputs, second: Outputs, place: str) -> None:
    """Refuses a model that gives other results on the same input: its floor would be its own randomness."""
    for name, tensor in first.items():
        distance = distances.largest(distances.distance(tensor, second[name]))
        scale = distances.largest(distances.finite(tensor).abs())
        ulps = distances.LEAST_FLOOR_ULPS * torch.finfo(tensor.dtype).eps * scale if tensor.is_floating_point() else 0.0
        if distance > 16 * ulps:
            raise TraceError(
                f"the model gives other results when it is run again on the same input ({name} by {distance:.2g})",
                place=place,
                mend="It draws random numbers, or keeps state between calls; neither can be exported and proven.",
            )


def _double(batch: Batch) -> Batch:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
