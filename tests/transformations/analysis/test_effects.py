"""effects.draws recognizes all functions of PyTorch that draw random numbers."""

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

# These set or return the state of the generator.
_APART = ("seed", "manual_seed", "initial_seed", "set_rng_state", "get_rng_state", "fork_rng", "compile")


def _functions(module: Any) -> dict[str, Any]:
    named = ((name, getattr(module, name)) for name in sorted(dir(module)) if not name.startswith("__"))
    return {
        name: function
        for name, function in named
        if callable(function) and not inspect.isclass(function) and name.lstrip("_") not in _APART and "cud" not in name
    }


def _calls() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields arguments that fit some functions."""
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
    """Returns arguments with which a function draws random numbers, or None."""
    for args, kwargs in _calls():
        before = torch.get_rng_state()
        with contextlib.suppress(Exception):  # most functions reject most arguments
            function(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
            if not torch.equal(torch.get_rng_state(), before):
                return args, kwargs
    return None


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, fx.Node]:
    graph = fx.Graph()
    arguments = [
        graph.placeholder(f"x{index}") if isinstance(arg, torch.Tensor) else arg for index, arg in enumerate(args)
    ]
    node = graph.call_function(function, tuple(arguments), kwargs)
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph), node


def main() -> None:
    """Prints the functions that draw random numbers, and what effects.draws returns for them."""
    results = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for module in (torch, F):
            for name, function in _functions(module).items():
                if (arguments := _draws(function)) is not None:
                    results.append((f"{module.__name__}.{name}", draws(*_call(function, *arguments))))
    print(json.dumps(results))


@pytest.mark.slow
def test_all_functions_that_draw_random_numbers_are_recognized() -> None:
    # In a separate process, because some functions set a default dtype or disable gradients.
    program = "from tests.transformations.analysis import test_effects; test_effects.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answers = dict(json.loads(done.stdout))
    assert {"torch.normal", "torch.svd_lowrank", "torch.nn.functional.dropout2d"} < answers.keys()
    assert [name for name, drawing in answers.items() if not drawing] == []


@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "rrelu"])
def test_function_with_training_disabled_draws_nothing(name: str) -> None:
    assert not draws(*_call(getattr(F, name), (torch.ones(2, 2),), {"training": False}))
