"""A project for the pipeline: models, rules with one mistake each, and a config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from optexport._utils.progress import Progress
from tests._helpers import exports

RULES = """
import copy
import operator
import torch
from torch import nn
from optexport.transformations import Transformation


class Wrong(Transformation):
    preserves_computation = True


class ReluForGelu(Wrong):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.target, node.kwargs = torch.ops.aten.relu.default, {}
                self.mark_as_transformed(node)
        return graph_module


class SwappedSlices(Wrong):
    def transform(self, graph_module):
        slices = [n for n in graph_module.graph.nodes if n.target is operator.getitem]
        first, second = slices[:2]
        first.args, second.args = second.args, first.args
        self.mark_as_transformed(first)
        self.mark_as_transformed(second)
        return graph_module


class Replacing(Wrong):
    name = ""

    def transform(self, graph_module):
        linear = copy.deepcopy(graph_module.get_submodule(self.name))
        with torch.no_grad():
            self.change(linear)
        graph_module.set_submodule(self.name, linear)
        for node in graph_module.graph.find_nodes(op="call_module", target=self.name):
            self.mark_as_transformed(node)
        return graph_module


class DroppedBias(Replacing):
    name = "down"

    def change(self, linear):
        linear.bias = None


class ScaledHead(Replacing):
    name = "value"

    def __init__(self, by=1.001):
        self.by = by

    def change(self, linear):
        linear.weight[4:] *= self.by


class BakedSize(Wrong):
    def transform(self, graph_module):
        for node in list(graph_module.graph.nodes):
            if node.target is torch.ops.aten.sym_size.int and node.args[1] == 1:
                node.replace_all_uses_with(node.meta["val"].node.hint)
                self.mark_as_transformed(next(iter(graph_module.graph.find_nodes(op="output"))))
        return graph_module


class NotANumber(Replacing):
    name = "up"

    def change(self, linear):
        linear.weight[0, 0] = float("nan")


class Raising(Wrong):
    def transform(self, graph_module):
        raise LookupError("no such node")


class Unsound(Wrong):
    def transform(self, graph_module):
        first = next(node for node in graph_module.graph.nodes if node.op == "call_module")
        last = list(graph_module.graph.nodes)[-2]
        first.args = (last,)
        return graph_module


class Returning(Wrong):
    def transform(self, graph_module):
        return None
"""
CONFIG = (
    """
[model]
source = "python:pipeline_models:{factory}"
"""
    + exports.INPUTS
    + """
{rules}
[tracking]
enabled = false
[export]
formats = {formats}
output = "out/block"
"""
)
FACTORIES = """
import torch
from torch import nn
from tests._helpers.exports import Block, block

class Baking(Block):
    # torch.export takes such a size for a constant.
    def forward(self, x, mask):
        return {**super().forward(x, mask), "baked": x.new_ones(int(x.shape[1] * 1.5))}

class Eigen(Block):
    # Which no ONNX operator computes.
    def forward(self, x, mask):
        return {**super().forward(x, mask), "eigen": torch.linalg.eigvalsh(x.transpose(1, 2) @ x)}

def baking():
    model = Baking().eval()
    model.load_state_dict(block().state_dict())
    return model

def eigen():
    return Eigen().eval()
"""


def write_modules(folder: Path) -> None:
    """Writes the models and rules that a config may name."""
    (folder / "pipeline_models.py").write_text(FACTORIES)
    (folder / "wrong_rules.py").write_text(RULES)


def config(project: Path, *rules: str, factory: str = "block", formats: tuple[str, ...] = ("pt2",)) -> Path:
    """Writes a config with these rules, by default for the format that is fastest to write."""
    tables = "\n".join(f'[[transformations]]\nuse = "{rule}"' for rule in rules)
    text = CONFIG.format(factory=factory, rules=tables, formats=json.dumps(formats))
    (project / "config.toml").write_text(text)
    return project / "config.toml"


def nothing_is_left(project: Path) -> bool:
    """Returns True if no bundle or draft is left. A reproduction of a failure may stay."""
    return not (project / "out").exists() or {path.name for path in (project / "out").iterdir()} <= {"block-failure"}


def wrong(name: str) -> str:
    return f"python:wrong_rules:{name}"


def at(stage: str, act: Callable[[], object]) -> Progress:
    """Calls a function when a stage begins."""

    def announce(name: str, seconds: float | None) -> None:
        if name == stage and seconds is None:
            act()

    return Progress(announce)
