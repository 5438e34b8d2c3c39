"""What the original computes, in its own precision and in float64: its results, and how far apart the two are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from optexport._utils.module_state import buffers_kept
from optexport.parity import distances
from optexport.parity.cases import Case
from optexport.parity.memmap import spilled
from optexport.runtime.runners import Run
from optexport.signature.signature import Batch

Outputs = dict[str, torch.Tensor]
# Runs a model, or a graph of it, on a batch, and names its outputs.
Call = Callable[[nn.Module, Batch], Outputs]

# The way of running that shows no row to have a say in another's result.
HALVES = "half the rows at a time"
# The way of running that shows what the model's own code rounds to float32 in float64, too.
THROUGHOUT = "in float64 throughout"


@dataclass(frozen=True)
class Reference:
    """What the original computes.

    Attributes:
        outputs: In its own precision, per case.
        exact: In float64, per case; where the model does not run in float64, the same as `outputs`.
        fallback: Why float64 could not be had; None where it could.
        unguided: Outputs and cases of which float64 says nothing, so that `exact` holds the original's own values.
        ways: How else the original was run, in its own precision, to see how it rounds.
        other_noise: Its distance from float64 there, per case and output the largest over the ways and all elements.
        left_out: The cases that are not among these, and why.
        name: What it is kept under between runs; empty where it is not.
    """

    cases: tuple[Case, ...]
    outputs: tuple[Outputs, ...]
    exact: tuple[Outputs, ...]
    fallback: str | None = None
    unguided: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    other_noise: tuple[Mapping[str, float], ...] = ()
    left_out: tuple[str, ...] = ()
    name: str = ""

    @cached_property
    def noise(self) -> tuple[dict[str, float], ...]:
        """The original's distance from float64, per case and output; zero of outputs that are not floating point."""
        others = self.other_noise or tuple({} for _ in self.cases)
        return tuple(
            {name: max(rounding(tensor, exact[name]), other.get(name, 0.0)) for name, tensor in outputs.items()}
            for outputs, exact, other in zip(self.outputs, self.exact, others, strict=True)
        )

    def at_traced_shape(self) -> Reference:
        """Only the cases shaped as the first, the traced one: all that a file of fixed shape can be asked for."""

        def shapes(case: Case) -> dict[str, torch.Size]:
            return {name: tensor.shape for name, tensor in case.batch.items()}

        return self.only([i for i, case in enumerate(self.cases) if shapes(case) == shapes(self.cases[0])])

    def followed_by(self, more: Reference) -> Reference:
        """These cases and others."""
        return replace(
            self,
            cases=self.cases + more.cases,
            outputs=self.outputs + more.outputs,
            exact=self.exact + more.exact,
            other_noise=self.other_noise + tuple({} for _ in more.cases) if self.other_noise else (),
            name="",
        )

    def only(self, indices: Sequence[int]) -> Reference:
        """Only some of the cases."""
        return replace(
            self,
            cases=tuple(self.cases[i] for i in indices),
            outputs=tuple(self.outputs[i] for i in indices),
            exact=tuple(self.exact[i] for i in indices),
            other_noise=tuple(self.other_noise[i] for i in indices) if self.other_noise else (),
        )


def rounding(original: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance from float64; of marks, and of what is not floating point, there is none."""
    if not original.is_floating_point():
        return 0.0
    kept = ~distances.marks(original, exact)
    return distances.largest(distances.distance(original, distances.known(exact, original))[kept])


def kept(case: Case, results: Outputs) -> Outputs:
    """Results at a case as they are kept: those of data, of which there may be much, in files where they are large."""
    return spilled(results) if case.data else results


def graph_runner(graph_module: nn.Module, call: Call) -> Run:
    """How to run the original, or a graph of it, whose buffers it may share, as a place of the pipeline."""

    def run(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with buffers_kept(graph_module):
            return call(graph_module, dict(batch))

    return run
