"""The laws hold for random modules and all rules in random orders."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Interpreter, Node

from optexport.testing import check_laws, check_undo_alone, outputs
from optexport.transformations import Rule, compose
from tests.tiers import examples
from tests.transformations.generated import Case, cases
from tests.transformations.test_laws import RULES

_ORDERS = st.lists(st.sampled_from(RULES), min_size=1, max_size=len(RULES))


class _Largest(Interpreter):
    """Records the largest intermediate value, to which rounding is relative."""

    largest = 1.0

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel():
            self.largest = max(self.largest, result.abs().max().item())
        return result


def _largest(graph_module: GraphModule, x: torch.Tensor) -> float:
    interpreter = _Largest(graph_module)
    with torch.no_grad():
        interpreter.run(x.clone())
    return interpreter.largest


def _check(case: Case, order: list[Rule], inplace: bool, alone: bool) -> None:
    try:
        outputs(case.module, case.x)
    except (RuntimeError, ValueError):
        assume(False)  # the program cannot run, for example because it views swapped axes
    graph_module = case.graph()
    scale = _largest(graph_module, case.x)
    assume(math.isfinite(scale) and scale < 1e4)  # beyond this, half precision has no digits left to compare
    note(f"{case.tracing}, {case.x.dtype}\n{graph_module.graph}\n{graph_module}")
    note(" then ".join(type(rule).__name__ for rule in order))
    if alone:
        check_undo_alone(order, graph_module, case.x, scale)
    else:
        check_laws(order[0] if len(order) == 1 else compose(*order, inplace=inplace), graph_module, case.x, scale=scale)


@pytest.mark.slow
@given(cases(), _ORDERS, st.booleans(), st.booleans())
@settings(max_examples=examples(60))
def test_random_modules_keep_the_laws_under_random_rules(
    case: Case, order: list[Rule], inplace: bool, alone: bool
) -> None:
    _check(case, order, inplace, alone)


@pytest.mark.nightly
@given(cases(), _ORDERS, st.booleans(), st.booleans())
@settings(max_examples=10_000, derandomize=False, suppress_health_check=list(HealthCheck))
def test_ten_thousand_random_modules_keep_the_laws(case: Case, order: list[Rule], inplace: bool, alone: bool) -> None:
    _check(case, order, inplace, alone)
