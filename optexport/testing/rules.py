"""Checks the laws of transformations: outputs, second application, undo, no side effects."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optexport._utils.tensors import bytes_of
from optexport.errors import TransformationError
from optexport.transformations import ReversibleTransformation, Rule, Transformation, compose
from optexport.transformations.composition import Composition
from optexport.transformations.rule import Report, run

# Without this filter, pytest prints hundreds of its lines after the message of a failed test.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").addFilter(lambda record: False)

Inputs = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor

# Tolerance of assert_close, in units in the last place of the largest number of an output.
_MAX_ULPS = {torch.float64: 512, torch.float32: 128, torch.float16: 16, torch.bfloat16: 8}


_M = TypeVar("_M", bound=nn.Module)


def _deepcopy(graph_module: _M, memo: dict[int, Any] | None = None) -> _M:
    with warnings.catch_warnings():
        # torch deprecates how it copies its own output trees
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        return copy.deepcopy(graph_module, memo)


def outputs(graph_module: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Runs a copy of a graph on copies of the inputs, and returns all output tensors."""
    graph_module, inputs = _deepcopy(graph_module), copy.deepcopy(inputs)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        if isinstance(inputs, Mapping):
            result = graph_module(**inputs)
        elif isinstance(inputs, torch.Tensor):
            result = graph_module(inputs)
        else:
            result = graph_module(*inputs)
    return pytree.tree_leaves(result)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], label: str) -> None:
    """Asserts that outputs are bit-exact. Messages start with `label`."""
    assert len(actual) == len(expected), f"{label}: expected {len(expected)} outputs, found {len(actual)}"
    for index, (result, reference) in enumerate(zip(actual, expected, strict=True)):
        _assert_same_kind(result, reference, f"{label}: output {index}")
        assert _bits(result) == _bits(reference), f"{label}: output {index} differs"


def assert_close(
    actual: list[torch.Tensor], expected: list[torch.Tensor], label: str, scale: float | None = None
) -> None:
    """Asserts that outputs agree to rounding, relative to `scale` or their largest number."""
    assert len(actual) == len(expected), f"{label}: expected {len(expected)} outputs, found {len(actual)}"
    for index, (result, reference) in enumerate(zip(actual, expected, strict=True)):
        output = f"{label}: output {index}"
        _assert_same_kind(result, reference, output)
        if reference.is_complex():
            result, reference = (torch.view_as_real(tensor.resolve_conj()) for tensor in (result, reference))
        if not reference.is_floating_point():
            assert torch.equal(result, reference), f"{output} differs"
            continue
        finite = reference.isfinite()
        assert torch.equal(result.isfinite(), finite), f"{output}: NaN or infinity in other places"
        assert torch.equal(result[~finite].nan_to_num(), reference[~finite].nan_to_num()), f"{output} differs"
        limits, max_ulps = torch.finfo(reference.dtype), _MAX_ULPS[reference.dtype]
        result, reference = result[finite].double(), reference[finite].double()
        if reference.numel():
            ulp = limits.eps * max(scale or 0.0, reference.abs().max().item())
            distance = (result - reference).abs().max().item()
            ulps = distance / (ulp or 1)
            assert distance <= max_ulps * ulp + limits.tiny, f"{output} differs by {distance:.3g}, {ulps:.0f} ulp"


def _assert_same_kind(actual: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    kind, expected_kind = (actual.dtype, actual.shape), (expected.dtype, expected.shape)
    assert kind == expected_kind, f"{label}: wrong dtype or shape (expected {expected_kind}, found {kind})"


def copy_sharing_modules(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph but shares its modules and tensors, as a ``torch.fx`` trace does."""
    shared: list[Any] = [*graph_module.parameters(), *graph_module.buffers()]
    shared += [module for module in graph_module.modules() if type(module) is not nn.Module][1:]
    return _deepcopy(graph_module, {id(item): item for item in shared})


def model_state(module: nn.Module) -> dict[str, Any]:
    """Describes the state of a caller's model: its modules, bits of tensors, and hooks."""
    state: dict[str, Any] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        dicts = ("_parameters", "_buffers", "_modules")
        state[name] = {
            "module": id(child),
            "type": type(child),
            "training": child.training,
            **{kind: [(key, id(value)) for key, value in vars(child)[kind].items()] for kind in dicts},
            "hooks": {key: list(value) for key, value in vars(child).items() if "hooks" in key},
            "attributes": sorted(vars(child)),
        }
    for name, tensor in module.state_dict(keep_vars=True).items():
        state[f"state_dict {name}"] = _tensor(tensor)
    return state


def graph_state(graph_module: fx.GraphModule) -> dict[str, Any]:
    """Describes what undo must restore: the graph, its code, modules, and bits of tensors."""
    return {
        "graph text": str(graph_module.graph),
        "code": graph_module.code,
        "state_dict": [(k, _tensor(v)) for k, v in graph_module.state_dict(keep_vars=True).items()],
        "parameters": [(k, type(p)) for k, p in graph_module.named_parameters(remove_duplicate=False)],
        # Every GraphModule has its own class, and a copy of it has a class of another name.
        "modules": [(k, _class(m), m.training, m.extra_repr()) for k, m in graph_module.named_modules()],
        "contents": [(k, _contents(m)) for k, m in graph_module.named_modules() if k],
    }


def check_laws(
    transformation: Transformation,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    *,
    exact: bool = False,
    scale: float | None = None,
) -> fx.GraphModule:
    """Applies a transformation, applies it again, undoes it, and asserts all laws.

    Args:
        transformation: The transformation to check.
        graph_module: Stands for the caller's model. The transformation gets a graph that shares its modules.
        inputs: Inputs of the graph.
        exact: Require bit-exact outputs.
        scale: Largest intermediate value, if larger than the outputs: the tolerance is relative to it.

    Returns:
        The transformed graph.
    """
    callers_model, random_state = model_state(graph_module), torch.get_rng_state()

    def assert_nothing_else_changed() -> None:
        changes = [name for name, value in model_state(graph_module).items() if callers_model.get(name) != value]
        assert not changes, f"the caller's model must not change: {changes} changed"
        assert torch.equal(torch.get_rng_state(), random_state), "the global random state must not change"

    graph = copy_sharing_modules(graph_module)
    before = graph_state(graph)

    transformed = transformation(graph)
    once = graph_state(transformed)
    transformed.graph.lint()
    if once == before and not transformation.get_transformed_nodes(transformed):
        # Nothing matched. The same graph computes the same, so the models need not run.
        assert_nothing_else_changed()
        _assert_equal(graph_state(transformation(transformed)), before, "a second application must change nothing")
        if isinstance(transformation, ReversibleTransformation):
            _assert_equal(graph_state(transformation(transformed, reverse=True)), before, "undo")
        assert_nothing_else_changed()
        return transformed

    expected = outputs(graph_module, inputs)
    if transformation.preserves_computation:
        actual = outputs(transformed, inputs)
        if exact:
            assert_same(actual, expected, "outputs must be bit-exact")
        else:
            assert_close(actual, expected, "outputs must agree", scale)
    _check_flags(before, once)
    assert_nothing_else_changed()

    transformed = transformation(transformed)
    if isinstance(transformation, Composition):
        # A member may create matches for an earlier one. A second application may use them, with equal outputs.
        once = graph_state(transformed)
        if transformation.preserves_computation:
            assert_close(outputs(transformed, inputs), expected, "outputs must agree after a second application", scale)
    _assert_equal(graph_state(transformed), once, "a second application must change nothing")

    if isinstance(transformation, ReversibleTransformation):
        _check_undo(transformation, transformed, before, once, inputs, expected)
    assert_nothing_else_changed()
    return transformed


def _check_undo(
    transformation: ReversibleTransformation,
    transformed: fx.GraphModule,
    before: dict[str, Any],
    once: dict[str, Any],
    inputs: Inputs,
    expected: list[torch.Tensor],
) -> None:
    """Asserts that undo restores the graph, which can then be transformed again."""
    deep_copy = _deepcopy(transformed)
    _assert_equal(graph_state(deep_copy), once, "a deepcopy must equal the graph")
    for name, graph in (("undo", copy_sharing_modules(transformed)), ("undo after deepcopy", deep_copy)):
        restored = transformation(graph, reverse=True)
        _assert_equal(graph_state(restored), before, name)
        assert_same(outputs(restored, inputs), expected, name)
        assert not transformation.get_transformed_nodes(restored), f"{name}: some nodes are still marked"
        again = graph_state(transformation(restored))
        for part in ("state_dict", "modules"):
            assert again[part] == once[part], f"{name}, then applied again: {part} differs"


def check_undo_alone(
    rules: Sequence[Rule], graph_module: fx.GraphModule, inputs: Inputs, scale: float | None = None
) -> None:
    """Asserts that undoing one of several rules keeps the outputs, or fails cleanly."""
    expected = outputs(graph_module, inputs)
    for rule in rules:
        if not isinstance(rule, ReversibleTransformation):
            continue
        graph = compose(*rules)(copy_sharing_modules(graph_module))
        before = graph_state(graph)
        name = type(rule).__name__
        try:
            graph = rule(graph, reverse=True)
        except TransformationError:
            _assert_equal(graph_state(graph), before, f"a failed undo of {name} must change nothing")
        else:
            assert_close(outputs(graph, inputs), expected, f"undo of {name} alone", scale)
            assert not rule.get_transformed_nodes(graph), f"undo of {name} alone: some nodes are still marked"


def check_applied(
    rule: Rule,
    graph_module: fx.GraphModule,
    inputs: Inputs,
    count: int = 1,
    *,
    exact: bool = False,
    scale: float | None = None,
) -> Report:
    """Asserts that a rule matches in `count` places, and the laws. Returns its report.

    Args:
        rule: The rule to check.
        graph_module: The graph, which does not change.
        inputs: Inputs of the graph.
        count: The number of matches.
        exact: See `check_laws`.
        scale: See `check_laws`.
    """
    _, report = run(rule, copy_sharing_modules(graph_module))
    assert len(report.changes) == count, f"expected {count} matches, found {len(report.changes)}: {report}"
    check_laws(rule, graph_module, inputs, exact=exact, scale=scale)
    return report


def check_refused(rule: Rule, graph_module: fx.GraphModule, inputs: Inputs | None, *reasons: str) -> None:
    """Asserts that a rule changes nothing, and that its skip reasons contain these texts."""
    graph = copy_sharing_modules(graph_module)
    before = graph_state(graph)
    after, report = run(rule, graph)
    assert not report.changes, report
    _assert_equal(graph_state(after), before, "a skip must change nothing")
    skipped = [near_miss.reason for near_miss in report.near_misses]
    assert len(skipped) == len(reasons), report
    for expected, reason in zip(reasons, skipped, strict=True):
        assert expected in reason, report
    if inputs is not None:
        check_laws(rule, graph_module, inputs, exact=True)


def _check_flags(before: dict[str, Any], after: dict[str, Any]) -> None:
    tensors, new_tensors = dict(before["state_dict"]), dict(after["state_dict"])
    kinds = ("dtype", "requires_grad", "contiguous")
    for name in [name for name in tensors if name in new_tensors]:
        same_shape = new_tensors[name]["shape"] == tensors[name]["shape"]
        for kind in (*kinds, "stride") if same_shape else kinds:
            assert new_tensors[name][kind] == tensors[name][kind], f"{kind} of {name} must not change"
    for kind in kinds:
        new_values = {tensor[kind] for tensor in new_tensors.values()}
        assert new_values <= {tensor[kind] for tensor in tensors.values()}, f"no tensor may have a new {kind}"


def _assert_equal(actual: dict[str, Any], expected: dict[str, Any], label: str) -> None:
    for part, value in expected.items():
        assert actual[part] == value, f"{label}: {part} differs"


def _class(module: nn.Module) -> type[nn.Module]:
    return fx.GraphModule if isinstance(module, fx.GraphModule) else type(module)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attribute names, tensor names in order, and numbers of hooks."""
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
