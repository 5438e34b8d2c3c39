"""Mistakes of the ONNX exporter and of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.faults.catalogue import exporter, runtime

# --- ONNX: weights ---


def _change(path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Changes an initializer, which is found by its name or shape."""
    model = onnx.load(path)
    matches = [tensor for tensor in model.graph.initializer if name in (tensor.name, str(list(tensor.dims)))]
    assert matches, (name, [(tensor.name, list(tensor.dims)) for tensor in model.graph.initializer])
    values = change(numpy_helper.to_array(matches[0]).copy())
    matches[0].CopyFrom(numpy_helper.from_array(values, matches[0].name))
    onnx.save(model, path)


@exporter("onnx", name="[8, 16]", by=1e-2)
@exporter("onnx", name="[8, 16]", by=1e-4)
@exporter("onnx", name="norm.weight", by=1e-4)
@exporter("onnx", "bert", name="embeddings.word_embeddings.weight", by=1e-3)
def one_number_is_edited(path: Path, name: str, by: float) -> None:
    def change(values: np.ndarray) -> np.ndarray:
        values.flat[-1] += np.float32(by)
        return values

    _change(path, name, change)


@exporter("onnx")
def a_weight_is_stored_transposed(path: Path) -> None:
    _change(path, "[8, 8]", lambda values: np.ascontiguousarray(values.T))


@exporter("onnx", bit=31)
@exporter("onnx", bit=30)
@exporter("onnx", bit=22)
def one_bit_of_an_initializer_is_flipped(path: Path, bit: int) -> None:
    def change(values: np.ndarray) -> np.ndarray:
        values.view(np.uint32).flat[0] ^= np.uint32(1 << bit)
        return values

    _change(path, "[16, 8]", change)


@exporter("onnx", name="down.bias")
@exporter("onnx", name="norm.bias")
@exporter("onnx", "resnet", name="classifier.1.bias")
def a_bias_is_written_as_zeros(path: Path, name: str) -> None:
    _change(path, name, np.zeros_like)


@exporter("onnx", "bert")
def a_weight_of_the_first_layer_is_rounded_to_half(path: Path) -> None:
    _change(path, "[24, 16]", lambda values: values.astype(np.float16).astype(np.float32))


@exporter("onnx", "bert")
def positions_of_the_file_are_off_by_one(path: Path) -> None:
    _change(path, "embeddings.position_embeddings.weight", lambda values: np.roll(values, -1, 0))


@exporter("onnx")
def the_weights_beside_the_file_are_of_an_earlier_run(path: Path) -> None:
    """The ``.data`` file is stale."""
    model, data = onnx.load(path), f"{path.name}.data"
    earlier = onnx.load(path)
    for tensor in earlier.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor) * np.float32(0.999)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    external = {"save_as_external_data": True, "location": data, "size_threshold": 200}
    onnx.save(earlier, path, **external)
    stale = path.with_name(data).read_bytes()
    path.with_name(data).unlink()  # onnx would append to an existing file
    onnx.save(model, path, **external)
    path.with_name(data).write_bytes(stale)


# --- ONNX: operators ---


def _edit(path: Path, change: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)


def _node(graph: onnx.GraphProto, kind: str, index: int = 0) -> onnx.NodeProto:
    return [node for node in graph.node if node.op_type == kind][index]


@exporter("onnx", kind="Softmax", axis=-2)
@exporter("onnx", kind="Softmax", axis=1)
def an_operator_has_the_wrong_axis(path: Path, kind: str, axis: int) -> None:
    def change(graph: onnx.GraphProto) -> None:
        node = _node(graph, kind)
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", axis))

    _edit(path, change)


@exporter("onnx", eps=0.0)
@exporter("onnx", eps=1e-3)
def a_layer_norm_is_written_with_another_eps(path: Path, eps: float) -> None:
    def change(graph: onnx.GraphProto) -> None:
        (attribute,) = [a for a in _node(graph, "LayerNormalization").attribute if a.name == "epsilon"]
        attribute.f = eps

    _edit(path, change)


@exporter("onnx")
def gelu_is_written_by_its_approximation(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        (attribute,) = [a for a in _node(graph, "Gelu").attribute if a.name == "approximate"]
        attribute.s = b"tanh"

    _edit(path, change)


@exporter("onnx")
def a_residual_is_not_written(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        last = next(node for node in graph.node if "hidden" in node.output)
        last.op_type = "Identity"
        del last.input[0]

    _edit(path, change)


@exporter("onnx")
def the_mask_is_written_the_wrong_way_round(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        where = _node(graph, "Where")
        where.input[1], where.input[2] = where.input[2], where.input[1]

    _edit(path, change)


@exporter("onnx")
def masked_scores_are_written_as_minus_infinity(path: Path) -> None:
    """This gives NaN for rows that contain only padding."""

    def change(graph: onnx.GraphProto) -> None:
        filler = _node(graph, "Where").input[1]
        (tensor,) = [tensor for tensor in graph.initializer if tensor.name == filler]
        tensor.CopyFrom(numpy_helper.from_array(np.array(-np.inf, np.float32), filler))

    _edit(path, change)


@exporter("onnx", "bert")
def a_file_gives_nan_for_rows_of_padding_alone(path: Path) -> None:
    """Exporters without the patches of transformers wrote such files."""

    def change(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "fault/axis"))
        graph.initializer.append(numpy_helper.from_array(np.array(np.nan, np.float32), "fault/nan"))
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "fault/zero"))
        graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.int64), "fault/axes"))
        last = next(node for node in graph.node if "last_hidden_state" in node.output)
        users = [node for node in graph.node if "last_hidden_state" in node.input]
        last.output[0] = "fault/hidden"
        for user in users:
            user.input[list(user.input).index("last_hidden_state")] = "fault/hidden"
        graph.node.extend(
            [
                helper.make_node("ReduceSum", ["attention_mask", "fault/axis"], ["fault/sum"], keepdims=0),
                helper.make_node("Equal", ["fault/sum", "fault/zero"], ["fault/empty"]),
                helper.make_node("Unsqueeze", ["fault/empty", "fault/axes"], ["fault/where"]),
                helper.make_node("Where", ["fault/where", "fault/nan", "fault/hidden"], ["last_hidden_state"]),
            ]
        )

    _edit(path, change)


# --- ONNX: outputs and sizes ---


def _behind(graph: onnx.GraphProto, output: str, kind: str, *more: np.ndarray, **attributes: int) -> None:
    """Inserts an operator before an output."""
    for node in graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == output:
                    names[index] = f"{output}/fault"
    constants = [f"{output}/constant {i}" for i in range(len(more))]
    for name, value in zip(constants, more, strict=True):
        graph.initializer.append(numpy_helper.from_array(value, name))
    graph.node.append(helper.make_node(kind, [f"{output}/fault", *constants], [output], **attributes))


@exporter("onnx")
def an_output_bears_another_name(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        _behind(graph, "hidden", "Identity")
        graph.node[-1].output[0] = graph.output[0].name = "last_hidden_state"

    _edit(path, change)


@exporter("onnx", "bart", nightly=True)
@exporter("onnx")
def outputs_bear_the_names_of_each_other(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        first, second = (output.name for output in graph.output)
        for node in graph.node:
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = {first: second, second: first}.get(name, name)
        del graph.value_info[:]
        for output, new_name in ((graph.output[0], second), (graph.output[1], first)):
            output.name = new_name

    _edit(path, change)


@exporter("onnx", output="hidden", index=0, dtype=onnx.TensorProto.DOUBLE)
@exporter("onnx", output="longest", index=1, dtype=onnx.TensorProto.INT32)
@exporter("onnx", output="hidden", index=0, dtype=onnx.TensorProto.FLOAT16)
def an_output_is_cast(path: Path, output: str, index: int, dtype: int) -> None:
    def change(graph: onnx.GraphProto) -> None:
        _behind(graph, output, "Cast", to=dtype)
        graph.output[index].type.tensor_type.elem_type = dtype

    _edit(path, change)


@exporter("onnx", shape=(2, -1, 8))
@exporter("onnx", shape=(-1, 5, 8))
def a_size_is_written_as_a_number(path: Path, shape: tuple[int, ...]) -> None:
    """The size is the traced batch or the traced sequence length."""

    def change(graph: onnx.GraphProto) -> None:
        _behind(graph, "hidden", "Reshape", np.array(shape, np.int64))
        for axis in (0, 1):
            graph.output[0].type.tensor_type.shape.dim[axis].dim_param = f"any {axis}"

    _edit(path, change)


@exporter("onnx")
def an_argmax_chooses_the_last_of_equal_values(path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        (attribute,) = [a for a in _node(graph, "ArgMax").attribute if a.name == "select_last_index"]
        attribute.i = 1

    _edit(path, change)


@exporter("onnx", "bert")
def two_inputs_are_swapped(path: Path) -> None:
    """The attention mask is read as the token types, and vice versa."""

    def change(graph: onnx.GraphProto) -> None:
        names = {"attention_mask": "token_type_ids", "token_type_ids": "attention_mask"}
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = names.get(name, name)

    _edit(path, change)


# --- The runtime ---


@runtime()
def a_fusion_takes_gelu_for_its_approximation(path: Path) -> None:
    gelu_is_written_by_its_approximation(path)


@runtime()
def a_fusion_leaves_out_a_bias(path: Path) -> None:
    _change(path, "up.bias", np.zeros_like)


@runtime()
def a_fusion_rounds_a_weight_to_half(path: Path) -> None:
    _change(path, "[8, 16]", lambda values: values.astype(np.float16).astype(np.float32))


@runtime("bert")
def a_fusion_of_attention_rounds_its_weights(path: Path) -> None:
    _change(path, "[16, 16]", lambda values: values.astype(np.float16).astype(np.float32))
