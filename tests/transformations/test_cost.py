"""Applying rules costs in proportion to the graph: counted in calls of functions, whatever the machine."""

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
# Hashes that differ from process to process move the counts by less.
MORE = 1.02


def _calls(rules: Sequence[NamedRule], nodes: int) -> int:
    """How many functions are called as rules are applied to a graph of so many nodes."""
    graph_module, profile = stack(nodes), cProfile.Profile()
    gc.collect()
    gc.disable()  # finalizers of what other tests left would count too
    try:
        profile.runcall(transform, graph_module, rules)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.parametrize("name", [name for name in registry.RULES if name not in OTHERS])
def test_the_same_number_of_nodes_costs_as_much_at_the_end_of_a_long_graph_as_in_a_short_one(name: str) -> None:
    rules = [NamedRule(name, {}, registry.load(name, {}, Path(), name), in_python=True)]
    _calls(rules, STEP)  # what is called at the first use alone
    short, middle, long = (_calls(rules, times * STEP) for times in (1, 2, 3))
    assert long - middle <= MORE * (middle - short)
