"""Parity checks of one run: cached results, search for failing inputs, reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from optexport.cache import results, store
from optexport.config.schema import ParityConfig
from optexport.parity import input_search, perturbation
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.reference import Call, Reference
from optexport.runtime.runners import Run
from optexport.signature.signature import Signature

_FOUND = "found by search: "


class TargetChecker:
    """Checks every target of a run against the reference.

    Args:
        checker: Compares targets on the cases.
        run: Runs a model on a batch and names its outputs.
        model: The original model.
        vocabularies: Number of valid ids per input, for inputs that index an embedding.
        config: The `[parity]` table: tolerance and effort.

    Attributes:
        cache_hits: Targets whose results come from the cache.
    """

    def __init__(
        self,
        checker: ParityChecker,
        run: Call,
        model: nn.Module,
        signature: Signature,
        vocabularies: Mapping[str, int],
        config: ParityConfig,
    ) -> None:
        self.checker, self.run, self.model = checker, run, model
        self.signature, self.vocabularies, self.config = signature, vocabularies, config
        self.cache_hits: list[str] = []
        self._measured_tolerances = dict(checker.tolerances)
        self._failing: tuple[TargetParity, Callable[[], Run], Signature] | None = None

    def check(
        self,
        target: str,
        open_target: Callable[[], Run],
        *,
        content: str | None = None,
        traced_shape_only: bool = False,
        precision: str | None = None,
    ) -> TargetParity:
        """Compares a target with the reference on all cases.

        Exhaustive effort also searches for other failing inputs. An input that the search finds becomes a case. Targets
        of lower precision are not searched, because no single input fails a gate.

        Args:
            open_target: Opens the target and returns its runner. Not called if the cache has its results.
            content: Digest of the target's content; None disables the cache.
            traced_shape_only: Use only the cases with the shapes of the traced case.
            precision: Precision that the target was lowered to, for example "float16".

        Returns:
            The comparison of the target, per output and case.
        """
        reference = self.checker.reference.at_traced_shape() if traced_shape_only else self.checker.reference
        entry = self._entry(target, content, reference)
        stored = results.read(entry) if entry else None
        if stored is not None:
            self.cache_hits.append(target)
            parity = self.checker.check_results(
                target, stored[0], traced_shape_only=traced_shape_only, precision=precision
            )
        else:
            candidate = open_target()
            parity = self.checker.check(target, candidate, traced_shape_only=traced_shape_only, precision=precision)
            if entry and parity.passed:
                results.write(entry, self.checker.results(target))
            del candidate
        if precision is not None:
            return parity
        if not parity.passed:
            parity = self._retry_with_perturbed_weights(parity, traced_shape_only=traced_shape_only)
        signature = self.signature.at(reference.cases[0].batch) if traced_shape_only else self.signature
        if parity.passed and self.config.effort == "exhaustive":
            parity = self._search(parity, open_target(), signature, traced_shape_only=traced_shape_only)
        if not parity.passed:
            self._failing = self._failing or (parity, open_target, signature)
        return parity

    def _retry_with_perturbed_weights(self, parity: TargetParity, *, traced_shape_only: bool) -> TargetParity:
        """Repeats a failed comparison with limits from perturbed weights, if these explain it."""
        checker, config = self.checker, self.config
        tolerances = perturbation.find_raised_tolerances(
            checker, parity, self.run, self.model, config.noise_multiple, config.seed, self._measured_tolerances
        )
        if tolerances is None:
            return parity
        cases = dict.fromkeys(case.case for output in parity.outputs for case in output.cases if case.failure)
        variation = f"with weights moved by half a unit in the last place at {' and '.join(cases)}"
        variations = (*checker.reference.variations, variation)
        checker.reference, checker.tolerances = replace(checker.reference, variations=variations), tolerances
        return checker.check_results(parity.target, checker.results(parity.target), traced_shape_only=traced_shape_only)

    def _entry(self, target: str, content: str | None, reference: Reference) -> str:
        """Returns the cache key of a target's results, or an empty string if caching is off."""
        if content is None or not reference.cache_key or not store.enabled():
            return ""
        return store.entry_key("results", reference.cache_key, [case.name for case in reference.cases], target, content)

    def _search(
        self, parity: TargetParity, candidate: Run, signature: Signature, *, traced_shape_only: bool
    ) -> TargetParity:
        """Searches for an input at which a passed target fails, and checks the target there."""
        # Random values can make an integer output a tie, so a difference there does not prove a fault.
        outputs = [spec.name for spec in signature.outputs if spec.torch_dtype.is_floating_point]
        measure, example = self._make_measure(outputs), self.checker.reference.cases[0].batch
        fails = input_search.failure_test(measure, candidate)
        failing = input_search.find_failing(fails, example, signature, self.vocabularies, seed=self.config.seed)
        new_case = None if failing is None else measure(replace(failing, name=f"{_FOUND}{failing.name}"))
        if new_case is None:
            return parity
        self.checker.add_cases(*new_case)
        return self.checker.check(parity.target, candidate, traced_shape_only=traced_shape_only)

    def find_smallest_failing(self) -> str | None:
        """Returns the name of the smallest input at which the first failed target still fails.

        Returns:
            None if no smaller input fails, or if only a gate over all cases fails.
        """
        assert self._failing is not None
        target, open_target, signature = self._failing
        outputs = [output for output in target.outputs if not output.passed]
        if not outputs:  # only a gate over all cases fails, so no single input does
            return None
        name = next(case.case for case in outputs[0].cases if case.failure is not None)
        if name.startswith(_FOUND):  # the search has already reduced it
            return None
        reference = self.checker.reference
        case = next(case for case in reference.cases if case.name == name)
        is_float = all(reference.outputs[0][output.output].is_floating_point() for output in outputs)
        fails = input_search.failure_test(self._make_measure([output.output for output in outputs]), open_target())
        smallest = input_search.smallest_failing(fails, case, signature, self.vocabularies, values=is_float)
        return None if smallest is None else smallest.name

    def _make_measure(self, outputs: Sequence[str]) -> input_search.Measure:
        tolerances = {name: self.checker.tolerances[name] for name in outputs}
        fallback = self.checker.reference.fallback is not None
        return input_search.make_measure(
            self.run, self.model, tolerances, self.config.noise_multiple, fallback=fallback
        )
