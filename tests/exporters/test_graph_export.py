"""Tests of the conversion of a graph to a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from optexport.errors import ExportError
from optexport.exporters import graph_export, pt2, torchscript
from optexport.runtime import runners
from optexport.signature.signature import Dim
from optexport.tracing.trace import trace
from optexport.transformations import Match, Rule
from tests._helpers.exports import quick
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests.exporters import files

X = torch.linspace(-2, 2, 12).reshape(3, 4)
BATCH = {"x": {0: Dim("batch", 1, 32)}}


class Several(nn.Module):
    """Returns repeated and nested outputs, an input and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.layer(x)
        return {"y": y, "again": y, "x": x, "weight": self.layer.weight, "nested": [y + 1, (x, None)], "none": None}


class Changing(nn.Module):
    """Changes its input in place and returns it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        x.add_(1)
        return y, x


class Sizes(nn.Module):
    """Returns a size and tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x + 1, x.shape[0], x.sum(0)


@pytest.mark.slow
def test_flattening_does_not_change_the_graph() -> None:
    traced = trace(randomise(Several()), {"x": X}, BATCH)
    before, code = str(traced.graph_module.graph), traced.graph_module.code
    parameters = dict(traced.graph_module.named_parameters())
    flat = graph_export.flatten(traced.graph_module, traced.signature)
    assert (str(traced.graph_module.graph), traced.graph_module.code) == (before, code)
    assert all(value is parameters[name] for name, value in flat.named_parameters())


@pytest.mark.slow
def test_outputs_are_distinct_and_in_the_order_of_the_signature() -> None:
    model = randomise(Several())
    subject = files.prepare(model, {"x": X}, BATCH)
    assert subject.signature.output_names == ["y", "again", "x_out", "weight", "nested.0", "nested.1.0"]
    x = torch.randn(5, 4)
    want = files.eager(subject, {"x": x})
    for module in (subject.flat, subject.program.module()):
        got = module(x=x)
        assert type(got) is tuple
        assert len({value.data_ptr() for value in got}) == len(got)
        assert all(torch.equal(value, expected) for value, expected in zip(got, want.values(), strict=True))


@pytest.mark.slow
def test_size_among_the_outputs_is_omitted() -> None:
    subject = files.prepare(Sizes(), {"x": X}, BATCH)
    assert subject.signature.output_names == ["output_0", "output_2"]
    got = subject.program.module()(x=torch.ones(5, 4))
    assert [list(value.shape) for value in got if isinstance(value, torch.Tensor)] == [[5, 4], [4]]
    assert len(got) == 2


@pytest.mark.slow
def test_input_changed_in_place_gives_the_outputs_of_the_model() -> None:
    subject = files.prepare(Changing(), {"x": X.clone()}, BATCH)
    got = subject.program.module()(x=torch.ones(5, 4))
    assert torch.equal(got[0], torch.full((5, 4), 2.0))
    assert torch.equal(got[1], torch.full((5, 4), 2.0))


@pytest.mark.slow
def test_graph_that_fixes_a_declared_size_is_refused_with_a_hint() -> None:
    traced = trace(randomise(Program(lambda m, x: x * 2)), {"x": X}, BATCH)
    flat = graph_export.flatten(traced.graph_module, traced.signature)
    (node,) = [node for node in flat.graph.nodes if node.op == "call_function"]
    with flat.graph.inserting_after(node):
        reshaped = flat.graph.call_function(torch.reshape, (node, (3, 2, 2)))
    node.replace_all_uses_with(reshaped, delete_user_cb=lambda user: user is not reshaped)
    flat.recompile()
    with pytest.raises(ExportError, match="torch.export rejects the transformed graph") as caught:
        graph_export.to_program(flat, traced.signature, {"x": X})
    assert caught.value.exit_code == 5
    assert "Leave out one rule after the other" in str(caught.value)


class Windows(nn.Module):
    """Attention within parts of a sequence. An input holds the lengths of the parts."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # as transformers does while it is traced
            parts = torch.split(x, lengths.tolist(), dim=2)
            return torch.cat([nn.functional.scaled_dot_product_attention(part, part, part) for part in parts], dim=2)


@pytest.mark.slow
def test_attention_with_data_dependent_lengths_is_exported(tmp_path: Path) -> None:
    subject = files.prepare(Windows(), {"x": torch.randn(1, 2, 12, 4), "lengths": torch.tensor([5, 7])}, None)
    assert subject.program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    pt2.save(subject.program, tmp_path / "model.pt2")
    torchscript.save(subject.program, subject.signature, subject.example, tmp_path / "model.pt")
    batch = {"x": torch.randn(1, 2, 12, 4), "lengths": torch.tensor([9, 3])}
    want = files.eager(subject, batch)["output"]
    for name, opened in (("model.pt2", runners.open_pt2), ("model.pt", runners.open_torchscript)):
        torch.testing.assert_close(opened(tmp_path / name, ["output"])(batch)["output"], want)


class SplitsRows(Rule):
    """Splits the rows into two parts. The result is exact, but a new trace allows fewer rows."""

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | None:
        return Match((node,)) if node.target is torch.ops.aten.relu.default else None

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> Any:
        (node,) = match.nodes
        x, call = node.args[0], graph_module.graph.call_function
        with graph_module.graph.inserting_before(node):
            ends = ((0, 40), (40, 2**63 - 1))
            parts = [call(torch.ops.aten.slice.Tensor, (x, 0, *part)) for part in ends]
            joined = call(torch.ops.aten.cat.default, ([call(torch.ops.aten.relu.default, (part,)) for part in parts],))
        node.replace_all_uses_with(joined)
        graph_module.graph.erase_node(node)
        return [(joined, None)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_file_for_fewer_sizes_than_declared_is_refused(name: str, tmp_path: Path) -> None:
    """It passed if the ends of the range were too large to try. Its ONNX file returned 40 of 64 rows."""
    model, dynamic = (
        Program(lambda m, x: torch.relu(m.linear(x)), linear=nn.Linear(4, 4)),
        {"x": {0: Dim("batch", 1, 64)}},
    )
    with pytest.raises(ExportError, match=r"supports batch only up to 39 \(declared: up to 64\)"):
        quick(
            model,
            {"x": X},
            tmp_path / "out",
            dynamic=dynamic,
            transformations=SplitsRows(),
            formats=[name],
            effort="quick",
        )
