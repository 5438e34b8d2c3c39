"""Tests that the isolated TorchScript compiler shares no state with the process."""

from __future__ import annotations

import functools
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.exporters.torchscript import compile_in_new_unit

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")

X = torch.ones(3)


def climb(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] == 3:
        for step in range(4):
            x = x + step
    return x


class Climb(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return climb(x) + 1


class Unknown(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.no_such_method()  # type: ignore[operator, no-any-return]


def script(module: nn.Module) -> torch.jit.ScriptModule:
    scripted = torch.jit.script(module)
    assert isinstance(scripted, torch.jit.ScriptModule)
    return scripted


def parts(module: torch.jit.ScriptModule) -> dict[str, bytes]:
    file = io.BytesIO()
    torch.jit.save(module, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def fail() -> None:
    with pytest.raises(RuntimeError, match="no_such_method"):
        compile_in_new_unit(lambda: script(Unknown()))


def trace(module: nn.Module) -> torch.jit.ScriptModule:
    traced = torch.jit.trace(module, X)
    assert isinstance(traced, torch.jit.ScriptModule)
    return traced


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [script, trace])
def test_earlier_compilations_do_not_change_the_file(make: Callable[[nn.Module], torch.jit.ScriptModule]) -> None:
    first = parts(compile_in_new_unit(lambda: make(Climb())))
    script(Climb())
    trace(nn.Sequential(Climb(), nn.ReLU()))
    fail()
    assert parts(compile_in_new_unit(lambda: make(Climb()))) == first
    paths = (str(Path(__file__).parent).encode(), b"site-packages", sys.prefix.encode())
    assert [name for name, content in first.items() if any(place in content for place in paths)] == []


def test_modules_compiled_by_the_user_still_work() -> None:
    before, function = script(nn.Sequential(Climb(), nn.ReLU())), torch.jit.script(climb)
    fail()
    fresh = compile_in_new_unit(lambda: script(Climb()))
    after = script(nn.Sequential(Climb(), nn.ReLU()))
    for module in (before, fresh, after, script(nn.Sequential(before, fresh, after))):
        file = io.BytesIO()
        torch.jit.save(module, file)
        file.seek(0)
        layers = 3 if len(list(module.children())) == 3 else 1
        expected = functools.reduce(lambda x, _: Climb()(x), range(layers), X)
        assert torch.equal(module(X), expected)
        assert torch.equal(torch.jit.load(file)(X), expected)
    # torch still has its compilation cache: one class for equal modules, and one function.
    assert before._c._type() == after._c._type()
    assert torch.jit.script(climb).qualified_name == function.qualified_name
    assert torch.equal(function(X), climb(X))


def test_error_in_the_file_shows_the_line_of_code() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(5, 5)

    file = io.BytesIO()
    torch.jit.save(compile_in_new_unit(lambda: script(Product())), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r'File "code/.*", line \d+(.|\n)*torch.matmul(.|\n)*HERE'):
        torch.jit.load(file)(X)
