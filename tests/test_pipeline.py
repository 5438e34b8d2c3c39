"""The pipeline: whatever is wrong, wherever it comes from, is caught, explained, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from optexport import pipeline
from optexport.errors import (
    ConfigError,
    ExportError,
    GateError,
    OptexportError,
    ParityError,
    SourceError,
    TransformationError,
)
from optexport.stages import Stages
from optexport.verification import verify
from tests import exports
from tests.tampering import tamper_onnx, tamper_pt2

RULES = """
import copy
import operator
import torch
from torch import nn
from optexport.transformations import Transformation


class Wrong(Transformation):
    preserves_computation = True


class ReluForGelu(Wrong):
    def transform(self, graph_module):
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.gelu.default:
                node.target, node.kwargs = torch.ops.aten.relu.default, {}
                self.mark_as_transformed(node)
        return graph_module


class SwappedSlices(Wrong):
    def transform(self, graph_module):
        slices = [n for n in graph_module.graph.nodes if n.target is operator.getitem]
        first, second = slices[:2]
        first.args, second.args = second.args, first.args
        self.mark_as_transformed(first)
        self.mark_as_transformed(second)
        return graph_module


class Replacing(Wrong):
    name = ""

    def transform(self, graph_module):
        linear = copy.deepcopy(graph_module.get_submodule(self.name))
        with torch.no_grad():
            self.change(linear)
        graph_module.set_submodule(self.name, linear)
        for node in graph_module.graph.find_nodes(op="call_module", target=self.name):
            self.mark_as_transformed(node)
        return graph_module


class DroppedBias(Replacing):
    name = "down"

    def change(self, linear):
        linear.bias = None


class ScaledHead(Replacing):
    name = "value"

    def __init__(self, by=1.001):
        self.by = by

    def change(self, linear):
        linear.weight[4:] *= self.by


class BakedSize(Wrong):
    def transform(self, graph_module):
        for node in list(graph_module.graph.nodes):
            if node.target is torch.ops.aten.sym_size.int and node.args[1] == 1:
                node.replace_all_uses_with(node.meta["val"].node.hint)
                self.mark_as_transformed(next(iter(graph_module.graph.find_nodes(op="output"))))
        return graph_module


class NotANumber(Replacing):
    name = "up"

    def change(self, linear):
        linear.weight[0, 0] = float("nan")


class Raising(Wrong):
    def transform(self, graph_module):
        raise LookupError("no such node")


class Unsound(Wrong):
    def transform(self, graph_module):
        first = next(node for node in graph_module.graph.nodes if node.op == "call_module")
        last = list(graph_module.graph.nodes)[-2]
        first.args = (last,)
        return graph_module


class Returning(Wrong):
    def transform(self, graph_module):
        return None
"""
CONFIG = (
    """
[model]
source = "python:pipeline_models:{factory}"
"""
    + exports.INPUTS
    + """
{rules}
[tracking]
enabled = false
[export]
formats = {formats}
output = "out/block"
"""
)
FACTORIES = """
import torch
from torch import nn
from tests.exports import Block, block

class Baking(Block):
    # torch.export takes such a size for a constant.
    def forward(self, x, mask):
        return {**super().forward(x, mask), "baked": x.new_ones(int(x.shape[1] * 1.5))}

class Eigen(Block):
    # Which no ONNX operator computes.
    def forward(self, x, mask):
        return {**super().forward(x, mask), "eigen": torch.linalg.eigvalsh(x.transpose(1, 2) @ x)}

def baking():
    model = Baking().eval()
    model.load_state_dict(block().state_dict())
    return model

def eigen():
    return Eigen().eval()
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A folder with the models and rules of these tests, which are forgotten afterwards."""
    (tmp_path / "pipeline_models.py").write_text(FACTORIES)
    (tmp_path / "wrong_rules.py").write_text(RULES)
    yield tmp_path
    for name in ("pipeline_models", "wrong_rules"):
        sys.modules.pop(name, None)


def config(
    project: Path, *rules: str, factory: str = "block", formats: tuple[str, ...] = ("torchscript", "onnx", "pt2")
) -> Path:
    """Writes a config that names these rules."""
    tables = "\n".join(f'[[transformations]]\nuse = "{rule}"' for rule in rules)
    text = CONFIG.format(factory=factory, rules=tables, formats=json.dumps(formats))
    (project / "config.toml").write_text(text)
    return project / "config.toml"


def nothing_is_left(project: Path) -> bool:
    """No bundle, and no part of one; what shows a failure again is meant to be left."""
    return not (project / "out").exists() or {path.name for path in (project / "out").iterdir()} <= {"block-failure"}


def wrong(name: str) -> str:
    return f"python:wrong_rules:{name}"


@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("ReluForGelu", "gelu"),
        ("SwappedSlices", "linear"),
        ("DroppedBias", "linear"),
        ("BakedSize", "output"),
        ("NotANumber", "linear"),
    ],
)
def test_a_wrong_rule_is_caught_named_and_leaves_nothing(project: Path, name: str, node: str) -> None:
    path = config(project, "merge-linears", wrong(name), "change-true-div-to-mul-by-inverse")
    with pytest.raises(ParityError) as caught:
        pipeline.run(path)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert "transformed graph: hidden, at " in message
    assert f"{wrong(name)} is to blame, which changed {node}" in message
    assert f"--without {wrong(name)}" in message
    assert nothing_is_left(project)


def test_a_slight_scale_on_one_head_is_caught_too(project: Path) -> None:
    with pytest.raises(ParityError, match=r"python:wrong_rules:ScaledHead is to blame"):
        pipeline.run(config(project, wrong("ScaledHead")))
    assert nothing_is_left(project)


def test_a_size_that_a_rule_bakes_in_is_caught_at_sizes_that_were_not_traced(project: Path) -> None:
    with pytest.raises(ParityError) as caught:
        pipeline.run(config(project, wrong("BakedSize"), formats=("pt2",)))
    assert "at batch " in str(caught.value)
    assert "at traced" not in str(caught.value)


def test_without_the_wrong_rule_the_run_passes(project: Path) -> None:
    path = config(project, "merge-linears", wrong("ReluForGelu"), formats=("pt2",))
    result = pipeline.run(path, without=[wrong("ReluForGelu")])
    assert result.passed
    assert [t.rule for t in result.manifest.transformations] == ["merge-linears"]


def test_the_rule_to_leave_out_may_be_spelled_as_its_class(project: Path) -> None:
    path = config(project, "merge-linears", "change-true-div-to-mul-by-inverse", formats=("pt2",))
    result = pipeline.run(path, without=["MergeLinears"])
    assert [t.rule for t in result.manifest.transformations] == ["change-true-div-to-mul-by-inverse"]


def test_a_rule_to_leave_out_that_is_not_there_is_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"--without merge-linear.*\n.*Did you mean \"merge-linears\""):
        pipeline.run(config(project, "merge-linears"), without=["merge-linear"])


@pytest.mark.parametrize("name", ["Raising", "Unsound", "Returning"])
def test_a_rule_that_fails_is_named_and_leaves_nothing(project: Path, name: str) -> None:
    with pytest.raises(TransformationError) as caught:
        pipeline.run(config(project, "merge-linears", wrong(name)))
    assert caught.value.exit_code == 5
    assert caught.value.place == wrong(name)
    assert nothing_is_left(project)


def test_a_model_that_bakes_a_size_in_is_caught_and_no_rule_is_blamed(project: Path) -> None:
    with pytest.raises(OptexportError) as caught:
        pipeline.run(config(project, factory="baking"))
    assert caught.value.exit_code in (3, 4)
    assert "merge-linears" not in str(caught.value)
    assert nothing_is_left(project)


def test_what_onnx_cannot_express_ends_with_five_and_leaves_nothing(project: Path) -> None:
    with pytest.raises(ExportError, match="_linalg_eigh") as caught:
        pipeline.run(config(project, factory="eigen"))
    assert caught.value.exit_code == 5
    assert nothing_is_left(project)


def drafts(project: Path) -> list[Path]:
    return list((project / "out").glob(".block.partial-*"))


def at(stage: str, act: Callable[[], object]) -> Stages:
    """Does something as a stage begins."""

    def announce(name: str, seconds: float | None) -> None:
        if name == stage and seconds is None:
            act()

    return Stages(announce)


def bake_torchscript(path: Path) -> None:
    """What the deprecated way of tracing makes of many models: right at one size only."""

    class Baked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = exports.block()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            size = int(mask.shape[1])
            outputs = self.block(x, mask)
            return outputs["hidden"] * torch.ones(size, 1), outputs["longest"]

    example = dict(zip(("x", "mask"), (torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.int64)), strict=True))
    torch.jit.trace(Baked(), example_kwarg_inputs=example, check_trace=False).save(path)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("stage", "name", "tamper", "failing"),
    [
        ("check onnx", "model.onnx", tamper_onnx, ["onnx", "onnx, optimised"]),
        ("check torchscript", "model.torchscript.pt", bake_torchscript, ["torchscript"]),
        ("check pt2", "model.pt2", tamper_pt2, ["pt2"]),
    ],
)
def test_a_file_that_came_out_wrong_is_caught_and_the_exporter_is_blamed(
    project: Path, stage: str, name: str, tamper: Callable[[Path], None], failing: list[str]
) -> None:
    stages = at(stage, lambda: [tamper(draft / name) for draft in drafts(project)])
    with pytest.raises(ParityError) as caught:
        pipeline.run(config(project), stages=stages)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert {line.strip().partition(":")[0] for line in message.splitlines() if ": hidden, " in line} == set(failing)
    assert "the exporter or the runtime changed the numbers" in message
    assert nothing_is_left(project)


@pytest.mark.parametrize("damage", [lambda content: content[:-100], None])
@pytest.mark.parametrize(
    ("file_format", "name"),
    [("onnx", "model.onnx"), ("torchscript", "model.torchscript.pt"), ("pt2", "model.pt2")],
)
def test_a_file_that_came_out_damaged_is_an_error_of_the_export_that_names_it_without_its_draft(
    project: Path, file_format: str, name: str, damage: Callable[[bytes], bytes] | None
) -> None:
    def act() -> None:
        (file,) = (draft / name for draft in drafts(project))
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(ExportError) as caught:
        pipeline.run(config(project, formats=(file_format,)), stages=at(f"check {file_format}", act))
    assert caught.value.exit_code == 5
    assert caught.value.place == name
    assert "partial" not in str(caught.value)
    assert f'leave "{file_format}" out of export.formats' in str(caught.value).replace("Leave", "leave")
    assert nothing_is_left(project)


@pytest.mark.parametrize("stage", ["trace", "check graph", "export onnx", "bundle"])
def test_an_interrupt_at_any_stage_leaves_nothing(project: Path, stage: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.run(config(project, formats=("onnx",)), stages=at(stage, interrupt))
    assert nothing_is_left(project)


def test_an_earlier_bundle_stays_when_a_run_fails_and_is_replaced_when_one_succeeds(project: Path) -> None:
    earlier = Path(shutil.copytree(exports.exported().output, project / "out" / "block"))
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}
    with pytest.raises(ParityError):
        pipeline.run(config(project, wrong("ReluForGelu")))
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert sorted(path.name for path in (project / "out").iterdir()) == ["block", "block-failure"]
    result = pipeline.run(config(project, "merge-linears", formats=("pt2",)))
    assert result.output == earlier
    assert sorted(path.name for path in earlier.iterdir()) == sorted(
        {*exports.FILES, "config.toml"} - {"model.onnx", "model.torchscript.pt"}
    )
    assert all(place.passed for place in verify(earlier).places)


def test_what_is_no_bundle_is_refused_before_the_model_is_loaded(project: Path) -> None:
    (project / "out" / "block").mkdir(parents=True)
    (project / "out" / "block" / "letter.txt").write_text("mine")
    loaded: list[str] = []
    stages = Stages(lambda name, seconds: loaded.append(name))
    with pytest.raises(ConfigError, match="it exists and is no bundle"):
        pipeline.run(config(project), stages=stages)
    assert loaded == []
    assert (project / "out" / "block" / "letter.txt").read_text() == "mine"


def test_a_baseline_is_the_untransformed_export_beside(project: Path) -> None:
    result = pipeline.run(config(project, "merge-linears", formats=("onnx",)), baseline=True)
    plain = project / "out" / "block-baseline"
    assert all(place.passed for folder in (result.output, plain) for place in verify(folder).places)
    manifests = [json.loads((folder / "manifest.json").read_bytes()) for folder in (result.output, plain)]
    assert [[t["rule"] for t in m["transformations"]] for m in manifests] == [["merge-linears"], []]
    assert manifests[0]["nodes_before"] == manifests[1]["nodes_after"]
    assert (plain / "graph_after.txt").read_text() == (result.output / "graph_before.txt").read_text()
    assert [m["model"]["weights_sha256"] for m in manifests] == [manifests[0]["model"]["weights_sha256"]] * 2


def test_a_dump_holds_the_graph_before_and_after_every_transformation(project: Path, tmp_path: Path) -> None:
    rules = ("merge-linears", wrong("ReluForGelu"), "change-true-div-to-mul-by-inverse")
    with pytest.raises(ParityError):
        pipeline.run(config(project, *rules), dump=tmp_path / "dump")
    written = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert [name.partition("-")[0] for name in written] == ["01", "01", "02", "02", "03", "03"]
    first_after, second_before = ((tmp_path / "dump" / name).read_text() for name in (written[0], written[3]))
    assert first_after == second_before
    assert "relu" in (tmp_path / "dump" / written[2]).read_text()
    assert "relu" not in second_before


def test_the_bundle_holds_the_config_as_it_was_written(project: Path) -> None:
    path = config(project, "merge-linears", formats=("pt2",))
    result = pipeline.run(path)
    assert (result.output / "config.toml").read_text() == path.read_text()
    assert result.manifest.config["transformations"] == [{"use": "merge-linears"}]
    assert result.manifest.model.source == "python:pipeline_models:block"
    assert result.run_id is None
    assert result.tracking_failure is None


def test_every_stage_is_announced_as_it_starts_and_as_it_ends(project: Path) -> None:
    told: list[tuple[str, bool]] = []
    stages = Stages(lambda name, seconds: told.append((name, seconds is None)))
    pipeline.run(config(project, formats=("torchscript",)), stages=stages)
    started = [name for name, starts in told if starts]
    assert started == [name for name, starts in told if not starts]
    assert started[:4] == ["load", "inputs", "trace", "reference"]
    assert {"check graph", "export torchscript", "check torchscript", "bundle"} <= set(started)
    assert set(stages.seconds) == set(started)


def test_a_source_that_fails_ends_with_three(project: Path) -> None:
    (project / "pipeline_models.py").write_text("def block():\n    raise OSError('disk gone')")
    with pytest.raises(SourceError, match="disk gone") as caught:
        pipeline.run(config(project))
    assert caught.value.exit_code == 3
    assert nothing_is_left(project)


def test_a_fixed_tolerance_replaces_the_measured_one(project: Path) -> None:
    path = config(project, wrong("ScaledHead"), formats=("pt2",))
    text = path.read_text()
    path.write_text(f"{text}\n[parity]\natol = 0.5\n")
    assert pipeline.run(path).manifest.parity.bounds["hidden"].atol == 0.5
    path.write_text(f"{text}\n[parity]\natol = 1e-9\n")
    with pytest.raises(ParityError):
        pipeline.run(path)


def expecting(project: Path, rule: str, least: int) -> Path:
    path = config(project, rule, formats=("pt2",))
    path.write_text(path.read_text().replace(f'use = "{rule}"', f'use = "{rule}"\nexpect = {{ min = {least} }}'))
    return path


def test_a_rule_that_finds_as_much_as_is_expected_passes(project: Path) -> None:
    result = pipeline.run(expecting(project, "merge-linears", 1))
    assert result.manifest.config["transformations"] == [{"use": "merge-linears", "expect": {"min": 1}}]


@pytest.mark.parametrize(
    ("rule", "least", "found"), [("merge-linears", 2, "1 places"), ("fuse-batch-norm", 1, "0 places")]
)
def test_a_rule_that_finds_less_than_is_expected_fails_the_run(
    project: Path, rule: str, least: int, found: str
) -> None:
    with pytest.raises(GateError, match=f"{rule}: it found work in {found}, where at least {least}") as caught:
        pipeline.run(expecting(project, rule, least))
    assert caught.value.exit_code == 6
    assert nothing_is_left(project)


def test_a_rule_that_does_not_preserve_the_computation_needs_a_tolerance(project: Path) -> None:
    path = config(project, "replace-activation", formats=("torchscript", "onnx"))
    with pytest.raises(ConfigError, match=r"transformations\[0\]: replace-activation changes the numbers"):
        pipeline.run(path)
    text = path.read_text()
    path.write_text(f"{text}\n[parity]\natol = 1e-6\n")
    with pytest.raises(ParityError) as caught:
        pipeline.run(path)
    assert caught.value.exit_code == 4
    assert "replace-activation is to blame, which changed gelu. It does not preserve" in str(caught.value)
    assert "parity.atol" in str(caught.value)
    assert nothing_is_left(project)
    path.write_text(f"{text}\n[parity]\natol = 0.01\n")
    (applied,) = pipeline.run(path).manifest.transformations
    assert (applied.rule, applied.preserves_computation) == ("replace-activation", False)
