"""Format passes of ONNX: other operators for the same numbers, some of them faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from optexport.errors import ExportError, first_line
from optexport.exporters.onnx import transformers_fixes
from optexport.exporters.onnx.split_linears import split_linears

# onnxscript's patterns treat numbers up to this one as zero.
_ZERO_THRESHOLD = 1e-8


def apply_passes(model: onnx_ir.Model, names: Sequence[str]) -> onnx_ir.Model:
    """Applies format passes in the order of `OnnxFormat.passes`.

    The order of the names does not matter.

    Args:
        model: May be changed; the names of inputs and outputs stay.

    Raises:
        ExportError: A package that implements a format pass fails.
    """
    for name, apply in _PASSES.items():
        if name in names:
            model = apply(model)
    return model


def _sum_residuals(model: onnx_ir.Model) -> onnx_ir.Model:
    """Replaces ``Add`` before LayerNormalization by ``Sum``, unless an operand is constant.

    ONNX Runtime 1.31 fuses Add and LayerNormalization into SkipLayerNormalization when it opens a file. The fused CPU
    kernel takes 4.8 ns per element, and LayerNormalization 0.6 (AMD EPYC, one thread, `python -m
    tests.benchmarks.profiling`).
    """
    for norm in model.graph.all_nodes():
        add = _producer(norm.inputs[0], "Add") if _is_standard(norm, "LayerNormalization") else None
        if add is not None and not any(_constant_shape(operand) is not None for operand in add.inputs):
            add.op_type = "Sum"
    return model


def _use_gemm(model: onnx_ir.Model) -> onnx_ir.Model:
    """Replaces ``Add(MatMul(x, W), b)`` by Reshape, Gemm and Reshape if x is at least 3-D."""
    sizes: dict[object, onnx_ir.Value] = {}
    for add in list(model.graph.all_nodes()):
        if not _is_standard(add, "Add"):
            continue
        for product, bias in (add.inputs, reversed(add.inputs)):
            matmul = _producer(product, "MatMul")
            nodes = [] if matmul is None else _build_gemm(matmul, bias, sizes)
            if matmul is not None and nodes:
                graph = add.graph
                assert graph is not None
                onnx_ir.convenience.replace_nodes_and_values(graph, add, [add], nodes, add.outputs, nodes[-1].outputs)
                transpose = _producer(matmul.inputs[1], "Transpose")
                graph.remove(matmul, safe=True)
                if transpose is not None and not (
                    transpose.outputs[0].uses() or transpose.outputs[0].is_graph_output()
                ):
                    assert transpose.graph is not None
                    transpose.graph.remove(transpose, safe=True)
                break
    return model


def _build_gemm(
    matmul: onnx_ir.Node, bias: onnx_ir.Value | None, sizes: dict[object, onnx_ir.Value]
) -> Sequence[onnx_ir.Node]:
    """Returns nodes that compute a product and a bias by one Gemm; empty if they do not fit.

    Args:
        sizes: The computed shapes of earlier results, which layers with equal shapes share.
    """
    (x, weight), product = matmul.inputs, matmul.outputs[0]
    if len(product.uses()) > 1 or product.is_graph_output():
        return []
    transpose = _producer(weight, "Transpose")  # left unfolded if several layers share the weight
    if transpose is not None:
        if transpose.attributes.get_ints("perm", (1, 0)) != (1, 0):
            return []
        weight = transpose.inputs[0]
    shape = _constant_shape(weight)
    if x is None or x.shape is None or len(x.shape) < 3 or shape is None or len(shape) != 2:
        return []
    rows, columns = shape if transpose is None else shape[::-1]
    if _constant_shape(bias) != (columns,):
        return []
    tape = onnx_ir.tape.Tape()

    def integers(values: Sequence[int]) -> onnx_ir.Value:
        return tape.op("Constant", [], {"value_ints": values})

    flat = tape.op("Reshape", [x, integers([-1, rows])])
    result = tape.op("Gemm", [flat, weight, bias], {"transB": int(transpose is not None)})
    leading = [size if isinstance(size, int) else -1 for size in x.shape[:-1]]
    if leading.count(-1) < 2:
        tape.op("Reshape", [result, integers([*leading, columns])])
    else:
        names = [size if isinstance(size, int) else size.value or x for size in x.shape[:-1]]  # x for an unknown size
        key = (matmul.graph, *names, columns)
        if key not in sizes:
            leading_sizes = tape.op("Shape", [x], {"start": 0, "end": -1})
            sizes[key] = tape.op("Concat", [leading_sizes, integers([columns])], {"axis": 0})
        tape.op("Reshape", [result, sizes[key]], {"allowzero": 1})  # keeps the size 0 of an empty batch
    return list(tape.nodes)


def _fuse_as_transformers(model: onnx_ir.Model) -> onnx_ir.Model:
    """Fuses operators into ONNX Runtime's own for its CPU provider.

    Returns the model unchanged in two cases. In the first, it contains a number that onnxscript's patterns treat as
    zero. In the second, fusing adds an operator that the standard domain lacks (SimplifiedLayerNormalization), which
    onnx.checker rejects.
    """
    if any(_is_tiny_scalar(tensor) for tensor in _constants(model)):
        return model
    fused = model.clone()
    try:
        transformers_fixes.fuse_for_onnxruntime(fused)
    except Exception as error:  # rewriting raises many types of exceptions
        raise ExportError(
            f"transformers could not fuse the file's operators: {first_line(error)}",
            location="pass transformers-fusions",
            hint='Remove "transformers-fusions" from export.passes.',
        ) from error
    if any(node.domain == "" and not onnx.defs.has(node.op_type) for node in fused.graph.all_nodes()):
        return model
    ClearMetadataAndDocStringPass()(fused)  # the fusions record the name of the function that made a node
    return fused


def _constants(model: onnx_ir.Model) -> list[onnx_ir.TensorProtocol]:
    nodes = [node.attributes["value"].as_tensor() for node in model.graph.all_nodes() if "value" in node.attributes]
    return nodes + [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]


def _is_tiny_scalar(tensor: onnx_ir.TensorProtocol) -> bool:
    """Returns True if a tensor is a single nonzero number that patterns treat as zero."""
    return tensor.size == 1 and bool(0 < np.abs(tensor.numpy().astype(np.float64)).item() <= _ZERO_THRESHOLD)


def _producer(value: onnx_ir.Value | None, op_type: str) -> onnx_ir.Node | None:
    """Returns the node that computes a value, or None if it has another type."""
    node = value.producer() if value is not None else None
    return node if node is not None and _is_standard(node, op_type) else None


def _is_standard(node: onnx_ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _constant_shape(value: onnx_ir.Value | None) -> tuple[int, ...] | None:
    """Returns the shape of a constant, or None for any other value."""
    return None if value is None or value.const_value is None else tuple(value.const_value.shape.numpy())


_PASSES: Mapping[str, Callable[[onnx_ir.Model], onnx_ir.Model]] = {
    "sum-residuals": _sum_residuals,
    "split-linears": split_linears,
    "gemm": _use_gemm,
    "transformers-fusions": _fuse_as_transformers,
}
