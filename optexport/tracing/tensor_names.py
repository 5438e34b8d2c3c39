"""Renames modules and tensors that have the name of a method or property of modules.

``self.parameters = nn.ParameterList(...)`` and ``self.code = nn.Embedding(...)`` work in a model. But ``torch.export``
and a GraphModule look every name up with ``getattr``, which returns their own attribute instead.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

_GRAPH_MODULE = fx.GraphModule({}, fx.Graph())


@contextlib.contextmanager
def renaming_hidden_members(model: nn.Module) -> Iterator[None]:
    """Renames members of a model that have the name of a method of modules, within the block.

    The model cannot read these as attributes either: ``self.parameters`` is the method.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    members: dict[int, dict[str, Any]] = {
        id(d): d for module in modules for d in (module._modules, module._parameters, module._buffers)
    }
    originals = {key: dict(d) for key, d in members.items() if any(hasattr(nn.Module, name) for name in d)}
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
    """Renames, in place, the tensors of a program that a GraphModule cannot read: ``code`` becomes ``code_``."""
    names = {*program.state_dict, *program.constants}
    heads = {name.partition(".")[0] for name in names}
    renamed = {name: _rename_head(name, heads) for name in names}
    if all(name == new for name, new in renamed.items()):
        return
    program._state_dict = {renamed[name]: tensor for name, tensor in program.state_dict.items()}
    program._constants = {renamed[name]: constant for name, constant in program.constants.items()}
    program._graph_signature = copy.deepcopy(program.graph_signature)
    for spec in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        spec.target = renamed.get(str(spec.target), spec.target)
    _rewrite_module_paths(program, lambda path: _rename_head(path, heads))


def write_module_paths_plainly(program: ExportedProgram) -> None:
    """Rewrites the paths of modules in a strict trace, in place: ``__dict__['_modules']['layers'].0`` is ``layers.0``.

    TorchDynamo writes the paths of some modules so, but not the names of their tensors.
    """
    _rewrite_module_paths(program, lambda path: re.sub(r"__dict__\['_modules'\]\['(.+?)'\]", r"\1", path))


def _rename_head(path: str, taken: Container[str]) -> str:
    head, dot, rest = path.partition(".")
    return _rename(head, taken, _GRAPH_MODULE) + dot + rest


def _rename(name: str, taken: Container[str], owner: Any) -> str:
    """Returns a name that is not an attribute of an object, and not taken."""
    if not hasattr(owner, name):
        return name
    suffixes = itertools.accumulate(itertools.repeat("_"))
    return next(new for suffix in suffixes if (new := f"{name}{suffix}") not in taken)


def _rewrite_module_paths(program: ExportedProgram, rewrite: Callable[[str], str]) -> None:
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
    for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (rewrite(path), cls) for key, (path, cls) in stack.items()}
