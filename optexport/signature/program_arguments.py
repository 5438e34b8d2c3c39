"""Arguments of an exported program: the names of its tensors, and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from optexport.errors import ConfigError
from optexport.signature.signature import as_argument, path_name


@dataclass(frozen=True)
class _Leaf:
    """Leaf of a program's arguments: placeholder, name such as ``states.0``, and fixed value."""

    placeholder: str
    name: str
    is_constant: bool
    value: Any


def _leaves(program: ExportedProgram) -> list[_Leaf]:
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    args, kwargs = pytree.tree_unflatten(specs, program.call_spec.in_spec)
    signature = program.module_call_graph[0].signature
    arg_names = list(signature.forward_arg_names or ()) if signature is not None else []
    if len(arg_names) < len(args):
        arg_names = [_common_name(arg) for arg in args]
    paths, _ = pytree.tree_flatten_with_path({**dict(zip(arg_names, args, strict=False)), **kwargs})
    names = [path_name(path) for path, _ in paths]
    if len(paths) != len(specs) or len({as_argument(name) for name in names}) < len(names):
        names = [spec.arg.name for spec in specs]
    return [
        _Leaf(spec.arg.name, name, isinstance(spec.arg, ConstantArgument), getattr(spec.arg, "value", None))
        for name, spec in zip(names, specs, strict=True)
    ]


def _common_name(argument: Any) -> str:
    """Returns an argument's name, derived from the placeholder name of its first leaf."""
    leaves, _ = pytree.tree_flatten_with_path(argument)
    path, spec = leaves[0] if leaves else ((), None)
    name = "" if spec is None else str(spec.arg.name)
    return name.removesuffix(f"_{as_argument(path_name(path))}") if path else name


def tensor_inputs(program: ExportedProgram) -> dict[str, str]:
    """Returns the names of a program's input tensors by placeholder, in their order."""
    return {leaf.placeholder: leaf.name for leaf in _leaves(program) if not leaf.is_constant}


def check_ranks(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that each tensor has as many axes as the program expects.

    Args:
        tensors: Tensors by input name.

    Raises:
        ConfigError: A tensor has another number of axes.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    for placeholder, name in tensor_inputs(program).items():
        expected, tensor = values[placeholder], tensors[name]
        if isinstance(expected, torch.Tensor) and expected.dim() != tensor.dim():
            shapes = [f"[{', '.join(map(str, value.shape))}]" for value in (tensor, expected)]
            raise ConfigError(
                f"wrong number of axes (expected {expected.dim()}: {shapes[1]}, found {tensor.dim()}: {shapes[0]})",
                location=f"inputs: {name}",
                hint="In a data file, write one row per line, without the batch axis.",
            )


def constants(program: ExportedProgram) -> dict[str, bool | int | float | str]:
    """Returns the constant arguments of a program, by name."""
    return {leaf.name: leaf.value for leaf in _leaves(program) if leaf.is_constant and leaf.value is not None}


def named_tensors(program: ExportedProgram, inputs: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors in a program's arguments by name.

    Args:
        inputs: Arguments by name, tensors by flat names, a tuple of arguments in order, or a single tensor.

    Raises:
        ConfigError: They differ from the program's inputs.
    """
    names = tensor_inputs(program).values()
    if isinstance(inputs, Mapping):
        by_path, _ = pytree.tree_flatten_with_path(dict(inputs))
        tensors = {path_name(path): leaf for path, leaf in by_path if isinstance(leaf, torch.Tensor)}
    else:
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        tensors = dict(zip(names, leaves, strict=False)) if len(leaves) <= len(names) else {}
    if set(tensors) != set(names):
        raise ConfigError(
            f"wrong inputs for the program (expected {', '.join(names)}, found {', '.join(tensors) or 'others'})",
            location="inputs",
        )
    return {name: tensors[name] for name in names}


def take_tensors(graph_module: fx.GraphModule, program: ExportedProgram) -> None:
    """Makes the module of a program take its tensors by flat names, in place.

    Constants and nested arguments are removed from its signature.
    """
    leaves = _leaves(program)
    codegen = graph_module.graph._codegen
    named = [as_argument(leaf.name) for leaf in leaves]
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    has_names = not isinstance(codegen, _PyTreeCodeGen) or list(codegen.pytree_info.orig_args) == named
    if has_names and not any(leaf.is_constant for leaf in leaves):
        return
    remaining = []
    for leaf, argument, placeholder in zip(leaves, named, placeholders, strict=True):
        if leaf.is_constant:
            graph_module.graph.erase_node(placeholder)
        else:
            placeholder.target = argument
            remaining.append(argument)
    spec = pytree.tree_structure((tuple(remaining), {}))
    graph_module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(remaining, spec, program.call_spec.out_spec)))
    graph_module.recompile()


def input_names(program: ExportedProgram) -> list[str]:
    """Returns the names of a program's input tensors, in their order."""
    return list(tensor_inputs(program).values())
