"""Writes small ONNX files to measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64


def chain(path: Path, products: int, *, external: bool = False) -> Path:
    """Writes a chain of matrix products, x [batch, length, 64] to y, each of equal cost."""
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype("float32") / WIDTH**0.5
    names = ["x", *(f"v{index}" for index in range(1, products)), "y"]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [names[index], "weight"], [names[index + 1]]) for index in range(products)],
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", WIDTH])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save_model(model, path, save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)
    return path


def lookup(path: Path) -> Path:
    """Writes a table look-up with 2 rows of ids [batch, length]; ids above 1 fail."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        "lookup",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 3])],
        [numpy_helper.from_array(np.ones((2, 3), "float32"), "table")],
    )
    onnx.save_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path
