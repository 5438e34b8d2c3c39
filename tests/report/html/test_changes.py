"""Tests of parsing graphs and grouping the changes of rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from optexport.report.html.changes import RuleChanges, View, read_changes
from optexport.report.html.graph_text import Graph
from tests._helpers import exports
from tests.report.html import bundles


class Odd(nn.Module):
    """Has calls of every kind, arguments that look like nodes, and a module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.add_module("<b>%x</b>]", nn.ReLU())

    def forward(self, x, y=None, *, k=3):  # type: ignore[no-untyped-def]
        a, b = torch.split(x, [1, 1])
        z = self.get_submodule("<b>%x</b>]")(a) + b.mul(self.weight)
        return {"one": torch.einsum("%x,i->i", z.sum(), self.weight), "more": (z, k, a.view(k, -1))}


@pytest.mark.slow
def test_graph_text_is_parsed() -> None:
    traced = fx.symbolic_trace(Odd())
    read = Graph(str(traced.graph))
    assert list(read.nodes) == [node.name for node in traced.graph.nodes]
    for node in traced.graph.nodes:
        parsed = read.nodes[node.name]
        assert parsed.op == node.op
        lookalikes = {"x"} if node.name == "einsum" else set()  # the text "%x" looks like a node
        assert set(parsed.inputs) == {source.name for source in node.all_input_nodes} | lookalikes
        if node.op == "call_module":
            assert parsed.target == node.target
    weight = next(node for node in traced.graph.nodes if node.name == "weight")
    assert read.users["weight"] == [user.name for user in weight.users]


def test_graphs_of_a_bundle_are_parsed_completely() -> None:
    result = exports.exported()
    for name, count in (("before", result.manifest.nodes_before), ("after", result.manifest.nodes_after)):
        assert len(Graph((result.output / f"graph_{name}.txt").read_text(encoding="utf-8")).nodes) == count


def by_rule(changes: list[RuleChanges]) -> dict[str, RuleChanges]:
    return {entry.rule.rule: entry for entry in changes}


def test_change_is_drawn_with_its_neighbours() -> None:
    result = exports.exported()
    (group,) = by_rule(read_changes(result.output, result.manifest))["merge-linears"].groups
    assert group.before is not None
    assert group.after is not None
    assert group.before.changed == ["linear", "linear_1", "linear_2"]
    assert group.after.changed == ["query_key_value_merged", "linear", "linear_1", "linear_2"]
    neighbours = {shown.node.name for shown in group.before.nodes if not shown.changed}
    assert neighbours == {"x", "reshape", "reshape_1", "reshape_2"}
    assert neighbours == {shown.node.name for shown in group.after.nodes if not shown.changed}


def chain(names: list[str], kinds: list[str]) -> str:
    lines, last = ["graph():", "    %x : [num_users=1] = placeholder[target=x]"], "x"
    for name, kind in zip(names, kinds, strict=True):
        lines.append(f"    %{name} : [num_users=1] = call_module[target={kind}](args = (%{last},), kwargs = {{}})")
        last = name
    return "\n".join([*lines, f"    return {last}\n"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bundles.copied(tmp_path / "bundle")


def with_graphs(folder: Path, before: str, after: str, *rules: list[tuple[list[str], list[str]]]) -> list[RuleChanges]:
    """Writes two graphs and rules with changes (new nodes, replaced nodes); returns the changes read from them."""
    (folder / "graph_before.txt").write_text(before, encoding="utf-8")
    (folder / "graph_after.txt").write_text(after, encoding="utf-8")

    def change(document):  # type: ignore[no-untyped-def]
        for rule, changes in zip(document["transformations"], rules, strict=False):
            rule["changes"] = [{"nodes": nodes, "target": "", "replaced": replaced} for nodes, replaced in changes]
        del document["transformations"][len(rules) :]

    exports.edit_json(folder / "manifest.json", change)
    return read_changes(folder, bundles.manifest_of(folder))


def names(view: View | None) -> list[str]:
    assert view is not None
    return view.changed


def test_changes_that_differ_in_numbers_share_a_drawing(folder: Path) -> None:
    modules = {f"n_{i}": f"layer.{i // 3}.{'abc'[i % 3]}" for i in range(9)}
    before = chain([*modules], [*modules.values()])
    after = chain(
        [f"n_{i}" for i in range(9) if i % 3 != 1], [f"layer.{i // 3}.{'abc'[i % 3]}" for i in range(9) if i % 3 != 1]
    )
    changes = with_graphs(folder, before, after, [([], [f"n_{i}"]) for i in (1, 4, 7)])
    assert [len(group.members) for group in changes[0].groups] == [3]
    assert names(changes[0].groups[0].before) == ["n_1"]
    assert names(changes[0].groups[0].after) == []
    assert [shown.node.name for shown in changes[0].groups[0].after.nodes] == ["n_0", "n_2"]  # type: ignore[union-attr]


def test_nodes_are_followed_through_other_rules(folder: Path) -> None:
    changes = with_graphs(
        folder, chain(["a", "b"], ["A", "B"]), chain(["d"], ["D"]), [(["c"], ["a", "b"])], [(["d"], ["c"])]
    )
    for entry in changes:
        (group,) = entry.groups
        assert names(group.before) == ["a", "b"]
        assert names(group.after) == ["d"]
    assert changes[0].groups[0].other_rules == (bundles.manifest_of(folder).transformations[1].rule,)


def test_change_of_unknown_nodes_draws_nothing(folder: Path) -> None:
    changes = with_graphs(folder, chain(["a"], ["A"]), chain(["a"], ["A"]), [(["p"], ["q"])], [(["q"], ["p"])])
    assert [view.nodes for entry in changes for view in (entry.groups[0].before, entry.groups[0].after) if view] == [
        ()
    ] * 4


def test_format_names_cannot_read_other_files(folder: Path) -> None:
    (folder.parent / "graph_after.x").mkdir()
    (folder.parent / "secret.txt").write_text(chain(["secret"], ["A"]), encoding="utf-8")

    def change(document):  # type: ignore[no-untyped-def]
        document["transformations"][5]["formats"] = ["x/../../secret"]

    exports.edit_json(folder / "manifest.json", change)
    changes = read_changes(folder, bundles.manifest_of(folder))
    assert all(
        group.after is None or not group.after.nodes
        for entry in changes
        if entry.rule.formats
        for group in entry.groups
    )
