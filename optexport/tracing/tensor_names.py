"""Renames modules and tensors that have the name of a method or property of modules, or of a Python keyword.

``self.parameters = nn.ParameterList(...)`` and ``self.code = nn.Embedding(...)`` work in a model. But ``torch.export``
and a GraphModule look every name up with ``getattr``, which returns their own attribute instead.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import keyword
import re
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

# torch.fx does not escape these in the names that it quotes, and TorchScript supports only ASCII.
_BREAKING = re.compile(r'["\\\n\r]|[^\x00-\x7f]')
_GRAPH_MODULE = fx.GraphModule({}, fx.Graph())


@contextlib.contextmanager
def renaming_hidden_members(model: nn.Module) -> Iterator[None]:
    """Renames members of a model that have the name of a method of modules, within the block.

    The model cannot read these as attributes either: ``self.parameters`` is the method. A class that defines the
    attribute as its member needs no other name.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    members: dict[int, dict[str, Any]] = {}
    originals: dict[int, dict[str, Any]] = {}
    for module in modules:
        for member_dict in (module._modules, module._parameters, module._buffers):
            members[id(member_dict)] = member_dict
            names = [name for name in member_dict if hasattr(nn.Module, name)]
            if any(getattr(module, name, None) is not member_dict[name] for name in names):
                originals[id(member_dict)] = dict(member_dict)
    for key, original in originals.items():
        members[key].clear()
        members[key].update({_rename(name, original, nn.Module): value for name, value in original.items()})
    try:
        yield
    finally:
        for key, original in originals.items():
            members[key].clear()
            members[key].update(original)


def rename_hidden_tensors(program: ExportedProgram) -> None:
    """Renames, in place, the tensors of a program that a GraphModule cannot read.

    ``code`` becomes ``code_``, and the Python keyword in ``layers.in.weight`` becomes ``in_``.
    """
    names = {*program.state_dict, *program.constants}
    parts = {part for name in names for part in name.split(".")}
    renamed = {name: _rename_parts(name, parts) for name in names}
    if all(name == new for name, new in renamed.items()):
        return
    program._state_dict = {renamed[name]: tensor for name, tensor in program.state_dict.items()}
    program._constants = {renamed[name]: constant for name, constant in program.constants.items()}
    program._graph_signature = copy.deepcopy(program.graph_signature)
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        spec.target = renamed.get(str(spec.target), spec.target)
    _rewrite_module_paths(program, lambda path: _rename_parts(path, parts))


def write_module_paths_plainly(program: ExportedProgram) -> None:
    """Rewrites the paths of modules in a strict trace, in place: ``__dict__['_modules']['layers'].0`` is ``layers.0``.

    TorchDynamo writes the paths of some modules so, but not the names of their tensors.
    """
    _rewrite_module_paths(program, lambda path: re.sub(r"__dict__\['_modules'\]\['(.+?)'\]", r"\1", path))


def _rename_parts(path: str, taken: Container[str]) -> str:
    head, *rest = path.split(".")
    return ".".join(_rename_in_code(part, taken) for part in (_rename(head, taken, _GRAPH_MODULE), *rest))


def _rename_in_code(name: str, taken: Container[str]) -> str:
    """Returns a name that the code of a GraphModule can contain; torch.fx quotes other characters."""
    if keyword.iskeyword(name):
        return _add_suffix(name, taken)
    return _add_suffix(_BREAKING.sub("_", name), taken) if _BREAKING.search(name) else name


def _rename(name: str, taken: Container[str], owner: Any) -> str:
    """Returns a name that is not an attribute of an object, and not taken."""
    return _add_suffix(name, taken) if hasattr(owner, name) else name


def _add_suffix(name: str, taken: Container[str]) -> str:
    suffixes = itertools.accumulate(itertools.repeat("_"))
    return next(new for suffix in suffixes if (new := f"{name}{suffix}") not in taken)


def _rewrite_module_paths(program: ExportedProgram, rewrite: Callable[[str], str]) -> None:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (rewrite(path), cls) for key, (path, cls) in stack.items()}
