"""The cost of rules is linear in the size of the graph, counted in function calls."""

from __future__ import annotations

import cProfile
import gc
from collections.abc import Sequence
from pathlib import Path

import pytest

from optexport.transformations import registry
from optexport.transformations.apply import NamedRule, transform
from tests.benchmarks.rules_cost import OTHERS, stack

STEP = 100
# Larger than the variation from hash seeds.
MORE = 1.02


def _calls(rules: Sequence[NamedRule], nodes: int) -> int:
    """Returns the number of function calls of rules on a graph of a number of nodes."""
    graph_module, profile = stack(nodes), cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of objects of other tests would count too
    try:
        profile.runcall(transform, graph_module, rules)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in registry.RULES if name not in OTHERS])
def test_cost_does_not_depend_on_the_length_of_the_graph(name: str) -> None:
    rules = [NamedRule(name, {}, registry.load(name, {}, Path(), name), in_python=True)]
    _calls(rules, STEP)  # some calls happen at the first use only
    short, middle, long = (_calls(rules, times * STEP) for times in (1, 2, 3))
    assert long - middle <= MORE * (middle - short)
