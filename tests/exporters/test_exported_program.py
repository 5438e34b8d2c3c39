"""Tests of the conversion of a graph to a program, and of the ``.pt2`` file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from optexport.errors import ExportError
from optexport.exporters import exported_program
from optexport.exporters.torchscript import exporter
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


class Nothing(nn.Module):
    """Takes an input that it does not read."""

    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        return x.relu()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", files.NAMES)
def test_file_gives_the_outputs_of_the_model_at_any_size(name: str) -> None:
    run = runners.open_pt2(files.pt2_file(name), files.prepared(name).signature.output_names)
    files.agrees(name, run, 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5"])
def test_file_loads_without_transformers_and_gives_a_tuple(name: str, tmp_path: Path) -> None:
    made = files.prepared(name)
    batch = dict(list(files.batches(name))[-1][1])
    got = files.run_without_transformers(files.pt2_file(name), batch, "torch.export.load(path).module()", tmp_path)
    for value, want in zip(got, files.eager(made, batch).values(), strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bert", "t5", "resnet"])
def test_inputs_and_dimensions_keep_their_names(name: str) -> None:
    made = files.prepared(name)
    loaded = torch.export.load(files.pt2_file(name))
    _, keywords = pytree.tree_unflatten(list(range(loaded.call_spec.in_spec.num_leaves)), loaded.call_spec.in_spec)
    assert list(keywords) == [spec.name for spec in made.signature.inputs]
    dynamic = sum(isinstance(size, str) for spec in made.signature.inputs for size in spec.shape)
    free = [
        size
        for node in loaded.graph.find_nodes(op="placeholder")
        if node.name in loaded.graph_signature.user_inputs
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    ]
    assert len(free) == dynamic


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_file_refuses_a_size_outside_the_declared_range(name: str) -> None:
    module = torch.export.load(files.pt2_file(name)).module()
    _, batch = next(iter(files.batches(name)))
    large = {key: value.repeat(17, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    with pytest.raises((RuntimeError, AssertionError)):
        module(**large)


@pytest.mark.slow
def test_flattening_does_not_change_the_graph() -> None:
    traced = trace(randomise(Several()), {"x": X}, BATCH)
    before, code = str(traced.graph_module.graph), traced.graph_module.code
    parameters = dict(traced.graph_module.named_parameters())
    flat = exported_program.flatten(traced.graph_module, traced.signature)
    assert (str(traced.graph_module.graph), traced.graph_module.code) == (before, code)
    assert all(value is parameters[name] for name, value in flat.named_parameters())


@pytest.mark.slow
def test_outputs_are_distinct_and_in_the_order_of_the_signature() -> None:
    model = randomise(Several())
    made = files.prepare(model, {"x": X}, BATCH)
    assert made.signature.output_names == ["y", "again", "x_out", "weight", "nested.0", "nested.1.0"]
    x = torch.randn(5, 4)
    want = files.eager(made, {"x": x})
    for module in (made.flat, made.program.module()):
        got = module(x=x)
        assert type(got) is tuple
        assert len({value.data_ptr() for value in got}) == len(got)
        assert all(torch.equal(value, expected) for value, expected in zip(got, want.values(), strict=True))


@pytest.mark.slow
def test_size_among_the_outputs_is_omitted() -> None:
    made = files.prepare(Sizes(), {"x": X}, BATCH)
    assert made.signature.output_names == ["output_0", "output_2"]
    got = made.program.module()(x=torch.ones(5, 4))
    assert [list(value.shape) for value in got if isinstance(value, torch.Tensor)] == [[5, 4], [4]]
    assert len(got) == 2


@pytest.mark.slow
def test_input_changed_in_place_gives_the_outputs_of_the_model() -> None:
    made = files.prepare(Changing(), {"x": X.clone()}, BATCH)
    got = made.program.module()(x=torch.ones(5, 4))
    assert torch.equal(got[0], torch.full((5, 4), 2.0))
    assert torch.equal(got[1], torch.full((5, 4), 2.0))


@pytest.mark.slow
def test_unread_input_stays_in_the_signature(tmp_path: Path) -> None:
    both = {"x": X, "unread": torch.ones(3, 2)}
    made = files.prepare(Nothing(), both, {"x": {0: "batch"}, "unread": {0: "batch"}})
    exported_program.save(made.program, tmp_path / "model.pt2")
    run = runners.open_pt2(tmp_path / "model.pt2", ["output"])
    assert torch.equal(run({"x": X + 1, "unread": torch.zeros(3, 2)})["output"], (X + 1).relu())


@pytest.mark.slow
def test_the_file_holds_no_sample_inputs(tmp_path: Path) -> None:
    made = files.prepare(randomise(Several()), {"x": torch.full((3, 4), 1234.5)}, BATCH)
    exported_program.save(made.program, tmp_path / "model.pt2")
    sample = torch.full((3, 4), 1234.5).numpy().tobytes()
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        assert all(sample not in archive.read(info) for info in archive.infolist())
    assert torch.export.load(tmp_path / "model.pt2").example_inputs is None
    assert made.program.example_inputs is not None


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).relu())

    made = files.prepare(randomise(Tied()), {"x": torch.randn(3, 64)}, BATCH)
    exported_program.save(made.program, tmp_path / "model.pt2")
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        weights = [info for info in archive.infolist() if "/weight_" in info.filename]
    assert [info.file_size for info in weights] == [64 * 64 * 4]


@pytest.mark.slow
def test_graph_that_fixes_a_declared_size_is_refused_with_a_hint() -> None:
    traced = trace(randomise(Program(lambda m, x: x * 2)), {"x": X}, BATCH)
    flat = exported_program.flatten(traced.graph_module, traced.signature)
    (node,) = [node for node in flat.graph.nodes if node.op == "call_function"]
    with flat.graph.inserting_after(node):
        reshaped = flat.graph.call_function(torch.reshape, (node, (3, 2, 2)))
    node.replace_all_uses_with(reshaped, delete_user_cb=lambda user: user is not reshaped)
    flat.recompile()
    with pytest.raises(ExportError, match="torch.export refused the transformed graph") as caught:
        exported_program.to_program(flat, traced.signature, {"x": X})
    assert caught.value.exit_code == 5
    assert "--without RULE" in str(caught.value)


class Windows(nn.Module):
    """Attention within parts of a sequence. An input holds the lengths of the parts."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # as transformers does while it is traced
            parts = torch.split(x, lengths.tolist(), dim=2)
            return torch.cat([nn.functional.scaled_dot_product_attention(part, part, part) for part in parts], dim=2)


@pytest.mark.slow
def test_attention_with_data_dependent_lengths_is_exported(tmp_path: Path) -> None:
    made = files.prepare(Windows(), {"x": torch.randn(1, 2, 12, 4), "lengths": torch.tensor([5, 7])}, None)
    assert made.program.graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    exported_program.save(made.program, tmp_path / "model.pt2")
    exporter.save(made.program, made.signature, made.example, tmp_path / "model.pt")
    batch = {"x": torch.randn(1, 2, 12, 4), "lengths": torch.tensor([9, 3])}
    want = files.eager(made, batch)["output"]
    for name, opened in (("model.pt2", runners.open_pt2), ("model.pt", runners.open_torchscript)):
        torch.testing.assert_close(opened(tmp_path / name, ["output"])(batch)["output"], want)


@pytest.mark.slow
def test_weight_names_may_contain_special_characters(tmp_path: Path) -> None:
    """Graph networks name edges like this, and such a file could not be opened."""
    kinds = nn.ModuleDict({"<author___writes>": nn.Linear(4, 4), "für": nn.BatchNorm1d(4)})
    model = Program(lambda m, x: m.kinds["für"](m.kinds["<author___writes>"](x)), kinds=kinds)
    result = quick(model, {"x": torch.randn(3, 4)}, tmp_path / "out")
    assert result.passed


class SplitsRows(Rule):
    """Splits the rows into two parts. The result is exact, but a new trace allows fewer rows."""

    def match(self, graph_module: fx.GraphModule, node: fx.Node) -> Match | None:
        return Match((node,)) if node.target is torch.ops.aten.relu.default else None

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> Any:
        (node,) = match.nodes
        x, call = node.args[0], graph_module.graph.call_function
        with graph_module.graph.inserting_before(node):
            ends = ((0, 40), (40, 2**63 - 1))
            parts = [call(torch.ops.aten.slice.Tensor, (x, 0, *each)) for each in ends]
            whole = call(torch.ops.aten.cat.default, ([call(torch.ops.aten.relu.default, (each,)) for each in parts],))
        node.replace_all_uses_with(whole)
        graph_module.graph.erase_node(node)
        return [(whole, None)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_file_for_fewer_sizes_than_declared_is_refused(name: str, tmp_path: Path) -> None:
    """It passed if the ends of the range were too large to try. Its ONNX file returned 40 of 64 rows."""
    model, dynamic = (
        Program(lambda m, x: torch.relu(m.linear(x)), linear=nn.Linear(4, 4)),
        {"x": {0: Dim("batch", 1, 64)}},
    )
    with pytest.raises(ExportError, match="holds for batch up to 39 alone, and 64 is promised"):
        quick(
            model,
            {"x": X},
            tmp_path / "out",
            dynamic=dynamic,
            transformations=SplitsRows(),
            formats=[name],
            effort="quick",
        )
