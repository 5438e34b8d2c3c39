"""TorchScript files that do more than compute are refused before they do it, however they spell it."""

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
from optexport.runtime.untrusted.script_code import forbidden_operator, forbidden_text
from tests._helpers.exports import rezip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Named(nn.Module):
    """Children whose names only getattr can say."""

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


def _before(self: nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    print("told")
    return given


def _after(self: nn.Module, given: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    print("told")
    return result


def hidden(kind: str) -> nn.Module:
    """A module that prints where the graph of its own method does not show it."""
    module = {"interface": BehindInterface, "fork": Forked}.get(kind, Plain)()
    if kind == "hook before":
        module.register_forward_pre_hook(_before)
    elif kind == "hook after":
        module.register_forward_hook(_after)
    return module


def saying(line: str, folder: Path) -> Path:
    """A file with a line of code more, before it returns."""
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
def test_what_reaches_outside_is_refused_and_does_not_run(spelling: str, tmp_path: Path) -> None:
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
def test_its_operators_are_looked_at_as_well_as_its_text(spelling: str, operator: str, tmp_path: Path) -> None:
    path = saying(spelling.format(place=tmp_path / "written"), tmp_path)
    binding: Any = torch._C
    unit = binding.CompilationUnit()
    binding.import_ir_module(unit, str(path), None, {}, False)
    assert forbidden_operator(unit) == operator
    with pytest.raises(SourceError, match="does more than compute"):
        archives.load_torchscript(path)


@pytest.mark.parametrize("kind", ["interface", "fork", "hook before", "hook after"])
def test_what_prints_behind_an_interface_in_a_fork_or_in_a_hook_is_refused(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(hidden(kind).eval()), path)
    with pytest.raises(SourceError, match="its code uses print, which does more than compute"):
        archives.load_torchscript(path)
    # The same in a spelling that its text alone does not show: the operators of all functions are looked at too.
    rezip(path, _respelled)
    with pytest.raises(SourceError, match="its code uses prim::Print, which does more than compute"):
        archives.load_torchscript(path)
    assert "told" not in capfd.readouterr().out


def _respelled(name: str, content: bytes) -> bytes | None:
    if name.endswith(".debug_pkl"):
        return None
    if not name.endswith(".py"):
        return content
    assert forbidden_text(content.replace(b"print(", b"ops.prim.Print(").decode()) is None
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
def test_blanks_line_breaks_comments_and_texts_hide_no_name(text: str) -> None:
    assert forbidden_text(text) is not None


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
def test_texts_and_names_of_others_are_no_calls(text: str) -> None:
    assert forbidden_text(text) is None


def test_a_quote_that_is_never_closed_takes_no_longer_than_the_text_is_long() -> None:
    assert forbidden_text('"' + "a" * 1_000_000 + " print(1)") == "print"


def test_names_that_only_getattr_can_say_are_no_more_than_names(tmp_path: Path) -> None:
    module = archives.load_torchscript(saying("pass", tmp_path))
    assert module(torch.ones(1, 2)).shape == (1, 2)


def test_what_a_program_warns_of_is_told_without_what_steers_a_terminal(tmp_path: Path) -> None:
    module = archives.load_torchscript(saying('torch.warn("\\033]0;title\\007told\\nsigned by the key", 2)', tmp_path))
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)  # puts it back
        _console.clean_warnings()
        module(torch.ones(1, 2))
        told = [warnings.formatwarning(one.message, one.category, one.filename, one.lineno) for one in caught]
    assert "told" in "".join(told)
    assert "\x1b" not in "".join(told)
    assert not any(line.startswith("signed") for line in "".join(told).splitlines()), "which could be a line of ours"


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
def test_what_lies_too_deep_for_the_stack_is_refused_before_torch_reads_it(kind: str, tmp_path: Path) -> None:
    for depth, refused in ((60, False), (20_000, True)):
        if kind == "blocks":
            line = "".join(f"if True:\n{' ' * (depth_of + 5)}" for depth_of in range(min(depth, 2000))) + "pass"
        elif kind == "branches":
            line = "if True:\n      pass\n" + "    elif True:\n      pass\n" * depth
        else:
            before, after = _DEEP[kind].split("{inner}")
            line = f"y = {before * depth}x{after * depth}"
        path = saying(line, tmp_path)
        if not refused:
            archives.load_torchscript(path)
            continue
        with pytest.raises(SourceError, match="its code nests more than 500 deep"):
            archives.load_torchscript(path)


def test_modules_in_hundreds_of_modules_open(tmp_path: Path) -> None:
    module: nn.Module = nn.ReLU()
    for _ in range(200):
        module = nn.Sequential(module)
    torch.jit.save(torch.jit.script(module), tmp_path / "model.pt")
    assert archives.load_torchscript(tmp_path / "model.pt")(torch.ones(2)).tolist() == [1, 1]
