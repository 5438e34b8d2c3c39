"""Checks the places of a run, looks for more inputs that fail where asked to, and makes small those that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from optexport.config import ParityConfig
from optexport.proof import search
from optexport.proof.parity import PlaceParity, Proof
from optexport.proof.reference import Call
from optexport.runtimes import Run
from optexport.signature import Signature

_FOUND = "found by search: "


class Suspects:
    """Checks each place of a run.

    Args:
        proof: Compares places on the cases.
        run: Runs the original on a batch and names its outputs.
        vocabularies: The number of ids that an input may hold, of those that go into an embedding.
        config: How far results may be from the original's, and how much effort is made to find those that are not.
    """

    def __init__(
        self,
        proof: Proof,
        run: Call,
        model: nn.Module,
        signature: Signature,
        vocabularies: Mapping[str, int],
        config: ParityConfig,
    ) -> None:
        self.proof, self.run, self.model = proof, run, model
        self.signature, self.vocabularies, self.config = signature, vocabularies, config
        self._failing: tuple[PlaceParity, Run, Signature] | None = None

    def check(
        self, place: str, candidate: Run, *, traced_shape_only: bool = False, precision: str | None = None
    ) -> PlaceParity:
        """Checks a place on the cases; with exhaustive effort, on others too, and one that fails joins them.

        Of lower precision there is none to look for: no single input fails a gate.
        """
        parity = self.proof.check(place, candidate, traced_shape_only=traced_shape_only, precision=precision)
        if precision is not None:
            return parity
        example = self.proof.reference.cases[0].batch
        signature = self.signature.at(example) if traced_shape_only else self.signature
        if parity.passed and self.config.effort == "exhaustive":
            # Of random values an integer may be a tie, which says nothing of the candidate.
            outputs = [spec.name for spec in signature.outputs if spec.torch_dtype.is_floating_point]
            measure = self._measurer(outputs)
            fails = search.failure_test(measure, candidate)
            found = search.find_failing(fails, example, signature, self.vocabularies, seed=self.config.seed)
            measured = None if found is None else measure(replace(found, name=f"{_FOUND}{found.name}"))
            if measured is not None:
                self.proof.extend(*measured)
                parity = self.proof.check(place, candidate, traced_shape_only=traced_shape_only)
        if not parity.passed:
            self._failing = self._failing or (parity, candidate, signature)
        return parity

    def smallest(self) -> str | None:
        """The smallest input that was found at which the first place that failed still fails."""
        assert self._failing is not None
        place, candidate, signature = self._failing
        outputs = [output for output in place.outputs if not output.passed]
        if not outputs:  # it is the decisions at all cases together that fail
            return None
        name = next(case.case for case in outputs[0].cases if case.failure is not None)
        if name.startswith(_FOUND):  # it is small already
            return None
        reference = self.proof.reference
        case = next(case for case in reference.cases if case.name == name)
        real = all(reference.outputs[0][output.output].is_floating_point() for output in outputs)
        fails = search.failure_test(self._measurer([output.output for output in outputs]), candidate)
        found = search.smallest_failing(fails, case, signature, self.vocabularies, values=real)
        return None if found is None else found.name

    def _measurer(self, outputs: Sequence[str]) -> search.Measure:
        bounds = {name: self.proof.bounds[name] for name in outputs}
        fallback = self.proof.reference.fallback is not None
        return search.measurer(self.run, self.model, bounds, self.config.multiple, fallback=fallback)
