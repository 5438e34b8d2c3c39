"""TorchScript files with side effects are refused before the effect, in every spelling."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.cli import _console
from optexport.errors import SourceError
from optexport.runtime.untrusted import archives
from optexport.runtime.untrusted.script_code import find_forbidden_operator, find_forbidden_text
from tests._helpers.exports import rezip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Named(nn.Module):
    """Children whose names only getattr can access."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a-b", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, "a-b")(x)
        return y


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@torch.jit.interface
class Activation:
    def go(self, x: torch.Tensor) -> torch.Tensor:
        pass


@torch.jit.script
class Loud:
    def __init__(self) -> None:
        self.number = 1

    def go(self, x: torch.Tensor) -> torch.Tensor:
        print("told")
        return x


class BehindInterface(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: list[Activation] = [Loud(), Loud()]
        return chosen[0].go(x)


def _tells(x: torch.Tensor) -> torch.Tensor:
    print("told")
    return x


class Forked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.jit.wait(torch.jit.fork(_tells, x))
        return y


def _before(self: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    print("told")
    return inputs


def _after(self: nn.Module, inputs: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    print("told")
    return result


def hidden(kind: str) -> nn.Module:
    """A module that prints outside of the graph of its forward method."""
    module = {"interface": BehindInterface, "fork": Forked}.get(kind, Plain)()
    if kind == "hook before":
        module.register_forward_pre_hook(_before)
    elif kind == "hook after":
        module.register_forward_hook(_after)
    return module


def saying(line: str, folder: Path) -> Path:
    """Returns a file with one more line of code, before its return statement."""
    path = folder / "model.pt"
    torch.jit.save(torch.jit.script(Named()), path)

    def change(name: str, content: bytes) -> bytes | None:
        if name.endswith(".debug_pkl"):
            return None
        if not name.endswith(".py") or b"class Named" not in content:
            return content
        return content.replace(b"    return ", f"    {line}\n    return ".encode())

    rezip(path, change)
    return path


SPELLINGS = [
    'torch.save("x", "{place}")',
    'getattr(torch, "save")("x", "{place}")',
    'getattr(torch, "s\\141ve")("x", "{place}")',
    'getattr(torch, "sa" "ve")("x", "{place}")',
    'getattr(torch, \'sa\' "ve")("x", "{place}")',
    'getattr( torch , "\\163ave" )("x", "{place}")',
    '_t = torch\n    getattr(_t, "s\\141ve")("x", "{place}")',
    'getattr(torch, "\\146rom_file")("/etc/hostname", False, 3)',
    'print("{place}")',
    'p = print\n    p("{place}")',
    "x = ops.inductor. _reinterpret_tensor(x, [64], [1], 100000)",
    'ops.prim.Print("{place}")',
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_call_with_outside_effects_is_refused_and_does_not_run(spelling: str, tmp_path: Path) -> None:
    path = saying(spelling.format(place=tmp_path / "written"), tmp_path)
    with pytest.raises(SourceError, match="does more than compute|cannot load"):
        archives.load_torchscript(path)
    assert not (tmp_path / "written").exists()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("spelling", "operator"),
    [
        ('getattr(torch, "s\\141ve")("x", "{place}")', "aten::save"),
        ("x = ops.inductor. _reinterpret_tensor(x, [64], [1], 100000)", "inductor::_reinterpret_tensor"),
        ('ops.prim.Print("{place}")', "prim::Print"),
        ("torch.manual_seed(3)", "aten::manual_seed"),
        ('getattr(ops, "prof\\151ler")._record_function_enter_new("x")', "profiler::_record_function_enter_new"),
    ],
)
def test_operators_are_checked_as_well_as_the_code(spelling: str, operator: str, tmp_path: Path) -> None:
    path = saying(spelling.format(place=tmp_path / "written"), tmp_path)
    binding: Any = torch._C
    unit = binding.CompilationUnit()
    binding.import_ir_module(unit, str(path), None, {}, False)
    assert find_forbidden_operator(unit) == operator
    with pytest.raises(SourceError, match="does more than compute"):
        archives.load_torchscript(path)


@pytest.mark.parametrize("kind", ["interface", "fork", "hook before", "hook after"])
def test_print_behind_an_interface_fork_or_hook_is_refused(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(hidden(kind).eval()), path)
    with pytest.raises(SourceError, match="the code uses print, which does more than compute"):
        archives.load_torchscript(path)
    # The code hides the call in this spelling, so the operators of all functions are checked too.
    rezip(path, _respelled)
    with pytest.raises(SourceError, match="the code uses prim::Print, which does more than compute"):
        archives.load_torchscript(path)
    assert "told" not in capfd.readouterr().out


def _respelled(name: str, content: bytes) -> bytes | None:
    if name.endswith(".debug_pkl"):
        return None
    if not name.endswith(".py"):
        return content
    assert find_forbidden_text(content.replace(b"print(", b"ops.prim.Print(").decode()) is None
    return content.replace(b"print(", b"ops.prim.Print(")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text",
    [
        "ops.inductor. _x(y)",
        "f(ops\n  .inductor # one's\n  . _x(y))",
        "ops.inductor.\\\n_x(y)",
        'p = print\np("")',
        'x = "a\\\nb" + "c"; print(x)',
        "x = '''it's''' ; print(x)",
    ],
)
def test_whitespace_comments_and_strings_hide_no_name(text: str) -> None:
    assert find_forbidden_text(text) is not None


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "text",
    [
        'x = "print(1)"',
        "x = '''torch.save(x)'''",
        "(self.print).forward(x)",
        "def print(self)",
        "print : int",
        "# print",
    ],
)
def test_strings_and_other_names_are_not_calls(text: str) -> None:
    assert find_forbidden_text(text) is None


def test_unclosed_quote_takes_linear_time() -> None:
    assert find_forbidden_text('"' + "a" * 1_000_000 + " print(1)") == "print"


def test_names_that_only_getattr_can_access_are_harmless(tmp_path: Path) -> None:
    module = archives.load_torchscript(saying("pass", tmp_path))
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_warnings_are_shown_without_terminal_escapes(tmp_path: Path) -> None:
    module = archives.load_torchscript(saying('torch.warn("\\033]0;title\\007told\\nsigned by the key", 2)', tmp_path))
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restores the setting
        _console.clean_warnings()
        module(torch.ones(1, 2))
        lines = [warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in caught]
    assert "told" in "".join(lines)
    assert "\x1b" not in "".join(lines)
    assert not any(line.startswith("signed") for line in "".join(lines).splitlines()), "which could be a line of ours"


_DEEP = {
    "brackets": "({inner})",
    "signs": "-{inner}",
    "sums": "{inner} + x",
    "calls": "torch.neg({inner})",
    "attributes": "{inner}.T",
    "subscripts": "{inner}[0]",
    "conditions": "x if True else {inner}",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", [*_DEEP, "blocks", "branches"])
def test_deeply_nested_code_is_refused_before_torch_reads_it(kind: str, tmp_path: Path) -> None:
    for depth, is_refused in ((60, False), (20_000, True)):
        if kind == "blocks":
            line = "".join(f"if True:\n{' ' * (depth_of + 5)}" for depth_of in range(min(depth, 2000))) + "pass"
        elif kind == "branches":
            line = "if True:\n      pass\n" + "    elif True:\n      pass\n" * depth
        else:
            before, after = _DEEP[kind].split("{inner}")
            line = f"y = {before * depth}x{after * depth}"
        path = saying(line, tmp_path)
        if not is_refused:
            archives.load_torchscript(path)
            continue
        with pytest.raises(SourceError, match="the code is nested more than 500 levels deep"):
            archives.load_torchscript(path)


@pytest.mark.slow
def test_hundreds_of_nested_modules_open(tmp_path: Path) -> None:
    module: nn.Module = nn.ReLU()
    for _ in range(200):
        module = nn.Sequential(module)
    torch.jit.save(torch.jit.script(module), tmp_path / "model.pt")
    assert archives.load_torchscript(tmp_path / "model.pt")(torch.ones(2)).tolist() == [1, 1]
