"""Extraction of the piece around one node from a graph or an ONNX file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import torch
from torch import fx


def extract(
    graph_module: fx.GraphModule, node_name: str, boundary: Collection[str]
) -> tuple[fx.GraphModule, list[str]]:
    """Extracts the part of a graph that computes one node from the values of others.

    Args:
        boundary: Nodes whose values become inputs.

    Returns:
        The piece with the node as its only output, and the names of its inputs in graph order. It shares the graph's
        modules.
    """
    nodes = {node.name: node for node in graph_module.graph.nodes}
    needed, inputs, waiting = {node_name}, set[str](), [node_name]
    while waiting:
        for need in nodes[waiting.pop()].all_input_nodes:
            if need.name in boundary:
                inputs.add(need.name)
            elif need.name not in needed:
                needed.add(need.name)
                waiting.append(need.name)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    ordered = [name for name in nodes if name in inputs]
    for name in ordered:
        copies[nodes[name]] = graph.placeholder(name)
    for name, node in nodes.items():
        if name in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output((copies[nodes[node_name]],))
    return fx.GraphModule(graph_module, graph), ordered


def extract_onnx(path: Path, value: str, boundary: Mapping[str, torch.Tensor]) -> tuple[onnx.ModelProto, list[str]]:
    """Extracts the part of an ONNX file that computes one value from others.

    Args:
        value: Name of the output of the piece.
        boundary: Values that become inputs, by name.

    Returns:
        The piece, with its weights, and the names of its inputs.
    """
    model = onnx.load(path)
    producers = {name: node for node in model.graph.node for name in node.output if name}
    weights = {weight.name: weight for weight in model.graph.initializer}
    needed, inputs, waiting = {value}, list[str](), [value]
    while waiting:
        for need in producers[waiting.pop()].input:
            if need in needed or need in inputs or not need:
                continue
            if need in boundary and need not in weights:
                inputs.append(need)
            else:
                needed.add(need)
                waiting += [need] if need in producers else []
    infos = [
        onnx.helper.make_tensor_value_info(name, _onnx_dtype(boundary[name]), boundary[name].shape) for name in inputs
    ]
    graph = onnx.helper.make_graph(
        [node for node in model.graph.node if needed & set(node.output)],
        "piece",
        infos,
        [onnx.ValueInfoProto(name=value)],
        [weight for name, weight in weights.items() if name in needed],
    )
    piece = onnx.helper.make_model(graph, opset_imports=model.opset_import, functions=model.functions)
    piece.ir_version = model.ir_version
    return piece, inputs


def _onnx_dtype(tensor: torch.Tensor) -> int:
    return onnx.helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype)
