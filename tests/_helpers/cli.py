"""Calls the CLI in this process, with a config and a tiny model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from optexport.cli.main import cli

# A model, and the configs and plugins for it.
MODULE = '''
import operator
import torch
from torch import nn
from optexport.transformations import Match, Rule, Transformation

class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x) / 2

def load(**options):
    torch.manual_seed(0)
    return Halves()

def number(): return 3
def fails(): raise KeyError("no weights")
def leaves(): raise SystemExit(0)
def interrupted(): raise KeyboardInterrupt
def cancelled(): raise GeneratorExit("cancelled")
def takes(size): return load()

class Forks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else x[:, :1]

class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(16, 4)

    def forward(self, x):
        return x[..., None] + self.places(torch.arange(x.shape[1]))

class Doubles(Transformation):
    preserves_computation = True

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is operator.truediv:
                node.target = operator.mul
        return graph_module

class Nudges(Transformation):
    """Divides by a little more."""

    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is operator.truediv:
                node.args = (node.args[0], 2.002)
        return graph_module

class Forever(Rule):
    def match(self, graph_module, node):
        return Match((node,)) if node.op == "call_module" else None

    def rewrite(self, graph_module, match):
        return []

class Fails(Transformation):
    def transform(self, graph_module):
        raise RuntimeError("no such thing")
'''


def config(source: str = "halves:load", inputs: str = 'tensors.x.shape = ["batch", 4]', more: str = "") -> str:
    return f"""{more}
[model]
source = "python:{source}"
[inputs]
{inputs}
[export]
formats = ["pt2"]
output = "build/model"
[tracking]
enabled = false
"""


class Caller:
    """Calls a CLI command on a config, in the folder of the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "halves.py").write_text(MODULE, encoding="utf-8")

    def __call__(self, command: str, text: str | bytes, *options: str, before: tuple[str, ...] = ()) -> Result:
        path = self.folder / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        sys.modules.pop("halves", None)  # imported by another test
        return CliRunner().invoke(cli, [*before, command, str(path), *options])


def message(result: Result, code: int) -> str:
    """Returns the error message of a command that failed as expected."""
    assert result.exit_code == code, (result.exit_code, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "This is a bug" not in result.stderr
    first, *more = re.finditer(r"^(?:Error: |FAILED  )", result.stderr, flags=re.MULTILINE)
    assert all(label[0] == first[0] == "FAILED  " for label in more)  # a failed check has a line for each failure
    return result.stderr[first.end() :].replace("\nFAILED  ", "\n")
