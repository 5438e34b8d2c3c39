"""Creates inputs for an exported program from the program itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport.errors import TraceError
from optexport.parity.cases.vocabulary import vocabularies
from optexport.signature.exported_program import tensor_inputs
from optexport.tracing.trace import trace


def program_inputs(program: ExportedProgram, seed: int) -> dict[str, torch.Tensor]:
    """Returns the inputs that a program was saved with, or random inputs at its traced sizes.

    Random floats are normally distributed. Ids are between 0 and the rows of their embedding. Other integers are 0 or
    1, and every row starts with 1, so that no row is fully masked.

    Args:
        seed: Seed of the random numbers.

    Returns:
        Tensors by input name, with the dtypes and shapes of the program's inputs.

    Raises:
        TraceError: The program takes an input that is not a tensor.
    """
    names = list(tensor_inputs(program).values())
    if program.example_inputs is not None:
        leaves = [leaf for leaf in pytree.tree_leaves(program.example_inputs) if isinstance(leaf, torch.Tensor)]
        if len(leaves) == len(names):
            return {name: leaf.detach().clone() for name, leaf in zip(names, leaves, strict=True)}
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    blank: dict[str, torch.Tensor] = {}
    for placeholder, name in tensor_inputs(program).items():
        value = values.get(placeholder)
        if not isinstance(value, torch.Tensor):
            raise TraceError("it is no tensor", location=f"input {name}", hint="Export the program with tensors only.")
        blank[name] = torch.zeros([_traced(size) for size in value.shape], dtype=value.dtype)
    traced = trace(program, blank)
    ids = vocabularies(traced.graph_module, traced.signature)
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(tensor, ids.get(name), generator) for name, tensor in blank.items()}


def _traced(size: Any) -> int:
    """Returns the size of an axis when the program was traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _random(blank: torch.Tensor, ids: int | None, generator: torch.Generator) -> torch.Tensor:
    if blank.is_floating_point() or blank.is_complex():
        return torch.randn(blank.shape, generator=generator).to(blank.dtype)
    made = torch.randint(2 if ids is None else ids, blank.shape, generator=generator)
    if ids is None and made.dim():
        made[..., 0] = 1
    return made.to(blank.dtype)
