"""Measures the cost of the rules: their CPU time for graphs of up to 20,000 nodes, and their share of a run.

    python -m tests.benchmarks.rules_cost [--nodes 20000] [--rounds N] [--every] [--plot FILE.svg] [--share]

A graph is a stack of tiny transformer layers. Each layer has its queries, keys and values, eager attention, a scale, a
residual batch norm and two layer norms. One layer is traced, and its nodes are copied as often as necessary. The rules
are applied like in the transform stage of a run. The exponent is the exponent of the growth (1: linear), fitted by
least squares to the logarithms, with its 95 % interval. The share is the time of the transform stage over the time of
all stages, for the MiniLM example and without imports.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy import stats
from torch import fx, nn

from optexport._utils.platform import machine
from optexport.pipeline.rules import load_preset
from optexport.tracing.trace import trace
from optexport.transformations import registry
from optexport.transformations.apply import NamedRule, transform
from tests.benchmarks import parity

WIDTH, HEADS = 8, 2
# Rules that need options, or that do nothing without other numbers.
OTHERS = ("keep-outputs", "replace-activation", "cast-precision")


class Layer(nn.Module):
    """A transformer layer with matches for most rules."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 1), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (layer(x).view(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores + (1.0 - mask[:, None, None, :]) * -1e4
        attended = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(attended))
        x = x + self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        hidden: torch.Tensor = self.second(x + self.down(nn.functional.gelu(self.up(x))))
        return hidden


@functools.cache
def _layer() -> fx.GraphModule:
    torch.manual_seed(0)
    return trace(Layer().eval(), {"x": torch.randn(2, 3, WIDTH), "mask": torch.ones(2, 3)}).graph_module


def stack(nodes: int) -> fx.GraphModule:
    """Returns a graph with about so many nodes: stacked layers that share only the mask."""
    traced = _layer()
    graph, root = fx.Graph(), nn.Module()
    inputs = {node.name: graph.node_copy(node) for node in traced.graph.find_nodes(op="placeholder")}
    x, mask = inputs["x"], inputs["mask"]
    for index in range(nodes // len(traced.graph.nodes)):
        copies = dict(zip(traced.graph.find_nodes(op="placeholder"), (x, mask), strict=True))
        for node in traced.graph.nodes:
            if node.op == "output":
                (x,) = (copies[source] for source in node.all_input_nodes)
            elif node.op != "placeholder":
                copies[node] = copied = graph.node_copy(node, copies.__getitem__)
                if node.op in ("call_module", "get_attr"):
                    copied.target = f"layer{index}.{node.target}"
        layer = nn.Module()
        for name, child in traced.named_children():
            layer.add_module(name, copy.deepcopy(child))
        root.add_module(f"layer{index}", layer)
    graph.output(x)
    return fx.GraphModule(root, graph)


def seconds(rules: Sequence[NamedRule], nodes: int) -> float:
    """Returns the CPU seconds of applying rules to a new graph."""
    graph_module = stack(nodes)
    gc.collect()  # of earlier work
    start = time.process_time()
    transform(graph_module, rules)
    return time.process_time() - start


def exponent(sizes: Sequence[int], spent: Sequence[float]) -> tuple[float, float, float]:
    """Returns the exponent of the growth, and its 95 % interval."""
    logarithms = [[math.log(value) for value in values] for values in (sizes, spent)]
    fitted = stats.linregress(*logarithms)
    margin = fitted.stderr * stats.t.ppf(0.975, len(sizes) - 2)
    return fitted.slope, fitted.slope - margin, fitted.slope + margin


def share(rounds: int) -> float:
    """Returns the median share of the transform stage in the time of all stages, for MiniLM."""
    shares = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            progress = parity.run(Path(folder), "standard", 1, is_cached=False)
        shares.append(progress["transform"] / sum(progress.values()))
    return statistics.median(shares)


def plot(path: Path, sizes: Sequence[int], rows: dict[str, list[float]]) -> None:
    """Plots seconds over nodes, both as logarithms, with a line of linear growth."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "rules"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, spent in rows.items():
        axes.loglog(sizes, spent, marker=".", label=name, linewidth=2.5 if name == "all together" else 1)
    together = rows["all together"]
    axes.loglog(sizes, [together[0] * size / sizes[0] for size in sizes], "k:", label="linear")
    axes.set(xlabel="nodes", ylabel="CPU seconds")
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000, help="nodes of the largest graph")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--every", action="store_true", help="also measure rules outside the preset that need no options"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--share", action="store_true", help="run MiniLM's example too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 50, 100)  # like the program
    rules = list(load_preset())
    if arguments.every:
        names = [name for name in registry.RULES if name not in OTHERS]
        rules = [NamedRule(name, {}, registry.load(name, {}, Path(), name), in_python=True) for name in names]
    sizes = [arguments.nodes // 2**power for power in range(5, -1, -1)]
    seconds(rules, sizes[0])  # modules that the first use imports
    rows = {}
    for name, applied in {"all together": rules, "none": [], **{rule.name: [rule] for rule in rules}}.items():
        rows[name] = [statistics.median(seconds(applied, size) for _ in range(arguments.rounds)) for size in sizes]
    print(f"{machine()['processor']}, 1 thread, CPU seconds, medians of {arguments.rounds}\n")
    print(f"| rule | {' | '.join(f'{size:,} nodes' for size in sizes)} | exponent (95 % interval) |")
    print(f"|---|{'---|' * (len(sizes) + 1)}")
    for name, spent in rows.items():
        slope, low, high = exponent(sizes, spent)
        print(f"| {name} | {' | '.join(f'{s:.3f}' for s in spent)} | {slope:.2f} ({low:.2f} to {high:.2f}) |")
    if arguments.plot is not None:
        plot(arguments.plot, sizes, rows)
        print(f"\n{arguments.plot}")
    if arguments.share:
        print(f"\nMiniLM: {100 * share(arguments.rounds):.1f} % of the time of all stages of a run")


if __name__ == "__main__":
    main()
