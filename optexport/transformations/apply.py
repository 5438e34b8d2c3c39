"""Applies the transformations that a run names, one by one."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from optexport.errors import GateError, OptexportError, TransformationError, first_line, printable
from optexport.transformations import DeepCopy, ReversibleTransformation, Rule, Transformation, registry
from optexport.transformations.rule import Report, run


@dataclass(frozen=True)
class NamedRule:
    """A transformation under the name, and with the options, that the config gives it.

    Attributes:
        min_matches: In how many places it must find work.
        in_python: Whether it was given from Python, where there are no switches.
        formats: The files that it is applied for; None for all.
    """

    name: str
    options: Mapping[str, Any]
    transformation: Transformation
    min_matches: int = 0
    in_python: bool = False
    formats: tuple[str, ...] | None = None

    @property
    def leaving_it_out(self) -> str:
        """What one does to leave it out."""
        if self.in_python:
            return f"leave {type(self.transformation).__name__} out of transformations"
        return f"run again with --without {self.name}"

    @classmethod
    def of(cls, transformations: Transformation | Iterable[Transformation]) -> tuple[NamedRule, ...]:
        """Names transformations that were made in Python, after their classes."""
        given = [transformations] if isinstance(transformations, Transformation) else list(transformations)
        return tuple(
            cls(_name(t), {key: _repr(value) for key, value in vars(t).items()}, t, in_python=True) for t in given
        )


def _repr(value: Any) -> str:
    """What Python writes for a value, but for addresses, which differ from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _name(transformation: Transformation) -> str:
    cls = type(transformation)
    known = registry.canonical_name(cls.__name__) if cls.__module__.startswith("optexport.") else None
    return known or f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(transformation: Transformation) -> bool:
    """Whether it is a rule of this package, which never writes into a tensor."""
    return isinstance(transformation, Rule) and type(transformation).__module__.startswith("optexport.")


@dataclass(frozen=True)
class Applied:
    """What one transformation did to the graph."""

    rule: NamedRule
    report: Report
    nodes_before: int
    nodes_after: int

    @property
    def reversible(self) -> bool:
        return isinstance(self.rule.transformation, ReversibleTransformation)


@dataclass(frozen=True)
class Transformed:
    """A graph to which transformations were applied.

    Attributes:
        applied: What each of them did.
        undoable: The reversible ones that changed something after the last other one that did.
        earlier: The graph before these, which shares its tensors.
    """

    graph_module: fx.GraphModule
    applied: tuple[Applied, ...]
    undoable: tuple[NamedRule, ...]
    earlier: fx.GraphModule


def sharing_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and of its module tree that shares the tensors."""
    tensors = [*graph_module.parameters(), *graph_module.buffers()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
        return copy.deepcopy(graph_module, {id(tensor): tensor for tensor in tensors})


def transform(
    graph_module: fx.GraphModule, rules: Sequence[NamedRule], dump: Path | None = None, title: str = ""
) -> Transformed:
    """Applies transformations, in their order; in place, where all of them are known never to write into a tensor.

    Args:
        dump: A folder to write the graph to, before and after each.
        title: What the names of the files in it begin with.

    Raises:
        TransformationError: One of them raised, or left a graph that is not sound.
        GateError: One of them found work in fewer places than the config expects.
    """
    if not all(is_built_in(rule.transformation) for rule in rules):
        graph_module = DeepCopy()(graph_module)  # whose weights are those of the caller's model
    applied: list[Applied] = []
    undoable: list[NamedRule] = []
    earlier = sharing_copy(graph_module)
    for index, rule in enumerate(rules):
        before = str(graph_module.graph)
        nodes_before = len(graph_module.graph.nodes)
        try:
            graph_module, report = run(rule.transformation, graph_module)
        except TransformationError as error:
            if error.location != type(rule.transformation).__name__:
                raise
            raise TransformationError(
                error.message, location=rule.name, hint=error.hint
            ) from error  # as the config names it
        except OptexportError:
            raise
        except (Exception, SystemExit) as error:  # a plugin's own code may raise anything
            raise TransformationError(
                f"it raised {type(error).__name__}: {first_line(error)}",
                location=rule.name,
                hint=f"To go on without it, {rule.leaving_it_out}; the traceback (--debug) has the line.",
            ) from error
        applied.append(Applied(rule, report, nodes_before, len(graph_module.graph.nodes)))
        _check_expectation(rule, report)
        if dump is not None:
            name = f"{title}{index + 1:02d}-{rule.name.replace(':', '-').replace('/', '-')}"
            (dump / f"{name}-before.txt").write_text(printable(f"{before}\n"), encoding="utf-8")
            (dump / f"{name}-after.txt").write_text(printable(f"{graph_module.graph}\n"), encoding="utf-8")
        if report.changes and applied[-1].reversible:
            undoable.append(rule)
        elif report.changes:
            earlier, undoable = sharing_copy(graph_module), []
    return Transformed(graph_module, tuple(applied), tuple(undoable), earlier)


def _check_expectation(rule: NamedRule, report: Report) -> None:
    if len(report.changes) < rule.min_matches:
        misses = "".join(f"\n  skipped at {miss.node}: {miss.reason}" for miss in report.near_misses)
        raise GateError(
            f"it found work in fewer places than expected: {len(report.changes)} of at least {rule.min_matches}{misses}",
            location=rule.name,
            hint="Mend the model, or lower min_matches of the rule.",
        )
