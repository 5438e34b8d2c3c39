"""KeepOutputs: what is wanted stays to the bit, and nothing that only the rest needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optexport import symbolic_trace
from optexport.errors import ConfigError
from optexport.signature import flatten_outputs
from optexport.testing import assert_same, outputs, owned, sharing
from optexport.transformations import KeepOutputs
from tests import models
from tests.models import randomise
from tests.transformations.programs import Program, by_export, by_fx

X = torch.randn(3, 4)


def _three(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    y = m.first(x)
    return {"a": y, "b": m.second(y), "c": m.third(y)}


_CHILDREN = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 3), "third": nn.Linear(4, 2)}


@pytest.mark.parametrize("trace", ["fx", "export"])
@pytest.mark.parametrize("kept", [("a",), ("b",), ("c", "a"), ("a", "b", "c")])
def test_what_is_wanted_stays_and_what_only_the_rest_needed_goes(kept: tuple[str, ...], trace: str) -> None:
    given = by_fx(_three, **_CHILDREN) if trace == "fx" else by_export(X, _three, **_CHILDREN)
    before = owned(given)
    want = dict(zip("abc", outputs(given, X), strict=True))
    changed = KeepOutputs(outputs=kept)(sharing(given))
    assert list(flatten_outputs(changed(X))) == sorted(kept)
    assert_same(outputs(changed, X), [want[name] for name in sorted(kept)], "kept")
    modules = {name for name, _ in changed.named_children()}
    assert modules == {"first"} | ({"second"} if "b" in kept else set()) | ({"third"} if "c" in kept else set())
    assert owned(given) == before
    code = changed.code
    assert KeepOutputs(outputs=kept)(changed).code == code


def test_without_names_all_stay() -> None:
    given = by_export(X, _three, **_CHILDREN)
    assert KeepOutputs()(sharing(given)).code == given.code


def test_a_name_that_is_none_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match='keep-outputs: there is no output "pooled"') as caught:
        KeepOutputs(outputs=("a", "pooled"))(by_export(X, _three, **_CHILDREN))
    assert caught.value.exit_code == 2


def test_outputs_without_names_are_named_as_everywhere() -> None:
    given = by_export(X, lambda m, x: (m.first(x), m.second(x)), first=nn.Linear(4, 4), second=nn.Linear(4, 3))
    assert list(KeepOutputs(outputs=("output_1",))(given)(X)) == ["output_1"]


@pytest.mark.parametrize("trace", ["fx", "export"])
def test_what_is_changed_in_place_for_an_output_that_stays_is_kept(trace: str) -> None:
    def body(m: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = m.first(x)
        y[:, 0].mul_(0.0)
        return {"a": y, "b": m.second(x)}

    children = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 3)}
    given = by_fx(body, **children) if trace == "fx" else by_export(X, body, **children)
    want = outputs(given, X)[:1]
    assert_same(outputs(KeepOutputs(outputs=("a",))(given), X), want, "kept")


def test_an_input_that_is_no_longer_read_stays_an_input() -> None:
    model = randomise(Program(lambda m, x: {"a": m.first(x), "b": x + 1}, first=nn.Linear(4, 4)))
    changed = KeepOutputs(outputs=("b",))(symbolic_trace(model, example_inputs={"x": X}))
    assert [node.target for node in changed.graph.find_nodes(op="placeholder")] == ["x"]
    assert not list(changed.parameters())


def test_the_outputs_of_a_model_of_transformers() -> None:
    given = models.traced("bert")
    (name, *_), (want, *_) = zip(*flatten_outputs(given(**models.inputs("bert"))).items(), strict=True)
    got = KeepOutputs(outputs=(name,))(sharing(given))(**models.inputs("bert"))
    assert list(got) == [name]
    assert torch.equal(got[name], want)
