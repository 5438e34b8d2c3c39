"""Diagnosis of parity failures: it names the rule, its change and the node, and writes a reproduction."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from torch import fx, nn

from optexport import errors, export
from optexport._utils.progress import Progress
from optexport.cli.main import cli
from optexport.diagnosis import reproduction
from optexport.diagnosis.bisect_rules import _first_failing
from optexport.diagnosis.divergence import compare
from optexport.diagnosis.intermediates import observe_graph, observe_onnx, observe_torchscript
from optexport.transformations import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm,
    Match,
    MergeLinears,
    Rule,
    Transformation,
)
from tests._helpers import exports
from tests._helpers.cli import Caller, config, message
from tests._helpers.graphs import Program
from tests._helpers.models import randomise
from tests._helpers.tampering import bake_torchscript, tamper_onnx, tamper_pt2

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


class Once(Transformation):
    """Changes the outputs, and raises when it is applied again."""

    preserves_computation = True
    calls = itertools.count()

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        if next(self.calls):
            raise LookupError("only once")
        return Spoil().transform(graph_module)


class Baked(Transformation):
    preserves_computation = True

    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
            if node.args[1] == 1:
                node.replace_all_uses_with(node.meta["val"].node.hint)
        return graph_module


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


def failing_file(output: Path, file_format: str, spoil: Callable[[Path], object]) -> str:
    """Returns the error of an export with a file that is changed before its check."""
    names = {"onnx": "model.onnx", "torchscript": "model.torchscript.pt", "pt2": "model.pt2"}

    def announce(stage: str, seconds: float | None) -> None:
        if stage == f"check {file_format}" and seconds is None:
            for draft in output.parent.glob(f".{output.name}.partial-*"):
                spoil(draft / names[file_format])

    return failing(output, MergeLinears(), formats=[file_format], progress=Progress(announce))


def reproduce(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the reproduction in a new process without optexport and transformers."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('optexport', 'transformers', 'onnx', 'tests')))"
    code = f"{blocked}; import runpy; runpy.run_path({str(folder / 'reproduce.py')!r}, run_name='__main__')"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)


@given(st.integers(1, 200).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count))))
def test_bisection_finds_the_first_failure_in_log_steps(numbers: tuple[int, int]) -> None:
    count, first = numbers
    asked: list[int] = []

    def passes(number: int) -> bool:
        asked.append(number)
        return number < first

    assert _first_failing(count, passes) == first
    assert len(asked) <= count.bit_length()


def test_rule_and_node_are_named_and_reproduced(tmp_path: Path) -> None:
    told = failing(tmp_path / "block", MergeLinears(), Relu(), ChangeTrueDivToMulByInverse())
    assert "--without" not in told
    assert "Relu is to blame, which changed gelu. Remove Relu from transformations." in told
    assert "values part first at gelu (aten.gelu.default in act): by 0.1" in told
    assert "linear_4 before it still agrees" in told
    folder = tmp_path / "block-failure"
    assert f"To see it again: python {folder / 'reproduce.py'}" in told
    assert {path.name for path in folder.iterdir()} == NAMES | {"before.pt2", "after.pt2", "piece.safetensors"}
    assert len((folder / "reproduce.py").read_text().splitlines()) < 30
    nodes = torch.export.load(folder / "after.pt2").graph.nodes
    assert [node.name for node in nodes] == ["linear_4", "relu", "output"]
    done = reproduce(folder)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("gelu: 0.1")
    shutil.copyfile(folder / "before.pt2", folder / "after.pt2")  # as if the rule were fixed
    assert reproduce(folder).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "node", "which"), [("query", "linear", 1), ("down", "linear_5", 6)])
def test_failing_change_among_many_of_a_rule_is_named(tmp_path: Path, name: str, node: str, which: int) -> None:
    told = failing(tmp_path / "block", Spoil(name))
    assert f"Spoil is to blame, which changed {node} (its change {which} of 6)" in told
    assert f"values part first at {node} ({name})" in told


class Silent(Transformation):
    def transform(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        for parameter in graph_module.parameters():
            parameter.data.mul_(1.1)
        return graph_module


@pytest.mark.slow
def test_rule_that_marks_no_changed_node_is_named(tmp_path: Path) -> None:
    told = failing(tmp_path / "block", Silent(), formats=["pt2"])
    assert "Silent is to blame, which changed no node that it says of." in told


@pytest.mark.slow
def test_exception_at_one_size_is_reproduced(tmp_path: Path) -> None:
    told = failing(tmp_path / "block", Baked())
    assert "Baked is to blame" in told
    assert "reshape (aten.reshape.default) raises RuntimeError: shape" in told
    done = reproduce(tmp_path / "block-failure")
    assert done.returncode == 1
    assert "is invalid for input of size" in done.stderr


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spoil", "target", "inside"),
    [
        (tamper_onnx, "query_key_value_merged", "by MatMul, Add with"),
        (weight_of("out.bias", lambda bias: 0 * bias), "linear_3 (out)", "out.bias"),
        (weight_of("norm.bias", lambda bias: 2 * bias), "layer_norm (norm)", "norm.bias"),
        (node_of("node_gelu", to_relu), "gelu (aten.gelu.default in act)", "gelu, made of linear_2 by Relu"),
        (node_of("node_softmax", lambda node: setattr(node.attribute[0], "i", -2)), "softmax", "Softmax"),
    ],
)
def test_node_in_an_onnx_file_is_named_in_both_graphs(
    tmp_path: Path, spoil: Callable[[Path], None], target: str, inside: str
) -> None:
    told = failing_file(tmp_path / "block", "onnx", spoil)
    assert "the exporter or the runtime changed the numbers" in told
    assert f"values part first at {target}" in told
    assert inside in told.partition("In the file it is ")[2]
    folder = tmp_path / "block-failure"
    assert {path.name for path in folder.iterdir()} == NAMES | {"piece.onnx", "piece.safetensors"}
    assert len((folder / "reproduce.py").read_text().splitlines()) < 30


@pytest.mark.slow
def test_reproduction_from_an_onnx_file_fails_in_a_new_process(tmp_path: Path) -> None:
    failing_file(tmp_path / "block", "onnx", weight_of("norm.bias", lambda bias: 2 * bias))
    folder = tmp_path / "block-failure"
    done = reproduce(folder)
    assert (done.returncode, done.stderr) == (1, "")
    weight_of("norm.bias", lambda bias: bias / 2)(folder / "piece.onnx")  # as if the file were fixed
    assert reproduce(folder).returncode == 0


def tamper_torchscript(path: Path) -> None:
    module = torch.jit.load(path)
    with torch.no_grad():
        dict(module.named_parameters())["up.weight"][0, 0] += 0.01
    module.save(path)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("file_format", "spoil", "target"),
    [("torchscript", tamper_torchscript, "linear_4 (up)"), ("pt2", tamper_pt2, "query_key_value_merged")],
)
def test_node_in_other_formats_is_named(
    tmp_path: Path, file_format: str, spoil: Callable[[Path], None], target: str
) -> None:
    told = failing_file(tmp_path / "block", file_format, spoil)
    assert f"values part first at {target}" in told
    assert "In the file it is linear" in told
    assert reproduce(tmp_path / "block-failure").returncode == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_exception_of_a_file_at_one_size_is_reproduced(tmp_path: Path) -> None:
    told = failing_file(tmp_path / "block", "torchscript", bake_torchscript)
    assert "the file raises RuntimeError: The size of tensor a" in told
    assert reproduce(tmp_path / "block-failure").returncode == 1


def test_intermediate_values_of_files_match_the_graph() -> None:
    bundle, batch = exports.exported().output, exports.batch(3, 7)
    graph = torch.export.load(bundle / "model.pt2").module(check_guards=False)
    assert isinstance(graph, fx.GraphModule)
    known, exact = observe_graph(graph, batch), observe_graph(graph, batch, double=True)
    scripted = observe_torchscript(bundle / "model.torchscript.pt", batch)
    for other in (observe_onnx(bundle / "model.onnx", batch), scripted):
        comparison = compare(known, other, exact, by_name=False)
        assert comparison.parting is None
        assert len(comparison.matched) > 0.9 * len(known.values)


@pytest.mark.slow
def test_error_during_diagnosis_does_not_hide_the_failure(tmp_path: Path) -> None:
    told = failing(tmp_path / "block", Once())
    assert "graph: hidden, at traced" in told
    assert "What is to blame could not be found" in told
    assert "only once" in told
    assert (tmp_path / "block-failure" / "parity.json").is_file()


@pytest.mark.slow
def test_failure_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "block-failure").mkdir()
    (tmp_path / "block-failure" / "letter.txt").write_text("mine")
    told = failing(tmp_path / "block", Relu())
    assert "Relu is to blame" in told
    assert "is not what a failed proof left" in told
    assert [path.name for path in (tmp_path / "block-failure").iterdir()] == ["letter.txt"]


@pytest.mark.slow
def test_failure_folder_is_reproducible_and_removed_on_success(tmp_path: Path) -> None:
    failing(tmp_path / "block", Relu())
    first = {path.name: path.read_bytes() for path in (tmp_path / "block-failure").iterdir()}
    failing(tmp_path / "block", Relu())
    assert {path.name: path.read_bytes() for path in (tmp_path / "block-failure").iterdir()} == first
    document = json.loads(first["parity.json"])
    assert [target["target"] for target in document["targets"]] == ["original", "graph"]
    export(exports.block(), exports.batch(), tmp_path / "block", dynamic=exports.DYNAMIC, formats=["pt2"])
    assert [path.name for path in tmp_path.iterdir()] == ["block"]


@pytest.mark.slow
def test_diagnose_runs_a_config_without_writing_a_bundle(tmp_path: Path) -> None:
    call = Caller(tmp_path)
    result = call("diagnose", config())
    assert result.exit_code == 0, result.stderr
    assert "all checks pass: original, graph, pt2 pass" in result.stdout
    assert not (tmp_path / "build" / "model").exists()
    told = message(call("diagnose", config(more='transformations = [{ use = "python:halves:Doubles" }]')), 4)
    assert "python:halves:Doubles is to blame, which changed" in told
    folder = tmp_path / "build" / "model-failure"
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["model-failure"]
    assert "python:halves:Doubles" in (folder / "config.toml").read_text()
    assert str(folder) in told


def test_diagnose_explains_a_bundle(tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    result = CliRunner().invoke(cli, ["diagnose", str(bundle)])
    assert result.exit_code == 0, result.stderr
    assert "nothing to blame" in result.stdout
    weight_of("norm.bias", lambda bias: 2 * bias)(bundle / "model.onnx")
    told = message(CliRunner().invoke(cli, ["diagnose", str(bundle)]), 4)
    assert "model.onnx: it was changed since the bundle was written, so that no exporter need be to blame" in told
    assert "values part first at layer_norm" in told
    assert "norm.bias" in told
    assert (tmp_path / "bundle-failure" / "reproduce.py").is_file()
    assert "no bundle" in message(CliRunner().invoke(cli, ["diagnose", str(tmp_path)]), 2)


@dataclasses.dataclass(frozen=True)
class SpoiltFold(FuseBatchNorm):
    """Folds a batch norm with one wrong weight."""

    def rewrite(self, graph_module: fx.GraphModule, match: Match) -> list[tuple[fx.Node, Any]]:
        rewritten = super().rewrite(graph_module, match)
        with torch.no_grad():
            graph_module.get_submodule(str(rewritten[0][0].target)).weight.view(-1)[0] += 1e-2  # type: ignore[operator]
        return rewritten


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
    told = str(caught.value)
    assert "SpoiltFold is to blame, which changed conv2d" in told
    parted = float(re.search(r"values part first at batch_norm \(norm\): by ([\d.e-]+) where", told)[1])  # type: ignore[index]
    assert parted < 0.2  # and not the full effect of the norm
    shown = reproduce(tmp_path / "bundle-failure")
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert f"batch_norm: {parted:.1g}" in shown.stdout


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
    with pytest.raises(errors.ParityError, match="values part first at linear .*: the output is linear_1 in its place"):
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
            (found,) = output.all_input_nodes
            with graph_module.graph.inserting_before(output):
                cast = graph_module.graph.call_function(torch.ops.aten.to.dtype, (found, torch.int32))
            output.replace_input_with(found, cast)
            return graph_module

    model = Program(lambda m, x: m.a(x).argmax(-1), a=nn.Linear(4, 3))
    with pytest.raises(errors.ParityError, match="where values part: output: the dtype is torch.int32, exp"):
        export(
            randomise(model), {"x": torch.randn(2, 4)}, tmp_path / "bundle", transformations=[Narrow()], formats=["pt2"]
        )


def test_every_file_of_a_failure_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    table = text.partition("The folder `OUTPUT-failure/`")[2].partition("`optexport diagnose")[0]
    whole = {"model.onnx", "model.onnx.data", "model.pt2", "model.torchscript.pt", "model.pt", "before.pt", "after.pt"}
    assert [name for name in sorted(reproduction._NAMES - whole) if f"`{name}`" not in table] == []
