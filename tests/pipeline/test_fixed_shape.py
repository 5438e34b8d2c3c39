"""A declared axis is a promise: a TorchScript file for one size is an error, unless the user allows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport import export
from optexport.errors import ExportError
from tests._helpers import exports


@pytest.fixture(autouse=True)
def _without_scripting() -> Iterator[None]:
    with exports.without_scripting():
        yield


def _export(folder: Path, **options: Any) -> Any:
    options = {"formats": ["torchscript"], "effort": "quick", **options}
    return export(nn.Linear(4, 4).eval(), {"input": torch.randn(3, 4)}, folder / "bundle", **options)


def test_file_for_one_size_is_refused_if_axes_are_declared(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="batch is declared as dynamic") as caught:
        _export(tmp_path, dynamic={"input": {0: "batch"}})
    assert caught.value.exit_code == 5
    assert "TorchScript cannot compile the graph (unknown operator)" in str(caught.value)
    assert "allow_fixed_shape = true" in str(caught.value.hint)
    assert not (tmp_path / "bundle").exists()


def test_file_for_one_size_is_written_if_the_user_allows_it(tmp_path: Path) -> None:
    result = _export(tmp_path, dynamic={"input": {0: "batch"}}, allow_fixed_shape=True)
    assert result.manifest.artifacts[0].fixed_shape is not None


@pytest.mark.parametrize("dynamic", [None, {}])
def test_file_for_one_size_is_written_if_no_axis_is_declared(dynamic: Any, tmp_path: Path) -> None:
    result = _export(tmp_path, dynamic=dynamic)
    assert result.manifest.artifacts[0].fixed_shape is not None
