"""TorchScript files that do more than compute are refused before they do it, however they spell it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.errors import SourceError
from optexport.sources import archives
from optexport.sources.script_code import forbidden_operator
from tests.exports import rezip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Named(nn.Module):
    """Children whose names only getattr can say."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("a-b", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(self, "a-b")(x)
        return y


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
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_reaches_outside_is_refused_and_does_not_run(spelling: str, tmp_path: Path) -> None:
    path = saying(spelling.format(place=tmp_path / "written"), tmp_path)
    with pytest.raises(SourceError, match="does more than compute|cannot load"):
        archives.load_torchscript(path)
    assert not (tmp_path / "written").exists()


def test_its_operators_are_looked_at_as_well_as_its_text(tmp_path: Path) -> None:
    path = saying(f'getattr(torch, "s\\141ve")("x", "{tmp_path / "written"}")', tmp_path)
    assert forbidden_operator(torch.jit.load(str(path))) == "aten::save"


def test_names_that_only_getattr_can_say_are_no_more_than_names(tmp_path: Path) -> None:
    module = archives.load_torchscript(saying("pass", tmp_path))
    assert module(torch.ones(1, 2)).shape == (1, 2)
