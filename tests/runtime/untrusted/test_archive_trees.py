"""Containers of arguments and outputs in ``.pt2`` files, which torch may import by name."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import SourceError
from optexport.runtime.untrusted import archives, program_texts
from tests._helpers.archives import X, edit, refused, saved

LEAF = {"type": None, "context": None, "children_spec": []}
MARKED = "made_by_import"


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file that a module in the program's folder creates on import."""
    (tmp_path / f"{MARKED}.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\ndef make(): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MARKED, raising=False)
    return tmp_path / "ran"


def change_trees(archive: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the descriptions of arguments or outputs in an archive."""

    def changed(document: dict[str, Any]) -> None:
        for call in document["graph_module"]["module_call_graph"]:
            if call["signature"]:
                version, tree = json.loads(call["signature"][name])
                change(tree)
                call["signature"][name] = json.dumps([version, tree])

    edit(archive, "models/model.json", changed)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["in_spec", "out_spec"])
@pytest.mark.parametrize(
    "change",
    [
        {
            "type": "collections.defaultdict",
            "context": {"default_factory_module": MARKED, "default_factory_name": "make", "dict_context": ["x"]},
        },
        {"type": "collections.namedtuple", "context": "builtins.dict"},
        {"context": json.dumps({"__enum__": True, "fqn": f"{MARKED}:make", "name": "x"})},
        {"context": json.dumps([{"__enum__": True, "fqn": f"{MARKED}:make", "name": "x"}])},
        {"context": json.dumps([["x", {"__enum__": True, "fqn": f"{MARKED}:make", "name": "x"}]])},
        {"more": None},
        {"type": "torch.return_types.max"},
    ],
)
def test_container_looked_up_by_name_is_refused_without_import(
    archive: Path, marker: Path, name: str, change: dict[str, Any]
) -> None:
    change_trees(archive, name, lambda tree: tree.update(change))
    refused(archive, marker, "not a plain container|are neither names nor numbers")
    assert MARKED not in sys.modules


class Containers(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        ordered = collections.OrderedDict(first=x, second=[x * 2, (x + 1,)])
        return {"kept": ordered, 3: collections.deque([x - 1])}


def test_plain_containers_of_every_kind_open(tmp_path: Path) -> None:
    module = archives.pt2_module(saved(Containers(), tmp_path / "model.pt2"))
    results = module(x=X)
    assert isinstance(results["kept"], collections.OrderedDict)
    assert torch.equal(results["kept"]["second"][1][0], X + 1)
    assert torch.equal(results[3][0], X - 1)


@pytest.mark.parametrize("name", ["metadata", "as_string", "torch_version"])
def test_size_is_checked_under_any_tensor_name(archive: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"

    def change(document: dict[str, Any]) -> None:
        tensors = document["graph_module"]["graph"]["tensor_values"]
        code = f"__import__('pathlib').Path({str(marker)!r}).touch()"
        tensors[name] = {**tensors["x"], "sizes": [{"as_expr": {"expr_str": code, "hint": None}}]}

    edit(archive, "models/model.json", change)
    refused(archive, marker, "where only names and sizes are allowed")


@pytest.mark.parametrize(
    "argument",
    [
        {"as_string_to_argument": {"as_string": {"as_operator": "torch.os.system"}}},
        {"as_string_to_argument": {"metadata": {"as_operator": "torch.os.system"}}},
        {"as_string_to_argument": {"metadata": {"as_graph": {"graph": {"nodes": [{"target": "torch.os.system"}]}}}}},
        {"as_string_to_argument": {"k": {"as_weird": "x"}}},
    ],
)
def test_argument_is_checked_under_any_name(argument: dict[str, Any]) -> None:
    node = {"target": "torch.ops.aten.relu.default", "inputs": [{"name": "self", "arg": argument, "kind": 1}]}
    for inner in argument["as_string_to_argument"].values():
        for graph in inner.values():
            if isinstance(graph, dict):
                graph["graph"]["nodes"][0]["inputs"] = []
    with pytest.raises(SourceError):
        program_texts.check({"graph_module": {"graph": {"nodes": [node]}}}, "x.pt2")


def test_value_with_the_name_of_an_attribute_keeps_it(archive: Path) -> None:
    """torch writes the names of values as variables."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {renamed(key): renamed(item) for key, item in value.items()}
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return "torch.made_by_a_file" if value == "linear" else value

    edit(archive, "models/model.json", lambda document: document.update(renamed(dict(document))))
    with pytest.raises(SourceError, match=r"'torch\.made_by_a_file', where only names"):
        archives.pt2_module(archive)(x=X)
    assert not hasattr(torch, "made_by_a_file")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("in_spec", {"children_spec": []}),
        ("in_spec", {"children_spec": [LEAF, LEAF]}),
        ("in_spec", LEAF),
        ("out_spec", {"type": "builtins.tuple", "context": "null", "children_spec": []}),
        ("out_spec", {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF, LEAF]}),
        ("out_spec", {"type": "builtins.dict", "context": '["a", "b"]', "children_spec": [LEAF]}),
        ("out_spec", {"type": "builtins.dict", "context": "null", "children_spec": [LEAF]}),
    ],
)
def test_arguments_and_outputs_unknown_to_the_graph_are_refused(
    archive: Path, name: str, change: dict[str, Any]
) -> None:
    change_trees(archive, name, lambda tree: tree.update(change))
    with pytest.raises(SourceError, match="does not match the inputs and outputs|wrong number of keys"):
        archives.load_pt2(archive)
