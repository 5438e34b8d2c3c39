"""Outputs of a library's own classes: every tensor gets the name of its field."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from optexport import export
from optexport.exporters import targets
from optexport.signature.signature import flatten_outputs
from optexport.tracing.trace import trace
from tests._helpers.graphs import Program


class BaseOutput(OrderedDict[str, Any]):
    """An output class like that of diffusers: a dict and a dataclass, registered with torch without names."""

    def __init_subclass__(cls) -> None:
        pytree.register_pytree_node(
            cls,
            lambda output: ([*output.values()], [*output]),
            lambda values, keys: cls(**dict(zip(keys, values, strict=True))),
        )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[key] for key in self)


@dataclasses.dataclass
class Sample(BaseOutput):
    sample: torch.Tensor
    extra: torch.Tensor | None = None


class UnregisteredOutput(OrderedDict[str, Any]):
    __post_init__ = BaseOutput.__post_init__


@dataclasses.dataclass
class Unregistered(UnregisteredOutput):
    logits: torch.Tensor
    extra: torch.Tensor | None = None


class Scores(NamedTuple):
    scores: torch.Tensor
    aux: torch.Tensor | None = None
    count: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    scores: Scores
    parts: tuple[Any, ...]
    note: str = "a string"
    dtype: torch.dtype = torch.float32


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.first, self.second, self._hidden, self.owner = x + 1, x + 2, x + 3, self


class Keyed(dict[str, Any]):
    pass


class Listed(list[Any]):
    pass


class User(UserDict[str, Any]):
    pass


CASES = {
    "registered without names": (lambda x: Sample(x * 2), ["sample"]),
    "dict and dataclass": (lambda x: Unregistered(x * 2, x * 3), ["logits", "extra"]),
    "nested": (
        lambda x: Nested(Scores(x * 2), (Scores(x * 3), [Sample(x * 4, x * 5)])),
        ["scores.scores", "parts.0.scores", "parts.1.0.sample", "parts.1.0.extra"],
    ),
    "attributes": (lambda x: Plain(x), ["first", "second"]),
    "namespace": (lambda x: SimpleNamespace(a=x * 2, b=None, c=SimpleNamespace(d=x * 3)), ["a", "c.d"]),
    "subclasses of containers": (
        lambda x: Keyed(a=x * 2, b=Listed([x * 3]), c=deque([x * 4]), d=User(e=x * 5), f="text"),
        ["a", "b.0", "c.0", "d.e"],
    ),
    "sizes and settings": (lambda x: Nested(Scores(x * 2, count=x.shape[0]), (x.shape[0] + 1,)), ["scores.scores"]),
}


@pytest.mark.parametrize("kind", CASES)
def test_outputs_of_own_classes_are_traced_with_the_names_of_their_fields(kind: str) -> None:
    make, names = CASES[kind]
    model = Program(lambda _, x: make(x)).eval()
    traced = trace(model, {"x": torch.randn(3, 4)}, {"x": {0: "batch"}})
    assert traced.signature.output_names == names
    assert not model._forward_hooks
    for size in (1, 5):
        x = torch.randn(size, 4)
        got, want = flatten_outputs(traced.graph_module(x)), flatten_outputs(make(x))
        assert list(got) == list(want) == names
        assert all(torch.equal(got[name], want[name]) for name in names)


def test_class_that_attrs_defines_is_named_by_its_fields() -> None:
    attr = pytest.importorskip("attr")
    cls = attr.make_class("Prediction", ["logits", "aux"], slots=True)
    x = torch.randn(2, 3)
    assert list(flatten_outputs(cls(x, cls(x, None)))) == ["logits", "aux.logits"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Nested:
        return Nested(Scores(self.linear(x)), ())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        return Sample(self.inner(x).scores.scores.relu(), x.exp())


@pytest.mark.slow
def test_files_of_a_model_with_own_output_classes_are_right(tmp_path: Path) -> None:
    model = Outer().eval()
    result = export(model, {"x": torch.randn(3, 4)}, tmp_path / "bundle", dynamic={"x": {0: "batch"}}, effort="quick")
    names = [spec.name for spec in result.manifest.outputs]
    assert names == ["sample", "extra"]
    for size in (1, 5):
        x = torch.randn(size, 4)
        want = model(x)
        for file_format, path in result.files.items():
            for _, run in targets.open_file(path, file_format, names):
                got = run({"x": x})
                torch.testing.assert_close(got["sample"], want.sample.detach())
                torch.testing.assert_close(got["extra"], want.extra)
