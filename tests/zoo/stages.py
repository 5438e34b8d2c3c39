"""Runs one model type through the whole pipeline, and judges each file format separately."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optexport.bundle.artifacts import write_artifact
from optexport.config.derived import resolve_passes
from optexport.config.load import validate_settings
from optexport.config.schema import FORMATS, Format
from optexport.errors import OptexportError
from optexport.exporters import targets
from optexport.exporters.flat_graph import FlatGraph
from optexport.inputs.dummy import dummy_inputs
from optexport.job import Job
from optexport.loading.loader import Loaded
from optexport.parity.reference import graph_runner
from optexport.parity.target_check import TargetChecker
from optexport.pipeline.rules import load_preset
from optexport.pipeline.steps import run_reference, trace_model
from optexport.tracing.dynamo_exporter import one_pass, quiet
from optexport.transformations.apply import transform
from tests.zoo.shrinking import NotBuiltError, candidates

_IMAGE_SIDE = 96
# Possible results of a stage.
DONE, WRONG, REFUSED, CRASH, NOT_BUILT, FIXED = "done", "wrong", "refused", "crash", "not built", "fixed"


@dataclass
class Outcome:
    """Result of a model type.

    Attributes:
        model_type: The type in its config.
        cls: Name of the model's class.
        setting: The setting that shrank its config.
        stages: Result of each stage by name: built, eager, traced, graph, and the formats.
        reasons: Reason of each stage that is not done.
        seconds: Wall-clock seconds by stage.
        nodes: Number of nodes in the traced graph.
        linears: Number of its layers that are ``nn.Linear``.
        rules: Number of matches of each rule of the preset.
        inputs: Shapes of the traced inputs.
        fixed: Axes that the model fixes.
    """

    model_type: str
    cls: str = ""
    setting: str = ""
    stages: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: int = 0
    linears: int = 0
    rules: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, list[int]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)
    announce: Announce = field(default=lambda outcome, stage: None, repr=False)

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "announce"}

    def run(self, stage: str, work: Callable[[], Any]) -> Any:
        """Does the work of a stage and records the result; returns None if it failed."""
        self.announce(self, stage)
        start = time.perf_counter()
        try:
            result = work()
        except OptexportError as error:
            self.stages[stage] = WRONG if error.exit_code == 4 else REFUSED
            self.reasons[stage] = f"exit {error.exit_code}: {error}"
            return None
        except Exception as error:  # not an error of optexport: a defect
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.stages[stage] = CRASH
            self.reasons[stage] = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"[:600]
            return None
        finally:
            self.seconds[stage] = round(time.perf_counter() - start, 2)
        self.stages.setdefault(stage, DONE)
        return result


# Called with the results until then and the name of the next stage.
Announce = Callable[[Outcome, str], None]


def build(outcome: Outcome) -> tuple[nn.Module, dict[str, torch.Tensor]] | None:
    """Returns a tiny model and working inputs for the first setting that has both."""
    start = time.perf_counter()
    problems: list[str] = []
    built = False
    try:
        for setting, make in candidates(outcome.model_type):
            try:
                with quiet():
                    model = make()
            except NotBuiltError as error:
                problems.append(f"{setting}: {error}")
                continue
            outcome.cls, outcome.setting, built = type(model).__name__, str(setting), True
            if not hasattr(model.config, "image_size"):  # a convolutional network: the default size is slow
                model.config.image_size = _IMAGE_SIDE
            try:
                inputs = dummy_inputs(model)
                with torch.no_grad(), one_pass(model), quiet():
                    model(**{name: tensor.clone() for name, tensor in inputs.items()})
            except Exception as error:  # the model's own code may raise anything
                problems.append(f"{setting}: {type(error).__name__}: {error}"[:400])
                continue
            outcome.stages |= {"built": DONE, "eager": DONE}
            return model, inputs
    except NotBuiltError as error:
        problems.append(str(error))
    finally:
        outcome.seconds["built"] = round(time.perf_counter() - start, 2)
    failed = "eager" if built else "built"
    outcome.stages |= ({"built": DONE} if built else {}) | {failed: NOT_BUILT}
    outcome.reasons[failed] = " | ".join(problems)[:1500]
    return None


def judge_building(model_type: str, announce: Announce = lambda outcome, stage: None) -> Outcome:
    """Only builds a model type and runs it eagerly."""
    outcome = Outcome(model_type, announce=announce)
    announce(outcome, "built")
    build(outcome)
    return outcome


def judge(
    model_type: str,
    announce: Announce = lambda outcome, stage: None,
    effort: str = "standard",
    formats: Sequence[Format] = FORMATS,
) -> Outcome:
    """Runs a model type through all stages.

    Args:
        announce: Called before each stage with the results until then.
        effort: The effort in ``[parity]``.
        formats: Formats to write. If empty, the graph is the last stage.
    """
    outcome = Outcome(model_type, announce=announce)
    announce(outcome, "built")
    built = build(outcome)
    if built is None:
        return outcome
    model, inputs = built
    outcome.inputs = {name: list(tensor.shape) for name, tensor in inputs.items()}
    with tempfile.TemporaryDirectory(prefix="optexport-zoo-") as folder, torch.random.fork_rng(devices=[]):
        _judge(outcome, _job(model, inputs, Path(folder), effort), Path(folder), formats)
    return outcome


def _job(model: nn.Module, inputs: dict[str, torch.Tensor], folder: Path, effort: str) -> Job:
    config = validate_settings(
        {
            "model": {"source": f"python:zoo:{type(model).__name__}"},
            "parity": {"effort": effort},
            "export": {"formats": list(FORMATS), "output": "bundle"},
        },
        "zoo",
    )
    return Job(resolve_passes(config), Loaded(model), inputs, (), None, load_preset(), folder / "bundle")


def _judge(outcome: Outcome, job: Job, folder: Path, formats: Sequence[Format]) -> None:
    traced = outcome.run("traced", lambda: trace_model(job))
    if traced is None:
        return
    job, call = traced.job, traced.call
    modules = dict(traced.graph_module.named_modules())
    called = [modules[str(node.target)] for node in traced.graph_module.graph.find_nodes(op="call_module")]
    outcome.nodes = traced.nodes
    outcome.linears = sum(isinstance(module, nn.Linear) for module in called)
    outcome.fixed = list(traced.trace.fixed)

    def refer() -> TargetChecker:
        checker = run_reference(traced)
        model, signature = job.loaded.model, traced.signature
        return TargetChecker(checker, call, model, signature, traced.vocabularies, job.config.parity)

    target_checker = outcome.run("reference", refer)
    if target_checker is None:
        return
    transformed = outcome.run("transformed", lambda: transform(traced.graph_module, job.variants[0].rules))
    if transformed is None:
        return
    outcome.rules = {a.rule.name: len(a.report.changes) for a in transformed.applied if a.report.changes}
    _check(
        outcome,
        "graph",
        lambda: [target_checker.check("graph", lambda: graph_runner(transformed.graph_module, call))],
    )
    graph = FlatGraph(
        transformed.graph_module, traced.signature, job.example, job.loaded.weights_sha256, transformed.applied
    )
    for name in formats:

        def write_and_check(name: Any = name) -> list[Any]:
            artifact = write_artifact(graph, name, folder, job.config.export.passes[name])
            fixed = artifact.fixed_shape is not None
            checked = []
            for target, opened in targets.list_openers(folder / artifact.path, name, traced.signature.output_names):
                checked.append(target_checker.check(target, opened, traced_shape_only=fixed))
            if fixed:
                outcome.stages[name] = FIXED
                outcome.reasons[name] = str(artifact.fixed_shape)
            return checked

        _check(outcome, name, write_and_check)


def _check(outcome: Outcome, stage: str, work: Callable[[], list[Any]]) -> None:
    """Does the work of a stage that yields comparisons. A comparison may fail."""
    for target in outcome.run(stage, work) or ():
        for output in target.outputs:
            if not output.passed and outcome.stages[stage] != WRONG:
                outcome.stages[stage] = WRONG
                outcome.reasons[stage] = f"{target.target}: {output.output}: {output.failure}"[:600]
