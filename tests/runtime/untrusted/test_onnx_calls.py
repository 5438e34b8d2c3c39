"""ONNX files whose functions come to no end are refused before anything opens them, and others are opened."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from optexport import Bundle, verify
from optexport.diagnosis.bundle import blame_bundle
from optexport.errors import BundleError, OptexportError, SourceError
from optexport.runtime.untrusted import onnx_calls
from tests._helpers import exports
from tests._helpers.cli import CliRunner, cli, message

OPSETS = [helper.make_opsetid("", 18), helper.make_opsetid("c", 1)]


def relu(given: str, made: str) -> NodeProto:
    return helper.make_node("Relu", [given], [made])


def call(name: str, given: str, made: str) -> NodeProto:
    return helper.make_node(name, [given], [made], domain="c")


def function(name: str, nodes: Sequence[NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("c", name, ["a"], ["b"], nodes, OPSETS)


def doubling(levels: int) -> list[onnx.FunctionProto]:
    """Functions of which each calls the next one twice."""
    nodes = [[call(f"F{level + 1}", "a", "t"), call(f"F{level + 1}", "t", "b")] for level in range(levels - 1)]
    return [function(f"F{level}", inner) for level, inner in enumerate([*nodes, [relu("a", "b")]])]


def branching(levels: int) -> list[onnx.FunctionProto]:
    """The same, where each call is in a branch."""
    functions = []
    for level in range(levels - 1):
        variants = {}
        for name in ("then_branch", "else_branch"):
            made = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
            variants[name] = helper.make_graph([call(f"F{level + 1}", "a", name)], name, [], [made])
        true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
        condition = helper.make_node("Constant", [], ["c"], value=true)
        functions.append(function(f"F{level}", [condition, helper.make_node("If", ["c"], ["b"], **variants)]))
    return [*functions, function(f"F{levels - 1}", [relu("a", "b")])]


def chained(levels: int, width: int) -> list[onnx.FunctionProto]:
    """Functions of some nodes each, of which each calls the next one once."""
    functions = []
    for level in range(levels):
        nodes = [relu("a" if step == 0 else f"t{step - 1}", f"t{step}") for step in range(width)]
        last = relu if level == levels - 1 else lambda given, made, level=level: call(f"F{level + 1}", given, made)
        functions.append(function(f"F{level}", [*nodes, last(f"t{width - 1}", "b")]))
    return functions


def saved(functions: Sequence[onnx.FunctionProto], path: Path, called: NodeProto | None = None) -> Path:
    """A file whose graph calls the first of some functions."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([called or call("F0", "x", "y")], "graph", [x], [y])
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=OPSETS, ir_version=9), path)
    return path


@pytest.mark.parametrize(
    "functions",
    [doubling(40), branching(40), chained(1_000, 10)],
    ids=["each calls the next twice", "in branches", "on many levels"],
)
def test_functions_that_would_take_for_ever_to_write_out_are_refused(
    functions: list[onnx.FunctionProto], tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"are more than [\d,]+ nodes on \d+ levels"):
        onnx_calls.check(saved(functions, tmp_path / "model.onnx"))


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    functions = [function("F0", [call("F1", "a", "b")]), function("F1", [call("F0", "a", "b")])]
    with pytest.raises(SourceError, match="its function c:F[01] calls itself"):
        onnx_calls.check(saved(functions, tmp_path / "model.onnx"))


def test_a_graph_for_a_function_which_could_hold_it_often_is_refused(tmp_path: Path) -> None:
    made = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    inner = helper.make_graph([relu("x", "b")], "inner", [], [made])
    called = helper.make_node("F0", ["x"], ["y"], domain="c", body=inner)
    with pytest.raises(SourceError, match="it gives a graph to its function c:F0"):
        onnx_calls.check(saved([function("F0", [relu("a", "b")])], tmp_path / "model.onnx", called))


@pytest.mark.parametrize("functions", [doubling(6), branching(6), chained(20, 10)])
def test_functions_that_come_to_an_end_open(functions: list[onnx.FunctionProto], tmp_path: Path) -> None:
    from optexport.runtime.runners import open_onnx

    open_onnx(saved(functions, tmp_path / "model.onnx"), ["y"], optimised=False)


@pytest.mark.parametrize(
    "content",
    [b"\x0b", b"\xff" * 11, b"\xca\x81\x80\x80\x10\x00", b"\x3a\xff\xff\xff\xff\x7f", b"\xca\x01\x01\xff"],
    ids=["a kind of field", "a number", "a field", "a length", "a function"],
)
def test_what_is_written_as_no_onnx_file_is_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"model.onnx: it is no ONNX file: "):
        onnx_calls.check(path)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose digests fit, and whose ONNX file would come to 2^40 nodes."""
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path_factory.mktemp("hostile") / "bundle"))
    model = onnx.load(bundle / "model.onnx")
    model.functions.extend(doubling(40))
    model.opset_import.extend(OPSETS[1:])
    model.graph.node.append(call("F0", model.graph.input[0].name, "more"))
    onnx.save(model, bundle / "model.onnx")
    exports.reseal(bundle, "model.onnx")
    return bundle


def test_every_command_that_opens_one_refuses_it(hostile: Path) -> None:
    for opens in (verify, blame_bundle, lambda bundle: Bundle.load(bundle, "onnx")):
        with pytest.raises(OptexportError, match=r"model.onnx: its functions, .* are more than") as caught:
            opens(hostile)
        assert isinstance(caught.value, BundleError)
    told = message(CliRunner().invoke(cli, ["bench", str(hostile), "--format", "onnx", "--rounds", "2"]), 5)
    assert "its functions, written out in place of their calls, are more than" in told


def test_a_file_without_functions_is_looked_at_without_onnx() -> None:
    path = exports.exported().output / "model.onnx"
    code = (
        "import sys\nfrom pathlib import Path\nfrom optexport.loading import onnx_calls\n"
        f"onnx_calls.check(Path({str(path)!r}))\nassert 'onnx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
