"""Tests the search for sizes at which a model takes a branch that is missing from its trace."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

from optexport._utils import torch_settings
from optexport.errors import ParityError
from optexport.parity.cases.size_probe import find_differing_sizes
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from optexport.transformations import Match, Rule
from tests._helpers.exports import quick
from tests._helpers.graphs import Program

DYNAMIC = {"x": {0: Dim("batch", 1, 8), 1: Dim("rows", 1, 32), 2: Dim("columns", 1, 32)}}
X = torch.linspace(-1, 1, 3 * 4 * 11).reshape(3, 4, 11)
HEADS = nn.ModuleDict({"7": nn.Linear(1, 1), "12": nn.Linear(1, 1)})


def by_key(m: Any, x: torch.Tensor) -> torch.Tensor:
    key = f"{x.shape[2]}"
    return m.heads[key](x.mean(-1, keepdim=True)) if key in m.heads else x.mean(-1, keepdim=True)


def by_attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    return x + getattr(m, f"bias_{x.shape[2]}", 0.0)


def by_lookup(m: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * {7: 2.0}[x.shape[2]]
    except (KeyError, TypeError):
        return x * 3


def doubled_where(condition: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    return lambda m, x: x * (2 if condition(x) else 3)


MODELS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "a module by a text": (by_key, {"heads": HEADS}),
    "an attribute by a text": (by_attribute, {"bias_7": nn.Parameter(torch.ones(7))}),
    "a key that only a number is": (by_lookup, {}),
    "a number's type": (doubled_where(lambda x: isinstance(x.shape[2], int) and x.shape[2] == 7), {}),
    "a number of NumPy's": (doubled_where(lambda x: int(np.ceil(x.shape[2] / 2)) == 7), {}),
    "a root": (doubled_where(lambda x: x.shape[2] ** 0.5 == 5), {}),
    "what is left of two": (doubled_where(lambda x: x[:, -2:].shape[1] < 2 and x.shape[2] > 20), {}),
    "the layout": (doubled_where(lambda x: x.transpose(1, 2).is_contiguous() and x.shape[2] > 20), {}),
    "a sum of ones": (doubled_where(lambda x: x.shape[0] + x.shape[1] == 2), {}),
    "all alike": (doubled_where(lambda x: f"{x.shape[1]}x{x.shape[2]}" == "29x29"), {}),
    "by a thousandth": (lambda m, x: x * (1.001 if str(x.shape[2]) == "20" else 1), {}),
    "a condition on both": (doubled_where(lambda x: (x.shape[1] == 1) & (x.shape[2] >= 16)), {}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_branch_missing_from_the_trace_fails_parity(name: str, tmp_path: Path) -> None:
    """Each model passed, although its files were wrong at declared sizes."""
    forward, members = MODELS[name]
    with torch.random.fork_rng(devices=[]), pytest.raises(ParityError, match=r"^graph: \w+(:| is off by) "):
        quick(Program(forward, **members), {"x": X}, tmp_path / "bundle", dynamic=DYNAMIC)


class Pads(nn.Module):
    """Takes another branch at one size, which shows only under padding."""

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return x * attention_mask + (1 - attention_mask) * (5.0 if str(x.shape[1]) == "21" else 0.0)


@pytest.mark.slow
def test_a_branch_visible_only_under_padding_fails_parity(tmp_path: Path) -> None:
    inputs = {"x": torch.linspace(-1, 1, 24).reshape(3, 8), "attention_mask": torch.ones(3, 8, dtype=torch.int64)}
    dynamic = {name: {0: Dim("batch", 1, 8), 1: Dim("rows", 1, 32)} for name in inputs}
    with pytest.raises(ParityError, match="rows 21"):
        quick(Pads(), inputs, tmp_path / "bundle", dynamic=dynamic)


def searched(model: nn.Module, skipped: Sequence[dict[str, int]] = ()) -> tuple[list[dict[str, int]], list[torch.Size]]:
    """Returns the sizes found and the shapes tried."""
    traced = trace(model.eval(), {"x": X}, DYNAMIC)
    tried = []

    def original(batch: Any) -> dict[str, torch.Tensor]:
        tried.append(batch["x"].shape)
        return {"output": model(batch["x"])}

    def graph(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": traced.graph_module(**batch)}

    return find_differing_sizes(original, graph, {"x": X}, traced.signature, skipped), tried


@pytest.mark.slow
def test_a_model_without_branches_passes_at_many_sizes() -> None:
    differing, tried = searched(Program(lambda m, x: m.linear(x.mean(-1, keepdim=True)), linear=nn.Linear(1, 4)))
    assert differing == []
    assert len(tried) == len(set(tried)) > 200
    assert {shape[2] for shape in tried} == set(range(1, 33))
    assert all(1 <= size <= maximum for shape in tried for size, maximum in zip(shape, (8, 32, 32), strict=True))


@pytest.mark.slow
def test_a_large_model_is_tried_at_fewer_and_smaller_sizes() -> None:
    model = Program(lambda m, x: m.linear(x[..., None]).sum(-1), linear=nn.Linear(1, 60_000))
    _, few = searched(model)
    assert 10 < len(few) < 200
    assert max(map(math.prod, few)) < 8 * 32 * 32


def test_a_size_counts_only_if_the_model_accepts_it() -> None:
    traced = trace(Program(lambda m, x: x * 2).eval(), {"x": X}, DYNAMIC)

    def graph(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": traced.graph_module(**batch)}

    def fails(batch: Any) -> dict[str, torch.Tensor]:
        raise ValueError(batch)

    assert find_differing_sizes(fails, graph, {"x": X}, traced.signature) == []
    assert len(find_differing_sizes(graph, fails, {"x": X}, traced.signature)) == 4


def test_all_runs_of_the_search_use_one_thread() -> None:
    threads: set[int] = set()

    def run(batch: Any) -> dict[str, torch.Tensor]:
        threads.add(torch.get_num_threads())
        return {"output": batch["x"]}

    traced = trace(Program(lambda m, x: x * 2).eval(), {"x": X}, DYNAMIC)
    with torch_settings.threads(3):
        find_differing_sizes(run, run, {"x": X}, traced.signature)
        assert torch.get_num_threads() == 3
    assert threads == {1}


def test_known_sizes_are_skipped_and_others_are_still_found() -> None:
    model = Program(lambda m, x: x * {"7": 2, "12": 3}.get(str(x.shape[2]), 1))
    differing, tried = searched(model, [{"columns": 7}])
    assert {sizes["columns"] for sizes in differing} == {12}
    assert 7 not in {shape[2] for shape in tried}


class SumsInBlocks(Rule):
    """Sums full blocks and the remainder; a multiple of the block size is counted twice."""

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | None:
        return Match((node,)) if node.target is torch.ops.aten.sum.dim_IntList else None

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> Any:
        (node,) = match.nodes
        x, call = node.args[0], graph_module.graph.call_function
        with graph_module.graph.inserting_before(node):
            size = call(torch.ops.aten.sym_size.int, (x, 2))
            multiple_of_eight = call(operator.sub, (size, call(operator.mod, (size, 8))))
            start = call(operator.neg, (call(operator.mod, (size, 8)),))
            parts = [
                call(torch.ops.aten.slice.Tensor, (x, 2, *ends))
                for ends in ((0, multiple_of_eight), (start, 2**63 - 1))
            ]
            total = call(operator.add, tuple(call(torch.ops.aten.sum.dim_IntList, (part, [2])) for part in parts))
        node.replace_all_uses_with(total)
        graph_module.graph.erase_node(node)
        return [(total, None)]


def test_a_rule_wrong_at_some_sizes_fails_parity_and_is_blamed(tmp_path: Path) -> None:
    """All sizes were compared with the trace only, not with the transformed graph."""
    model, dynamic = Program(lambda m, x: m.linear(x.sum(2)), linear=nn.Linear(4, 4)), {"x": DYNAMIC["x"].copy()}
    dynamic["x"].pop(1)
    with pytest.raises(ParityError, match=r"columns (8|16|24)") as raised:
        quick(model, {"x": X}, tmp_path / "bundle", dynamic=dynamic, transformations=SumsInBlocks())
    assert "SumsInBlocks caused the difference" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("mark", [-1e9, torch.finfo(torch.float32).min, -1e4])
def test_mask_values_hide_no_rule_wrong_at_some_sizes(mark: float, tmp_path: Path) -> None:
    """The tolerance was a share of the median, which is the mask value if most results are masked."""
    marked = torch.tensor([True, True, True, False])
    model = Program(lambda m, x: m.linear(x.sum(2)).masked_fill(m.marked, mark), linear=nn.Linear(4, 4))
    model.register_buffer("marked", marked)
    dynamic = {"x": {0: Dim("batch", 1, 8), 2: Dim("columns", 1, 31)}}
    with pytest.raises(ParityError, match=r"columns (8|16|24)") as raised:
        quick(model, {"x": X}, tmp_path / "bundle", dynamic=dynamic, transformations=SumsInBlocks())
    (far, allowed) = re.findall(r"off by ([\d.e+-]+), tolerance ([\d.e+-]+)", str(raised.value))[0]
    assert float(far) > float(allowed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounding_does_not_hide_wrong_sizes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Only the first four sizes with a difference were examined."""
    layers = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 256))
    model = Program(lambda m, x: m.layers(x).sum(2), layers=layers).to(dtype)
    inputs = {"x": torch.randn(3, 1, 11, 8, generator=torch.Generator().manual_seed(0)).to(dtype)}
    dynamic = {"x": {0: Dim("batch", 1, 8), 2: Dim("columns", 1, 31)}}
    with pytest.raises(ParityError, match=r"columns (8|16|24)"):
        quick(model, inputs, tmp_path / "bundle", dynamic=dynamic, transformations=SumsInBlocks())


@pytest.mark.slow
def test_integers_decided_by_rounding_are_not_a_difference() -> None:
    traced = trace(Program(lambda m, x: x.argmax(-1)).eval(), {"x": X}, DYNAMIC)

    def original(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": batch["x"].new_zeros(100, dtype=torch.int64)}

    def graph(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": torch.arange(100) == 99}

    def others(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": (torch.arange(100) > 50).long()}

    def one(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": (torch.arange(100) == 99).long()}

    def tie(batch: Any) -> dict[str, torch.Tensor]:
        return {"output": ((torch.arange(100) == 99) & (batch["x"].flatten()[0] == X[0, 0, 0])).long()}

    for candidate, differing, strictly in ((tie, 0, 4), (one, 4, 4), (others, 4, 4), (graph, 4, 4)):
        for rounded_anew, expected in ((True, differing), (False, strictly)):
            parted = find_differing_sizes(original, candidate, {"x": X}, traced.signature, reordered=rounded_anew)
            assert len(parted) == expected
