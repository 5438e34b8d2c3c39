"""Exports that fail their check, and the reproduction of the failure in a new process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import fx, nn

from optexport import errors, export
from optexport._utils.progress import Progress
from optexport.transformations import (
    Match,
    MergeLinears,
    Rule,
    Transformation,
)
from tests._helpers import exports

NAMES = {"diagnosis.txt", "case.safetensors", "parity.json", "reproduce.py"}


@dataclasses.dataclass(frozen=True)
class Spoil(Rule):
    """Replaces every linear by a copy, and zeroes the bias of the named one."""

    name: str = "down"

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | None:
        fresh = node.op == "call_module" and not str(node.target).endswith("_copy")
        is_linear = fresh and isinstance(graph_module.get_submodule(str(node.target)), nn.Linear)
        return Match((node,)) if is_linear else None

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> list[tuple[fx.Node, Any]]:
        (node,) = match.nodes
        old = graph_module.get_submodule(str(node.target))
        assert isinstance(old, nn.Linear)
        new = nn.Linear(old.in_features, old.out_features)
        new.load_state_dict(old.state_dict())
        if node.target == self.name:
            nn.init.zeros_(new.bias)
        node.target = f"{node.target}_copy"
        graph_module.add_submodule(node.target, new)
        return [(node, None)]


class Relu(Transformation):
    preserves_computation = True

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
            node.target, node.kwargs = torch.ops.aten.relu.default, {}
            self.mark_as_transformed(node)
        return graph_module


def failing(output: Path, *rules: Transformation, **options: Any) -> str:
    """Returns the error of a failing export."""
    options = {"formats": ["pt2"], "dynamic": exports.DYNAMIC, **options}
    with pytest.raises(errors.ParityError) as caught:
        export(exports.block(), exports.batch(), output, transformations=rules, **options)
    return str(caught.value)


def failing_file(output: Path, file_format: str, spoil: Callable[[Path], object], passes: Sequence[str] = ()) -> str:
    """Returns the error of an export with a file that is changed before its check."""
    names = {"onnx": "model.onnx", "torchscript": "model.torchscript.pt", "pt2": "model.pt2"}

    def announce(stage: str, seconds: float | None) -> None:
        if stage == f"check {file_format}" and seconds is None:
            for draft in output.parent.glob(f".{output.name}.partial-*"):
                spoil(draft / names[file_format])

    return failing(
        output, MergeLinears(), formats=[file_format], passes={file_format: passes}, progress=Progress(announce)
    )


def reproduce(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the reproduction in a new process without optexport and transformers."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('optexport', 'transformers', 'onnx', 'tests')))"
    code = f"{blocked}; import runpy; runpy.run_path({str(folder / 'reproduce.py')!r}, run_name='__main__')"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)


def node_of(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        model = onnx.load(path)
        change(next(node for node in model.graph.node if node.name == name))
        onnx.save(model, path)

    return spoil


def weight_of(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        model = onnx.load(path)
        weight = next(weight for weight in model.graph.initializer if weight.name == name)
        weight.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(weight)), name))
        onnx.save(model, path)

    return spoil


def to_relu(node: Any) -> None:
    node.op_type = "Relu"
    del node.attribute[:]
