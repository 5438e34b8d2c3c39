"""Intermediate values of a graph or an exported file on one batch."""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import fx

from optexport._utils import atomic_dir, signals
from optexport.bundle import parts
from optexport.errors import describe_error, first_line
from optexport.redaction import redact_error
from optexport.runtime import onnx_session
from optexport.runtime.untrusted import archives
from optexport.signature.signature import as_arguments
from optexport.transformations import DeepCopy
from optexport.transformations.rule import target_name

# Larger tensors are represented by a sample of this many elements, so that a whole model's values fit into memory.
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Value:
    """Output of one node.

    Attributes:
        name: Name of the node.
        operation: Readable name of the module or operator.
        tensor: Elements, flat. A large tensor is sampled, at the same positions for every tensor of that size.
    """

    name: str
    operation: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def kind(self) -> tuple[tuple[int, ...], bool]:
        """Returns the properties that two values must share to match."""
        return self.shape, self.tensor.is_floating_point()


@dataclass
class Observed:
    """Outputs of all nodes, in execution order.

    Attributes:
        needs: Inputs of each node, by name, including nodes whose output is not a tensor.
        outputs: Names of the output nodes, in order.
        complete: Complete tensors of the requested nodes.
        raised: Node that raised, and its error; None without an error.
    """

    values: dict[str, Value] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    complete: dict[str, torch.Tensor] = field(default_factory=dict)
    raised: tuple[str, str] | None = None

    def add(self, name: str, operation: str, result: Any, keep: Collection[str]) -> None:
        """Records the output of a node if it is a tensor.

        Args:
            name: Name of the node.
            operation: Readable name of the module or operator.
            result: Output of the node.
            keep: Nodes whose complete tensors are needed.
        """
        if isinstance(result, torch.Tensor):
            self.values[name] = Value(name, operation, tuple(result.shape), _sampled(result.detach()))
            if name in keep:
                self.complete[name] = result.detach().clone()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() <= _SAMPLE:
        return flat.clone()  # a later node may change it in place
    generator = torch.Generator().manual_seed(flat.numel())
    return flat[torch.randint(flat.numel(), (_SAMPLE,), generator=generator)]


def sample_evenly(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns at most some elements, evenly spaced.

    The distance has no factor in common with the size of an axis, so the elements meet every channel.
    """
    step = -(-tensor.numel() // count) or 1
    while math.gcd(step, tensor.numel()) > 1:
        step += 1
    return tensor.reshape(-1)[::step]


def iterate_values(
    graph_module: fx.GraphModule,
    batch: Mapping[str, torch.Tensor],
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[fx.Node, Any]]:
    """Runs a graph node by node and yields each node with its value. Values that no later node needs are freed.

    Args:
        context: Makes the context that each node runs in.
    """
    arguments, interpreter = as_arguments(batch), fx.Interpreter(graph_module)
    inputs = [arguments[str(node.target)].clone() for node in graph_module.graph.find_nodes(op="placeholder")]
    interpreter.args_iter = iter(inputs)
    for node in graph_module.graph.nodes:
        with context():
            interpreter.env[node] = interpreter.run_node(node)
        yield node, interpreter.env[node]
        for unused in interpreter.user_to_last_uses.get(node, ()):
            del interpreter.env[unused]


def observe_graph(
    graph_module: fx.GraphModule,
    batch: Mapping[str, torch.Tensor],
    *,
    double: bool = False,
    keep: Collection[str] = (),
) -> Observed:
    """Runs a graph node by node and records all values.

    Args:
        double: Run a float64 copy.
        keep: Nodes whose complete tensors are needed.
    """
    observed = Observed(needs={n.name: tuple(i.name for i in n.all_input_nodes) for n in graph_module.graph.nodes})
    (output,) = graph_module.graph.find_nodes(op="output")
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    arguments = as_arguments(batch)
    inputs = [arguments[str(node.target)].clone() for node in graph_module.graph.find_nodes(op="placeholder")]
    if double:
        graph_module = DeepCopy()(graph_module).double()
        inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]

    class Observer(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            try:
                result = super().run_node(n)
            except Exception as error:  # an operator may raise anything
                observed.raised = (n.name, describe_error(error)[:200])
                raise
            if n.op != "get_attr" or n in leaves:  # a weight that is not an output is not a computation step
                observed.add(n.name, describe(n), result, keep)
            return result

    interpreter = Observer(graph_module)
    interpreter.extra_traceback = False
    try:
        with torch.no_grad():
            interpreter.run(*inputs, enable_io_processing=False)
    except Exception:  # the observer has recorded a node's error already
        if observed.raised is None:
            raise
    observed.outputs = tuple(leaf.name for leaf in leaves if leaf.name in observed.values)
    return observed


def describe(node: fx.Node) -> str:
    """Returns the module or the operator that a node calls, an operator with the path of its module."""
    target = target_name(node).removeprefix("torch._ops.")
    if node.op == "call_module":
        return f"module {target}"
    path = find_module(node)
    return target if path in ("", target) else f"{target} in module {path}"


def find_module(node: fx.Node) -> str:
    """Returns the path of the module that a node belongs to, or an empty text."""
    if node.op == "call_module":
        return str(node.target)
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"^L\['self'\]\.?", "", str(stack[-1][0])) if stack and isinstance(stack[-1], tuple) else ""
    return "" if path.startswith("_empty") else path


def observe_onnx(path: Path, batch: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()) -> Observed:
    """Runs an ONNX file without the runtime's optimizations and records all values.

    Args:
        keep: Values whose complete tensors are needed.
    """
    model = onnx.load(path, load_external_data=False)
    observed = Observed(outputs=tuple(value.name for value in model.graph.output))
    producers = {name: node for node in model.graph.node for name in node.output if name}
    observed.needs = {name: tuple(filter(None, node.input)) for name, node in producers.items()}
    inputs = {value.name: batch[value.name].contiguous().numpy() for value in model.graph.input}
    with open_all_values(path, model) as session:
        names = [output.name for output in session.get_outputs()]
        try:
            results = dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:  # ONNX Runtime's errors have no common base class
            name_match = re.search(r"Name:'([^']*)'", str(error))
            message = re.sub(r"^.*Status Message: (\S+:\d+ .*?\) )?", "", first_line(error))
            observed.raised = (name_match.group(1) if name_match else "", message[:200])
            return observed
    for value in model.graph.input:
        observed.add(value.name, "input", batch[value.name], keep)
    for name in set(observed.outputs) - {*producers, *batch}:  # outputs that depend on no input
        observed.add(name, "constant", torch.from_numpy(results[name]), keep)
    for name, node in producers.items():
        if hasattr(results[name], "dtype"):
            observed.add(name, node.op_type, torch.from_numpy(results[name]), keep)
    return observed


@contextmanager
def open_all_values(path: Path, model: onnx.ModelProto) -> Iterator[onnxruntime.InferenceSession]:
    """Opens a copy of an ONNX file whose values are all outputs, without the runtime's optimizations.

    Args:
        path: The file.
        model: Its content without external data; gets the outputs.
    """
    outputs = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in outputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if os.access(path.parent, os.W_OK):  # hard links to the weights need a folder on the same file system
        temporary = atomic_dir.scratch(path.parent, parts.outermost(path.parent))
    else:
        temporary = signals.temporary_folder()
    with temporary as folder:
        data = path.with_name(f"{path.name}.data")
        if data.is_file():
            _link(data, folder / data.name)
        onnx.save(model, folder / path.name)
        yield onnx_session.open_session(folder / path.name, options, "cpu")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def observe_torchscript(path: Path, batch: Mapping[str, torch.Tensor]) -> Observed:
    """Runs a TorchScript file and records every tensor of its graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loading TorchScript warns that it is deprecated
        module = archives.load_torchscript(path)
    schema = module._c._get_method("forward").schema
    names = [argument.name for argument in schema.arguments if argument.name != "self"]
    graph, parameters = torch._C._jit_pass_lower_graph(module.graph.copy(), module._c)
    torch._C._jit_pass_inline(graph)
    observed = Observed()
    values = [(output, node) for node in graph.nodes() for output in node.outputs()]
    for output, node in values:
        observed.needs[output.debugName()] = tuple(value.debugName() for value in node.inputs())
    (returned,) = graph.outputs()
    leaves = [value.debugName() for value in _leaves(returned)]
    inputs = {value.debugName(): name for value, name in zip(graph.inputs(), names, strict=False)}
    tensors = [(o, n) for o, n in values if o.type().isSubtypeOf(torch._C.TensorType.get())]
    graph.eraseOutput(0)
    packed = graph.appendNode(graph.create("prim::TupleConstruct", [o for o, _ in tensors], 1)).output()
    packed.setType(torch._C.TupleType([o.type() for o, _ in tensors]))
    graph.registerOutput(packed)
    run = torch._C._create_function_from_graph("observed", graph)
    try:
        with torch.no_grad():
            results = run(*(batch[name].clone() for name in names), *parameters)
    except Exception as error:  # the TorchScript interpreter raises many error types
        observed.raised = ("", _last_line(error))
        return observed
    for name, input_name in inputs.items():
        observed.add(name, "input", batch[input_name], ())
    for (output, node), result in zip(tensors, results, strict=True):
        observed.add(output.debugName(), node.kind().removeprefix("aten::"), result, ())
    observed.outputs = tuple(name for name in leaves if name in observed.values)
    return observed


def _leaves(returned: Any) -> Iterable[Any]:
    node = returned.node()
    return list(node.inputs()) if node.kind() == "prim::TupleConstruct" else [returned]


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return redact_error(lines[-1])[:200] if lines else type(error).__name__
