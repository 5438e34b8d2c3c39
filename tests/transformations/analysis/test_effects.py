"""What calls do besides giving their result: which functions of PyTorch draw random numbers."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from optexport.transformations.analysis.effects import draws

# These set the generator, or give it away.
_APART = ("seed", "manual_seed", "initial_seed", "set_rng_state", "get_rng_state", "fork_rng", "compile")


def _functions(module: Any) -> dict[str, Any]:
    named = ((name, getattr(module, name)) for name in sorted(dir(module)) if not name.startswith("__"))
    return {
        name: function
        for name, function in named
        if callable(function) and not inspect.isclass(function) and name.lstrip("_") not in _APART and "cud" not in name
    }


def _calls() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments that one function or another can be called with."""
    ones = torch.ones(4, 4) * 0.5
    shapes = (ones, torch.eye(6) * 2, ones[None], ones[None, None], ones[None, None, None])
    more: tuple[tuple[Any, ...], ...] = ((), (2,), (0.5,), (0.5, True), (0.5, 0.6, True), (2, 2), (ones,), (ones, ones))
    for first in shapes:
        for rest in more:
            yield (first, *rest), {}
        yield (first,), {"training": True}
        yield (first, first, first), {"dropout_p": 0.5}
    yield from [((3,), {}), ((3, 3), {}), ((3, (3, 3)), {}), (((3, 3),), {}), ((0.0, 1.0, (3, 3)), {})]


def _draws(function: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments with which a function was seen to draw, if any."""
    for args, kwargs in _calls():
        before = torch.get_rng_state()
        with contextlib.suppress(Exception):  # most do not take most of these
            function(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
            if not torch.equal(torch.get_rng_state(), before):
                return args, kwargs
    return None


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    given = [graph.placeholder(f"x{index}") if isinstance(arg, torch.Tensor) else arg for index, arg in enumerate(args)]
    node = graph.call_function(function, tuple(given), kwargs)
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph), node


def main() -> None:
    """Writes which functions were seen to draw, and whether that is known of them."""
    seen = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for module in (torch, F):
            for name, function in _functions(module).items():
                if (given := _draws(function)) is not None:
                    seen.append((f"{module.__name__}.{name}", draws(*_call(function, *given))))
    print(json.dumps(seen))


def test_every_function_that_is_seen_to_draw_random_numbers_is_known_to() -> None:
    # In a process of its own: among all functions are those that set a default dtype, or no gradients.
    program = "from tests.transformations.graphs import test_effects; test_effects.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    known = dict(json.loads(done.stdout))
    assert {"torch.normal", "torch.svd_lowrank", "torch.nn.functional.dropout2d"} < known.keys()
    assert [name for name, drawing in known.items() if not drawing] == []


@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu"])
def test_a_function_that_is_told_not_to_train_draws_nothing(name: str) -> None:
    assert not draws(*_call(getattr(F, name), (torch.ones(2, 2),), {"training": False}))
