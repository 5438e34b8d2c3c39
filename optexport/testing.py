"""The laws that every transformation keeps, and one helper that checks them all on one graph."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optexport._utils.tensors import bytes_of
from optexport.errors import TransformationError
from optexport.transformations import ReversibleTransformation, Rule, Transformation, compose
from optexport.transformations.composition import Composition
from optexport.transformations.rule import Report, run

# Under pytest, hundreds of its lines would stand behind the message of a failing test.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").addFilter(lambda record: False)

Inputs = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor

# How many units in the last place of the largest number of an output a rounding law lets pass.
_ROUNDINGS = {torch.float64: 512, torch.float32: 128, torch.float16: 16, torch.bfloat16: 8}


def outputs(graph_module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Runs a copy of a graph on copies of its inputs, so that neither can be changed by it."""
    graph_module, inputs = copy.deepcopy(graph_module), copy.deepcopy(inputs)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if isinstance(inputs, Mapping):
            result = graph_module(**inputs)
        elif isinstance(inputs, torch.Tensor):
            result = graph_module(inputs)
        else:
            result = graph_module(*inputs)
    return pytree.tree_leaves(result)


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    """Asserts that outputs are equal to the bit."""
    assert len(got) == len(want), f"{what}: {len(got)} outputs instead of {len(want)}"
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{what}: output {index} is of another kind"
        assert _bits(one) == _bits(other), f"{what}: output {index} differs"


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor], what: str, scale: float | None = None) -> None:
    """Asserts that outputs agree within rounding, which is relative to `scale`, or else to their largest number."""
    assert len(got) == len(want), f"{what}: {len(got)} outputs instead of {len(want)}"
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{what}: output {index} is of another kind"
        if other.is_complex():
            one, other = (torch.view_as_real(each.resolve_conj()) for each in (one, other))
        if not other.is_floating_point():
            assert torch.equal(one, other), f"{what}: output {index} differs"
            continue
        finite = other.isfinite()
        assert torch.equal(one.isfinite(), finite), f"{what}: output {index} has another NaN or infinity"
        assert torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()), f"{what}: output {index} differs"
        limits, roundings = torch.finfo(other.dtype), _ROUNDINGS[other.dtype]
        one, other = one[finite].double(), other[finite].double()
        if other.numel():
            unit = limits.eps * max(scale or 0.0, other.abs().max().item())
            distance = (one - other).abs().max().item()
            limit = roundings * unit + limits.tiny
            ulps = distance / (unit or 1)
            assert distance <= limit, f"{what}: output {index} differs by {distance:.3g}, {ulps:.0f} ulp"


def sharing(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A second graph over the very same modules and tensors, as ``torch.fx`` makes one of a caller's model."""
    shared: list[Any] = [*graph_module.parameters(), *graph_module.buffers()]
    shared += [module for module in graph_module.modules() if type(module) is not nn.Module][1:]
    return copy.deepcopy(graph_module, {id(item): item for item in shared})


def owned(module: nn.Module) -> dict[str, Any]:
    """All that a caller would see change in a model: its tree, its tensors to the bit, its flags and hooks."""
    seen: dict[str, Any] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        kept = ("_parameters", "_buffers", "_modules")
        seen[name] = {
            "module": id(child),
            "type": type(child),
            "training": child.training,
            **{kind: [(key, id(value)) for key, value in vars(child)[kind].items()] for kind in kept},
            "hooks": {key: list(value) for key, value in vars(child).items() if "hooks" in key},
            "attributes": sorted(vars(child)),
        }
    for name, tensor in module.state_dict(keep_vars=True).items():
        seen[f"state_dict {name}"] = _tensor(tensor)
    return seen


def written(graph_module: fx.GraphModule) -> dict[str, Any]:
    """All that undoing has to bring back: the graph, its code, and names, order and bits of what it computes with."""
    return {
        "graph text": str(graph_module.graph),
        "code": graph_module.code,
        "state_dict": [(k, _tensor(v)) for k, v in graph_module.state_dict(keep_vars=True).items()],
        "parameters": [(k, type(p)) for k, p in graph_module.named_parameters(remove_duplicate=False)],
        # Each GraphModule has a class of its own, of which copies do not even keep the name.
        "modules": [(k, _class(m), m.training, m.extra_repr()) for k, m in graph_module.named_modules()],
        "held": [(k, _held(m)) for k, m in graph_module.named_modules() if k],
    }


def check_laws(
    transformation: Transformation,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    *,
    exact: bool = False,
    scale: float | None = None,
) -> fx.GraphModule:
    """Applies a transformation, applies it again and undoes it, and asserts on every law.

    Args:
        graph_module: Stands for what the caller owns: the transformation is given a graph that shares its modules.
        exact: Whether the outputs have to stay equal to the bit.
        scale: What rounding is relative to, where larger numbers than the outputs are met on the way.

    Returns:
        The transformed graph.
    """
    of_the_caller, random_state = owned(graph_module), torch.get_rng_state()

    def assert_nothing_else_changed() -> None:
        changes = [name for name, value in owned(graph_module).items() if of_the_caller.get(name) != value]
        assert not changes, f"the caller's model must stay as it is: {changes} changed"
        assert torch.equal(torch.get_rng_state(), random_state), "the global random numbers must stay as they are"

    want = outputs(graph_module, inputs)
    given = sharing(graph_module)
    before = written(given)

    transformed = transformation(given)
    once = written(transformed)
    transformed.graph.lint()
    if transformation.preserves_computation:
        got = outputs(transformed, inputs)
        assert_same(got, want, "outputs must agree to the bit") if exact else assert_close(
            got, want, "outputs must agree", scale
        )
    _check_flags(before, once)
    assert_nothing_else_changed()

    transformed = transformation(transformed)
    if isinstance(transformation, Composition):
        # One member may make work for another; a second application may then find it, but not change the outputs.
        once = written(transformed)
        if transformation.preserves_computation:
            assert_close(outputs(transformed, inputs), want, "outputs must agree the second time", scale)
    _assert_equal(written(transformed), once, "a second application must change nothing")

    if isinstance(transformation, ReversibleTransformation):
        copied = copy.deepcopy(transformed)
        _assert_equal(written(copied), once, "a copy is a copy")
        for name, graph in (("undo", sharing(transformed)), ("undo after deepcopy", copied)):
            restored = transformation(graph, reverse=True)
            _assert_equal(written(restored), before, name)
            assert_same(outputs(restored, inputs), want, name)
            assert not transformation.get_transformed_nodes(restored), f"{name}: marks are left"
            again = written(transformation(restored))
            for part in ("state_dict", "modules"):
                assert again[part] == once[part], f"{name}, then applied again: {part} differs"
    assert_nothing_else_changed()
    return transformed


def check_undo_alone(
    rules: Sequence[Rule], graph_module: fx.GraphModule, inputs: Inputs, scale: float | None = None
) -> None:
    """Asserts that each rule of several, undone by itself, is undone rightly or refuses and leaves all as it is."""
    want = outputs(graph_module, inputs)
    for rule in rules:
        if not isinstance(rule, ReversibleTransformation):
            continue
        graph = compose(*rules)(sharing(graph_module))
        before = written(graph)
        try:
            graph = rule(graph, reverse=True)
        except TransformationError:
            _assert_equal(written(graph), before, f"{type(rule).__name__} refuses to be undone")
        else:
            assert_close(outputs(graph, inputs), want, f"{type(rule).__name__} undone by itself", scale)
            assert not rule.get_transformed_nodes(graph), f"{type(rule).__name__} undone: marks are left"


def check_applied(
    rule: Rule,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    count: int = 1,
    *,
    exact: bool = False,
    scale: float | None = None,
) -> Report:
    """Asserts that a rule finds so many places, besides the laws; the report says what else it found.

    Args:
        count: In how many places.
        exact: As for `check_laws`, and so is ``scale``.
    """
    _, report = run(rule, sharing(graph_module))
    assert len(report.changes) == count, report
    check_laws(rule, graph_module, inputs, exact=exact, scale=scale)
    return report


def check_refused(rule: Rule, graph_module: fx.GraphModule, inputs: Inputs | None, *reasons: str) -> None:
    """Asserts that a rule leaves a graph as it is and says so with these reasons; with none, that it is silent."""
    given = sharing(graph_module)
    before = written(given)
    after, report = run(rule, given)
    assert not report.changes, report
    _assert_equal(written(after), before, "what is refused is left alone")
    said = [near_miss.reason for near_miss in report.near_misses]
    assert len(said) == len(reasons), report
    for reason, words in zip(reasons, said, strict=True):
        assert reason in words, report
    if inputs is not None:
        check_laws(rule, graph_module, inputs, exact=True)


def _check_flags(before: dict[str, Any], after: dict[str, Any]) -> None:
    tensors, now = dict(before["state_dict"]), dict(after["state_dict"])
    kinds = ("dtype", "requires_grad", "contiguous")
    for name in [name for name in tensors if name in now]:
        same_shape = now[name]["shape"] == tensors[name]["shape"]
        for kind in (*kinds, "stride") if same_shape else kinds:
            assert now[name][kind] == tensors[name][kind], f"{kind} of {name} is kept"
    for kind in kinds:
        assert {t[kind] for t in now.values()} <= {t[kind] for t in tensors.values()}, f"no new {kind} appears"


def _assert_equal(got: dict[str, Any], want: dict[str, Any], what: str) -> None:
    for part, value in want.items():
        assert got[part] == value, f"{what}: {part} differs"


def _class(module: nn.Module) -> type[nn.Module]:
    return fx.GraphModule if isinstance(module, fx.GraphModule) else type(module)


def _held(module: nn.Module) -> dict[str, Any]:
    """What a module holds: its attributes by name, the order of its tensors, and how many hooks it has."""
    return {
        "attributes": sorted(vars(module)),
        "tensors": [*module._parameters, *module._buffers, *sorted(module._non_persistent_buffers_set)],
        "hooks": {key: len(value) for key, value in vars(module).items() if "hooks" in key},
    }


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "contiguous": tensor.is_contiguous(),
        "stride": tensor.stride(),
        "requires_grad": tensor.requires_grad,
        "bits": _bits(tensor),
    }


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor).numpy().tobytes()
