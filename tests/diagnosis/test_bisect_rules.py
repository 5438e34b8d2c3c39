"""The rule, its change and the node that cause a failed check are named and reproduced."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from optexport import Dim, errors, export
from optexport.diagnosis import reproduction
from optexport.diagnosis.bisect_rules import _first_failing
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm,
    Match,
    MergeLinears,
    Transformation,
)
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.diagnosis.failures import NAMES, Relu, Spoil, failing, reproduce


class Baked(Transformation):
    preserves_computation = True

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
            if node.args[1] == 1:
                node.replace_all_uses_with(node.meta["val"].node.hint)
        return graph_module


class Silent(Transformation):
    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for parameter in graph_module.parameters():
            parameter.data.mul_(1.1)
        return graph_module


@dataclasses.dataclass(frozen=True)
class SpoiltFold(FuseBatchNorm):
    """Folds a batch norm with one wrong weight."""

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> list[tuple[fx.Node, Any]]:
        rewritten = super().rewrite(graph_module, match)
        with torch.no_grad():
            graph_module.get_submodule(str(rewritten[0][0].target)).weight.view(-1)[0] += 1e-2  # type: ignore[operator]
        return rewritten


@given(st.integers(1, 200).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_bisection_finds_the_first_failure_in_log_steps(numbers: tuple[int, int]) -> None:
    count, first = numbers
    calls: list[int] = []

    def passes(number: int) -> bool:
        calls.append(number)
        return number < first

    assert _first_failing(count, passes) == first
    assert len(calls) <= count.bit_length()


@pytest.mark.slow
def test_rule_and_node_are_named_and_reproduced(tmp_path: Path) -> None:
    text = failing(tmp_path / "block", MergeLinears(), Relu(), ChangeTrueDivToMulByInverse())
    assert "--without" not in text
    assert "Relu caused the difference. It changed gelu." in text
    assert text.endswith("\nHint: Remove Relu from transformations.")
    assert "First difference: gelu (aten.gelu.default in module act), 1." in text
    assert "\n  Its input agrees: linear_4.\n" in text
    folder = tmp_path / "block-failure"
    assert f"\n  Reproduce: python {folder / 'reproduce.py'}\n" in text
    assert {path.name for path in folder.iterdir()} == NAMES | {"before.pt2", "after.pt2", "piece.safetensors"}
    assert len((folder / "reproduce.py").read_text().splitlines()) < 30
    nodes = torch.export.load(folder / "after.pt2").graph.nodes
    assert [node.name for node in nodes] == ["linear_4", "relu", "output"]
    done = reproduce(folder)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("gelu is off by 1.")
    shutil.copyfile(folder / "before.pt2", folder / "after.pt2")  # as if the rule were fixed
    assert not reproduction._fails(folder / "reproduce.py", raises=False)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(("name", "node", "position"), [("query", "linear", 1), ("down", "linear_5", 6)])
def test_failing_change_among_many_of_a_rule_is_named(tmp_path: Path, name: str, node: str, position: int) -> None:
    text = failing(tmp_path / "block", Spoil(name))
    assert f"Spoil caused the difference. It changed {node} (change {position} of 6)." in text
    assert f"First difference: {node} (module {name}), " in text


@pytest.mark.slow
def test_rule_that_marks_no_changed_node_is_named(tmp_path: Path) -> None:
    text = failing(tmp_path / "block", Silent(), formats=["pt2"])
    assert "Silent caused the difference. It did not mark the nodes that it changed." in text


@pytest.mark.nightly
def test_exception_at_one_size_is_reproduced(tmp_path: Path) -> None:
    text = failing(tmp_path / "block", Baked())
    assert "Baked caused the difference." in text
    assert "First difference: reshape (aten.reshape.default) raises RuntimeError: shape" in text
    done = reproduce(tmp_path / "block-failure")
    assert done.returncode == 1
    assert "is invalid for input of size" in done.stderr


@pytest.mark.slow
def test_fold_is_compared_with_all_nodes_that_it_replaces(tmp_path: Path) -> None:
    """The convolution keeps its name and replaces the norm too. Comparing the convolution alone always fails."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.out(m.norm(m.conv(x)).relu())

    model = Program(body, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), out=nn.Conv2d(4, 2, 1))
    with pytest.raises(errors.ParityError) as caught:
        export(
            randomise(model), {"x": torch.randn(2, 3, 9, 9)}, tmp_path / "bundle", transformations=[SpoiltFold()],
            formats=["pt2"],
        )  # fmt: skip
    text = str(caught.value)
    assert "SpoiltFold caused the difference. It changed conv2d." in text
    distance = float(re.search(r"First difference: batch_norm \(module norm\), ([\d.e-]+) in float64", text)[1])  # type: ignore[index]
    assert distance < 0.2  # and not the full effect of the norm
    shown = reproduce(tmp_path / "bundle-failure")
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert f"batch_norm is off by {distance:.1e}" in shown.stdout


@pytest.mark.slow
def test_swapped_outputs_are_reported(tmp_path: Path) -> None:
    class Swapped(Transformation):
        preserves_computation = True

        def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
            (output,) = graph_module.graph.find_nodes(op="output")
            first, second = output.all_input_nodes
            output.args = fx.map_arg(output.args, {first: second, second: first}.__getitem__)
            return graph_module

    model = Program(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    with pytest.raises(errors.ParityError, match="First difference: linear .*, the output is linear_1 instead"):
        export(
            randomise(model), {"x": torch.randn(2, 4)}, tmp_path / "bundle", transformations=[Swapped()],
            formats=["pt2"],
        )  # fmt: skip


@pytest.mark.slow
def test_output_with_another_dtype_is_reported(tmp_path: Path) -> None:
    class Narrow(Transformation):
        preserves_computation = True

        def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
            (output,) = graph_module.graph.find_nodes(op="output")
            (result,) = output.all_input_nodes
            with graph_module.graph.inserting_before(output):
                cast = graph_module.graph.call_function(torch.ops.aten.to.dtype, (result, torch.int32))
            output.replace_input_with(result, cast)
            return graph_module

    model = Program(lambda m, x: m.a(x).argmax(-1), a=nn.Linear(4, 3))
    with pytest.raises(errors.ParityError, match="no distance can be measured: output: "):
        export(
            randomise(model), {"x": torch.randn(2, 4)}, tmp_path / "bundle", transformations=[Narrow()], formats=["pt2"]
        )


class PooledAndLargest(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mean(-1), torch.nan_to_num(x).argmax(-1) + x.isnan().sum(-1)


class DropNan(Transformation):
    preserves_computation = True

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        (x,) = graph_module.graph.find_nodes(op="placeholder")
        with graph_module.graph.inserting_after(x):
            node = graph_module.graph.call_function(torch.ops.aten.nan_to_num.default, (x,))
        x.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        self.mark_as_transformed(node)
        return graph_module


def test_rule_is_named_if_another_output_is_all_nan(tmp_path: Path) -> None:
    """The trace was blamed, because nothing can be compared in an output that is NaN in the failing case."""
    x = torch.randn(3, 8)
    x[0, 0] = torch.nan
    with pytest.raises(errors.ParityError) as caught:
        export(
            PooledAndLargest().eval(),
            {"x": x},
            tmp_path / "out",
            transformations=[DropNan()],
            formats=["pt2"],
            dynamic={"x": {0: Dim("batch", 1, 8)}},
        )
    assert "DropNan caused the difference." in str(caught.value)
