"""Reference: outputs of the original in its own precision and in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from optexport._utils.module_state import State, restoring_state
from optexport._utils.tensors import bytes_of
from optexport.parity import distances
from optexport.parity.cases.case import Case
from optexport.runtime.runners import Run
from optexport.signature.signature import Batch

Outputs = dict[str, torch.Tensor]
# Runs a model, or a graph of it, on a batch, and names its outputs.
Call = Callable[[nn.Module, Batch], Outputs]

# Run variation that is used only if no row affects the result of another row.
HALVES = "half the rows at a time"
# Run variation that also measures the rounding to float32 inside the model's own code.
THROUGHOUT = "in float64 throughout"
# Smaller tensors stay in memory, because a mapped file saves nothing for a few pages.
_MIN_MAPPED_BYTES = 1 << 20


@dataclass(frozen=True)
class Reference:
    """Outputs of the original on all cases.

    Attributes:
        outputs: Outputs in the original's precision, per case.
        exact: Outputs in float64, per case; the same as `outputs` if the model does not run in float64.
        fallback: Reason why float64 is not available; None if it is.
        float64_mismatches: Outputs and cases where float64 computes something else. There `exact` contains the
            original's values.
        variations: Further runs of the original in its own precision, which sample its rounding.
        variation_noise: Largest distance from float64 in these runs, per case and output.
        skipped: Skipped cases with the reason.
        cache_key: Empty if not cached.
    """

    cases: tuple[Case, ...]
    outputs: tuple[Outputs, ...]
    exact: tuple[Outputs, ...]
    fallback: str | None = None
    float64_mismatches: tuple[str, ...] = ()
    variations: tuple[str, ...] = ()
    variation_noise: tuple[Mapping[str, float], ...] = ()
    skipped: tuple[str, ...] = ()
    cache_key: str = ""

    @cached_property
    def noise(self) -> tuple[dict[str, float], ...]:
        """Returns the distance from float64 per case and output; zero if not floating point."""
        further_noise = self.variation_noise or tuple({} for _ in self.cases)
        return tuple(
            {name: max(measure_noise(tensor, exact[name]), further.get(name, 0.0)) for name, tensor in outputs.items()}
            for outputs, exact, further in zip(self.outputs, self.exact, further_noise, strict=True)
        )

    def at_traced_shape(self) -> Reference:
        """Returns the cases with the shapes of the traced case, for files of fixed shape."""

        def shapes(case: Case) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in case.batch.items()}

        return self.select([i for i, case in enumerate(self.cases) if shapes(case) == shapes(self.cases[0])])

    def concatenate(self, more: Reference) -> Reference:
        """Concatenates the cases of two references."""
        return replace(
            self,
            cases=self.cases + more.cases,
            outputs=self.outputs + more.outputs,
            exact=self.exact + more.exact,
            variation_noise=self.variation_noise + tuple({} for _ in more.cases) if self.variation_noise else (),
            cache_key="",
        )

    def select(self, indices: Sequence[int]) -> Reference:
        """Returns a subset of the cases.

        Args:
            indices: Positions of the cases in `cases`.
        """
        return replace(
            self,
            cases=tuple(self.cases[i] for i in indices),
            outputs=tuple(self.outputs[i] for i in indices),
            exact=tuple(self.exact[i] for i in indices),
            variation_noise=tuple(self.variation_noise[i] for i in indices) if self.variation_noise else (),
        )


def measure_noise(original: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest distance from float64, mask values excluded.

    Args:
        original: Output in the original's precision.
        exact: Output in float64, same shape.

    Returns:
        Zero for outputs that are not floating point.
    """
    if not original.is_floating_point():
        return 0.0
    is_result = ~distances.is_mask_value(original, exact)
    return distances.largest(distances.distance(original, distances.expected_values(exact, original))[is_result])


def store_results(case: Case, results: Outputs) -> Outputs:
    """Returns the results of a case, with large results of user data moved to disk."""
    return map_to_files(results) if case.data else results


def map_to_files(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves large tensors into unnamed temporary files, mapped into memory.

    The operating system deletes a file once its last tensor is freed, and caches the files in free memory.

    Raises:
        OSError: The folder for temporary files (``TMPDIR``) is full.
    """
    return {name: _mapped(t) if t.nbytes >= _MIN_MAPPED_BYTES else t for name, t in outputs.items()}


def _mapped(tensor: torch.Tensor) -> torch.Tensor:
    with tempfile.NamedTemporaryFile(prefix="optexport-") as file:
        file.write(bytes_of(tensor).numpy().data)
        file.flush()
        target = torch.from_file(file.name, shared=True, size=tensor.nbytes, dtype=torch.uint8)
    return target.view(tensor.dtype).view(tensor.shape)


def graph_runner(graph_module: nn.Module, call: Call) -> Run:
    """Returns a runner for the original or a graph of it, which restores changed buffers.

    Args:
        graph_module: The model or graph. It may share buffers with the original.
        call: Runs a model on a batch and names its outputs.
    """

    def run(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with restoring_state(graph_module):
            return call(graph_module, dict(batch))

    return run


def repeated_runner(graph_module: nn.Module, call: Call) -> Run:
    """Returns a runner as `graph_runner`, for many calls of a model that nothing else changes meanwhile.

    Finding the state of a small model takes longer than a call of it, so this finds it once.
    """
    state = State(graph_module)

    def run(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            return call(graph_module, dict(batch))
        finally:
            state.restore()

    return run
