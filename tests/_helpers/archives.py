"""Tampered ``.pt2`` files, and assertions about them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import SourceError
from optexport.runtime.untrusted import archives
from tests._helpers.exports import rezip

X = torch.linspace(-1, 1, 12).reshape(3, 4)
BATCH = {"x": {0: torch.export.Dim("batch", max=64)}}


class Plain(nn.Module):
    """A module with parameters, persistent and non-persistent buffers, a tensor attribute and a literal constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("kept", torch.full((3,), 0.5))
        self.register_buffer("forgotten", torch.arange(3.0), persistent=False)
        self.attribute = torch.tensor([1.0, 2.0, 3.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.kept + self.forgotten + self.attribute + torch.tensor([0.25, 0.5, 0.75])


def saved(model: nn.Module, path: Path, dynamic: Any = BATCH, x: torch.Tensor = X) -> Path:
    torch.export.save(torch.export.export(model, (), {"x": x}, dynamic_shapes=dynamic), path)
    return path


class Malice:
    """An object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def malice(marker: Path) -> bytes:
    written = io.BytesIO()
    torch.save(Malice(marker), written)
    return written.getvalue()


def refused(path: Path, marker: Path, match: str | None = None) -> None:
    """Asserts that the whole file is refused, and that the code in it does not run."""
    with pytest.raises(SourceError, match=match) as caught:
        module = archives.load_pt2(path).module()
        module(x=X)
    assert not marker.exists()
    assert caught.value.exit_code == 3
    assert path.name in str(caught.value)


def replace(path: Path, ending: str, content: bytes) -> None:
    rezip(path, lambda name, old: content if name.endswith(ending) else old)


def edit(path: Path, ending: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON document in an archive."""

    def edited(name: str, content: bytes) -> bytes:
        if not name.endswith(ending):
            return content
        document = json.loads(content)
        change(document)
        return json.dumps(document).encode()

    rezip(path, edited)


def add(path: Path, *parts: tuple[str, bytes], first: bool = False) -> None:
    """Adds parts to an archive, even if their names exist in it already."""
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new, pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # zipfile warns about duplicate names
        for name, content in [*parts, *members] if first else [*members, *parts]:
            new.writestr(zipfile.ZipInfo(name), content)


def _everywhere(value: Any, key: str, replacement: str) -> Any:
    if isinstance(value, dict):
        return {k: replacement if k == key else _everywhere(v, key, replacement) for k, v in value.items()}
    return [_everywhere(item, key, replacement) for item in value] if isinstance(value, list) else value


def give_sizes(archive: Path, text: str) -> None:
    """Sets every size expression in the graph of an archive to the text."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        return json.dumps(_everywhere(json.loads(content), "expr_str", text)).encode()

    rezip(archive, change)
