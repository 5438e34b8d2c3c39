"""Search for inputs at which a target fails, and reduction of a failing input."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from optexport._utils import signals
from optexport._utils.module_state import restoring_state
from optexport.parity import distances, float64_model
from optexport.parity.cases.basic_cases import cut_to
from optexport.parity.cases.case import Case
from optexport.parity.cases.padding import is_padding_mask, with_padding
from optexport.parity.checker import ParityChecker
from optexport.parity.noise_floor import FALLBACK_ULPS, LARGEST_LIMIT, Tolerance
from optexport.parity.reference import Call, Reference
from optexport.parity.reference_run import to_float64
from optexport.runtime.runners import Run
from optexport.signature.resizing import resize
from optexport.signature.signature import Batch, Signature

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Fails = Callable[[Batch], bool]
Measure = Callable[[Case], tuple[Reference, dict[str, Tolerance]] | None]

# Limits of a search: seconds to reduce a failing input, and number of inputs to try.
_SECONDS = 30.0
_EXAMPLES = 200
# Limits per input: number of distinct integers that are tried as constants, and number of random tensors.
_CONSTANTS = 32
_SEEDS = 8
_AS_GIVEN = "as given"


def smallest_failing(
    fails: Fails,
    failing: Case,
    signature: Signature,
    vocabularies: Mapping[str, int],
    *,
    values: bool = True,
    seconds: float = _SECONDS,
) -> Case | None:
    """Reduces a failing input to the smallest sizes and simplest values that still fail.

    Args:
        fails: Returns True if the target fails on a batch; see `failure_test`.
        failing: A case that fails.
        signature: Inputs and allowed sizes. Without dynamic dimensions only values change.
        vocabularies: Number of valid ids per input, for inputs that index an embedding.
        values: Simplify values too.
        seconds: Time limit, after which the smallest input so far is the result.

    Returns:
        A case named after its sizes and values; None if no smaller input fails.
    """
    sizes = signature.sizes(failing.batch)
    ranges = {name: (dim.min, max(dim.min, sizes[name])) for name, dim in signature.dims.items() if name in sizes}
    choices = {name: _choices(name, tensor, vocabularies) for name, tensor in failing.batch.items()}
    space = _Space(failing, signature, ranges, choices)
    check = _Check(fails, space, seconds)
    start = (tuple(sizes[name] for name in ranges), (_AS_GIVEN,) * len(choices))
    if not check(start):
        return None
    smallest = _with_smaller_sizes(check, start)
    if values:
        smallest = _with_simpler_values(check, smallest)
        smallest = _with_smaller_sizes(check, smallest)
    return None if smallest == start else space.case(smallest)


def find_failing(
    fails: Fails,
    example: Batch,
    signature: Signature,
    vocabularies: Mapping[str, int],
    *,
    seed: int = 0,
    examples: int = _EXAMPLES,
    max_elements: int = 8192,
) -> Case | None:
    """Searches declared sizes and several kinds of values for an input that fails.

    The search is deterministic. A failing input is reduced.

    Args:
        fails: Returns True if the target fails on a batch; see `failure_test`.
        example: The traced batch.
        vocabularies: Number of valid ids per input, for inputs that index an embedding.
        examples: Number of inputs to try.
        max_elements: Maximum number of elements of one batch; larger sizes are reduced.

    Returns:
        The reduced case; None if no input fails.
    """
    traced = signature.sizes(example)
    ranges = {name: (dim.min, max(dim.min, dim.max or 4 * traced[name])) for name, dim in signature.dims.items()}
    seeds = tuple(f"random {turn}" for turn in range(_SEEDS))
    choices = {name: (*_choices(name, tensor, vocabularies), *seeds) for name, tensor in example.items()}
    from hypothesis import strategies as st

    space = _Space(Case("traced", example), signature, ranges, choices, vocabularies, max_elements)
    check = _Check(fails, space, math.inf)
    sizes = st.tuples(*(st.integers(low, high) for low, high in ranges.values()))
    kinds = st.tuples(*(st.sampled_from(kinds) for kinds in choices.values()))
    choice = _find(check, st.tuples(sizes, kinds), examples, seed)
    return None if choice is None else space.case(choice)


def make_measure(
    run: Call, model: nn.Module, tolerances: Mapping[str, Tolerance], noise_multiple: float, *, fallback: bool = False
) -> Measure:
    """Returns a function that computes the reference and the tolerance of one case.

    A new input gets its own noise floor. The limit is max(given limit, noise_multiple * max(floor, units)), and
    `units` is `FALLBACK_ULPS` units in the last place of the largest value. The function returns None if the original
    raises or gives NaN or infinity, because any result is then acceptable.

    Args:
        run: Runs a model on a batch and names its outputs.
        model: The original model. float64 uses one copy.
        tolerances: Tolerance of the outputs to compare, from the cases of the run.
        noise_multiple: Tolerance as a multiple of the noise floor.
        fallback: True if float64 is not available.
    """
    double: nn.Module | None = None
    if not fallback and any(tensor.is_floating_point() for tensor in [*model.parameters(), *model.buffers()]):
        double = float64_model.copy_to_float64(model)

    def measure(case: Case) -> tuple[Reference, dict[str, Tolerance]] | None:
        with torch.no_grad(), restoring_state(model):
            try:
                outputs = run(model, case.batch)
                exact = outputs if double is None else run(double, to_float64(case.batch))
            except Exception:  # model code may raise anything
                return None
        if not all(bool(torch.isfinite(outputs[name]).all()) for name in tolerances):
            return None
        reference = Reference((case,), (outputs,), (exact,))
        noise = reference.noise[0]
        return reference, {
            name: _tolerance_of_case(tolerance, outputs[name], noise[name], noise_multiple)
            for name, tolerance in tolerances.items()
        }

    return measure


def failure_test(measure: Measure, candidate: Run) -> Fails:
    """Returns a function that checks if a target fails on a batch.

    Args:
        measure: Computes the reference and the tolerance of a case; see `make_measure`.
        candidate: Runs the target on a batch.
    """

    def fails(batch: Batch) -> bool:
        measured = measure(Case("found", batch))
        return measured is not None and not ParityChecker(*measured).check("candidate", candidate).passed

    return fails


def _tolerance_of_case(tolerance: Tolerance, original: torch.Tensor, noise: float, noise_multiple: float) -> Tolerance:
    if tolerance.fixed or not original.is_floating_point():
        return tolerance
    scale = distances.max_magnitude(original)
    limit = max(tolerance.limit, noise_multiple * max(noise, FALLBACK_ULPS * torch.finfo(original.dtype).eps * scale))
    drowned = limit > LARGEST_LIMIT * scale and limit > tolerance.limit
    return replace(tolerance, limit=math.inf if drowned else limit, own_limits={})


# Size of each dimension, and kind of values of each input.
_Choice = tuple[tuple[int, ...], tuple[str, ...]]


@dataclass(frozen=True)
class _Space:
    """Search space: a range of sizes per dimension and several kinds of values per input."""

    template: Case
    signature: Signature
    ranges: Mapping[str, tuple[int, int]]
    choices: Mapping[str, Sequence[str]]
    vocabularies: Mapping[str, int] | None = None
    max_elements: float = math.inf

    def batch(self, choice: _Choice) -> Batch:
        resized = resize(self.template.batch, self.signature, self._sizes(choice))
        values = zip(resized.items(), choice[1], strict=True)
        return {name: self._values(name, tensor, kind) for (name, tensor), kind in values}

    def case(self, choice: _Choice) -> Case:
        sizes = [", ".join(f"{name} {size}" for name, size in self._sizes(choice).items())]
        kinds = [
            f"{name} {kind}" for name, kind in zip(self.template.batch, choice[1], strict=True) if kind != _AS_GIVEN
        ]
        like = [f"else as at {self.template.name}"] if len(kinds) < len(choice[1]) else []
        return Case("; ".join(part for part in (*sizes, *kinds, *like) if part), self.batch(choice))

    def _sizes(self, choice: _Choice) -> dict[str, int]:
        dims = self.signature.dims
        sizes = {name: dims[name].fit(size) for name, size in zip(self.ranges, choice[0], strict=True)}
        return cut_to(self.max_elements, self.template.batch, self.signature, sizes)

    def _values(self, name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        word, _, number = kind.partition(" ")
        match word:
            case "all":
                return torch.full_like(tensor, float(number) if tensor.is_floating_point() else int(number))
            case "padded":
                return with_padding({name: torch.ones_like(tensor)}, (number,))[name]
            case "random":
                return _random(tensor, (self.vocabularies or {}).get(name), int(number))
        return tensor


def _choices(name: str, tensor: torch.Tensor, vocabularies: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the kinds of values of an input, simplest first."""
    if is_padding_mask(name, tensor):
        return ("all 1", "padded right", "padded left", "all 0", _AS_GIVEN)
    if tensor.is_floating_point():
        return ("all 0", "all 1", _AS_GIVEN)
    if tensor.dtype is torch.bool:
        return ("all 0", "all 1", _AS_GIVEN)
    ends = [0, vocabularies[name] - 1] if name in vocabularies else []
    constants = sorted({*tensor.unique().tolist()[:_CONSTANTS], *ends})
    return (*(f"all {number}" for number in constants), _AS_GIVEN)


def _random(tensor: torch.Tensor, count: int | None, seed: int) -> torch.Tensor:
    """Returns normal values of the same scale, vocabulary ids, or a sample of existing values."""
    generator = torch.Generator().manual_seed(seed)
    if tensor.is_floating_point():
        size = max(float(distances.finite(tensor).abs().double().mean()), 1e-6)
        return (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * size).to(tensor.dtype)
    pool = tensor.flatten() if count is None else torch.arange(count)
    return pool[torch.randint(len(pool), tensor.shape, generator=generator)].to(tensor.dtype)


class _Check:
    """Cached check of choices. After the time limit it rejects new ones."""

    def __init__(self, fails: Fails, space: _Space, seconds: float) -> None:
        self.fails, self.space, self.end = fails, space, time.monotonic() + seconds
        self.results: dict[_Choice, bool] = {}

    def __call__(self, choice: _Choice) -> bool:
        if choice not in self.results:
            if time.monotonic() > self.end:
                return False
            self.results[choice] = self.fails(self.space.batch(choice))
        return self.results[choice]


def _with_smaller_sizes(check: _Check, choice: _Choice) -> _Choice:
    """Reduces the sizes of a failing choice."""
    from hypothesis import strategies as st

    # Most draws are the largest size, which fails, so that hypothesis soon has a failure to shrink.
    limits = [(low, size) for (low, _), size in zip(check.space.ranges.values(), choice[0], strict=True)]
    sizes = (st.integers(low, size + 3 * (size - low + 1)).map(partial(min, size)) for low, size in limits)
    smallest = _find(check, st.tuples(st.tuples(*sizes), st.just(choice[1])), _EXAMPLES, seed=0)
    return choice if smallest is None else smallest


def _with_simpler_values(check: _Check, choice: _Choice) -> _Choice:
    """Replaces the values of one input after another by the simplest that still fail."""
    sizes, kinds = choice[0], list(choice[1])
    for index, simpler in enumerate(check.space.choices.values()):
        trials = ((sizes, (*kinds[:index], kind, *kinds[index + 1 :])) for kind in simpler)
        kinds = list(next((trial for trial in trials if check(trial)), (sizes, tuple(kinds)))[1])
    return sizes, tuple(kinds)


def _find(check: _Check, choices: SearchStrategy[_Choice], examples: int, seed: int) -> _Choice | None:
    """Returns the simplest failing choice that hypothesis finds."""
    import hypothesis  # lazy import, because most runs do not search

    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        verbosity=hypothesis.Verbosity.quiet,
    )
    with _no_files():
        try:
            choice: _Choice = hypothesis.find(choices, check, settings=settings, random=random.Random(seed))  # noqa: S311
        except (hypothesis.errors.NoSuchExample, hypothesis.errors.FailedHealthCheck):
            return None  # FailedHealthCheck occurs if a hypothesis test calls this function, because tests cannot nest
    return choice


@contextmanager
def _no_files() -> Iterator[None]:
    """Moves hypothesis's files from the working directory to a temporary folder."""
    from hypothesis import configuration

    with signals.temporary_folder() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)
