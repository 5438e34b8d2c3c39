"""Inputs for an exported program of which nothing is known but itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from optexport.errors import TraceError
from optexport.parity.vocabulary import vocabularies
from optexport.signature.exported_program import tensor_inputs
from optexport.tracing.trace import trace


def program_inputs(program: ExportedProgram, seed: int) -> dict[str, torch.Tensor]:
    """Gives the inputs that a program was saved with, or makes some of the sizes that it was traced at.

    Those that are made are normally distributed; ids from 0 below the rows of the embedding that they go into; other
    whole numbers 0 and 1, beginning with 1 in every row, so that none is wholly masked.

    Args:
        seed: Of the random numbers.

    Returns:
        Tensors by input name, of the dtypes and shapes that the program takes.

    Raises:
        TraceError: The program takes an input that is no tensor.
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
    """The size that an axis had when the program was traced."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _random(blank: torch.Tensor, ids: int | None, generator: torch.Generator) -> torch.Tensor:
    if blank.is_floating_point() or blank.is_complex():
        return torch.randn(blank.shape, generator=generator).to(blank.dtype)
    made = torch.randint(2 if ids is None else ids, blank.shape, generator=generator)
    if ids is None and made.dim():
        made[..., 0] = 1
    return made.to(blank.dtype)
