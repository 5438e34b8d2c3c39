"""What every node of a graph, or of an exported file, computes on one batch."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import fx

from optexport._utils import atomic_dir, signals
from optexport.errors import first_line
from optexport.redaction import redact_error
from optexport.runtime import devices
from optexport.runtime.untrusted import archives
from optexport.signature.signature import as_arguments
from optexport.transformations import DeepCopy
from optexport.transformations.rule import target_name

# Of larger tensors that many elements stand for all, so that the values of a whole model fit in memory.
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Value:
    """What one node gave.

    Attributes:
        name: The node's name.
        what: The module or operator that computed it, as one would write it.
        tensor: Its elements, flat; of a large tensor a sample, the same of every tensor of that size.
    """

    name: str
    what: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def kind(self) -> tuple[tuple[int, ...], bool]:
        """What two values must share to stand for each other."""
        return self.shape, self.tensor.is_floating_point()


@dataclass
class Observed:
    """What all nodes gave, in the order in which they ran.

    Attributes:
        needs: What each node reads, by name: of all nodes, also those whose value is no tensor.
        outputs: The nodes that are handed out, in their order.
        whole: The tensors that were asked for as they are.
        raised: The node that raised, and what; None where none did.
    """

    values: dict[str, Value] = field(default_factory=dict)
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    raised: tuple[str, str] | None = None

    def add(self, name: str, what: str, result: Any, keep: Collection[str]) -> None:
        """Takes down what a node gave, if it is a tensor."""
        if isinstance(result, torch.Tensor):
            self.values[name] = Value(name, what, tuple(result.shape), _sampled(result.detach()))
            if name in keep:
                self.whole[name] = result.detach().clone()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() <= _SAMPLE:
        return flat.clone()  # something later may change it in place
    generator = torch.Generator().manual_seed(flat.numel())
    return flat[torch.randint(flat.numel(), (_SAMPLE,), generator=generator)]


def observe_graph(
    graph_module: fx.GraphModule,
    batch: Mapping[str, torch.Tensor],
    *,
    double: bool = False,
    keep: Collection[str] = (),
) -> Observed:
    """Runs a graph node by node.

    Args:
        double: Whether in float64, on a copy.
        keep: Nodes whose tensors are wanted whole.
    """
    observed = Observed(needs={n.name: tuple(i.name for i in n.all_input_nodes) for n in graph_module.graph.nodes})
    (output,) = graph_module.graph.find_nodes(op="output")
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output.args[0]) if isinstance(leaf, fx.Node)]
    arguments = as_arguments(batch)
    given = [arguments[str(node.target)].clone() for node in graph_module.graph.find_nodes(op="placeholder")]
    if double:
        graph_module = DeepCopy()(graph_module).double()
        given = [tensor.double() if tensor.is_floating_point() else tensor for tensor in given]

    class Observer(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            try:
                result = super().run_node(n)
            except Exception as error:  # an operator may raise anything
                observed.raised = (n.name, f"{type(error).__name__}: {first_line(error)[:200]}")
                raise
            if n.op != "get_attr" or n in leaves:  # a weight that is no output is no step of the computation
                observed.add(n.name, describe(n), result, keep)
            return result

    interpreter = Observer(graph_module)
    interpreter.extra_traceback = False
    try:
        with torch.no_grad():
            interpreter.run(*given, enable_io_processing=False)
    except Exception:  # a node's own error, which may be any, is noted already
        if observed.raised is None:
            raise
    observed.outputs = tuple(leaf.name for leaf in leaves if leaf.name in observed.values)
    return observed


def describe(node: fx.Node) -> str:
    """What a node calls, and the module that it belongs to where that is another."""
    target = target_name(node).removeprefix("torch._ops.")
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = re.sub(r"^L\['self'\]\.?", "", str(stack[-1][0])) if stack and isinstance(stack[-1], tuple) else ""
    return target if not path or path == target or path.startswith("_empty") else f"{target} in {path}"


def observe_onnx(path: Path, batch: Mapping[str, torch.Tensor], *, keep: Collection[str] = ()) -> Observed:
    """Runs an ONNX file as it stands, without the runtime's optimisations, every value handed out."""
    model = onnx.load(path, load_external_data=False)
    observed = Observed(outputs=tuple(value.name for value in model.graph.output))
    made = {name: node for node in model.graph.node for name in node.output if name}
    observed.needs = {name: tuple(filter(None, node.input)) for name, node in made.items()}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made if name not in observed.outputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    inputs = {value.name: batch[value.name].contiguous().numpy() for value in model.graph.input}
    # Where the weights can be linked to.
    here = os.access(path.parent, os.W_OK)
    with atomic_dir.scratch(path.parent) if here else signals.temporary_folder() as folder:
        data = path.with_name(f"{path.name}.data")
        if data.is_file():
            _link(data, folder / data.name)
        onnx.save(model, folder / path.name)
        session = devices.onnx_session(folder / path.name, options, "cpu")
        names = [output.name for output in session.get_outputs()]
        try:
            results = dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:  # the runtime's exceptions share no base class
            found = re.search(r"Name:'([^']*)'", str(error))
            message = re.sub(r"^.*Status Message: (\S+:\d+ .*?\) )?", "", first_line(error))
            observed.raised = (found.group(1) if found else "", message[:200])
            return observed
    for value in model.graph.input:
        observed.add(value.name, "input", batch[value.name], keep)
    for name in set(observed.outputs) - {*made, *batch}:  # which hang on no input
        observed.add(name, "constant", torch.from_numpy(results[name]), keep)
    for name, node in made.items():
        if hasattr(results[name], "dtype"):
            observed.add(name, node.op_type, torch.from_numpy(results[name]), keep)
    return observed


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def observe_torchscript(path: Path, batch: Mapping[str, torch.Tensor]) -> Observed:
    """Runs a TorchScript file, every tensor that its graph computes handed out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and asked for
        module = archives.load_torchscript(path)
    schema = module._c._get_method("forward").schema
    names = [argument.name for argument in schema.arguments if argument.name != "self"]
    graph, parameters = torch._C._jit_pass_lower_graph(module.graph.copy(), module._c)
    torch._C._jit_pass_inline(graph)
    observed = Observed()
    made = [(output, node) for node in graph.nodes() for output in node.outputs()]
    for output, node in made:
        observed.needs[output.debugName()] = tuple(value.debugName() for value in node.inputs())
    (returned,) = graph.outputs()
    leaves = [value.debugName() for value in _leaves(returned)]
    inputs = {value.debugName(): name for value, name in zip(graph.inputs(), names, strict=False)}
    tensors = [(o, n) for o, n in made if o.type().isSubtypeOf(torch._C.TensorType.get())]
    graph.eraseOutput(0)
    packed = graph.appendNode(graph.create("prim::TupleConstruct", [o for o, _ in tensors], 1)).output()
    packed.setType(torch._C.TupleType([o.type() for o, _ in tensors]))
    graph.registerOutput(packed)
    run = torch._C._create_function_from_graph("observed", graph)
    try:
        with torch.no_grad():
            results = run(*(batch[name].clone() for name in names), *parameters)
    except Exception as error:  # the interpreter of TorchScript raises many kinds
        observed.raised = ("", _last_line(error))
        return observed
    for name, given in inputs.items():
        observed.add(name, "input", batch[given], ())
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
