"""Applies the transformations of a run, one after the other."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from optexport._utils.user_lines import describe_error_and_line
from optexport.errors import GateError, OptexportError, TransformationError, printable
from optexport.transformations import DeepCopy, ReversibleTransformation, Rule, Transformation, registry
from optexport.transformations.rule import Report, run


@dataclass(frozen=True)
class NamedRule:
    """A transformation with its name and options in the config.

    Attributes:
        min_matches: Minimum number of matches.
        in_python: True if it was passed from Python, where no command-line option can exclude it.
        formats: The formats that it is applied for; None for all.
    """

    name: str
    options: Mapping[str, Any]
    transformation: Transformation
    min_matches: int = 0
    in_python: bool = False
    formats: tuple[str, ...] | None = None

    @property
    def exclusion_hint(self) -> str:
        """Hint how to exclude this rule from a run."""
        if self.in_python:
            return f"remove {type(self.transformation).__name__} from transformations"
        return f"run again with `without={self.name}`"

    @classmethod
    def of(cls, transformations: Transformation | Iterable[Transformation]) -> tuple[NamedRule, ...]:
        """Names transformations that were created in Python after their classes."""
        instances = [transformations] if isinstance(transformations, Transformation) else list(transformations)
        return tuple(
            cls(_name(t), {key: _stable_repr(value) for key, value in vars(t).items()}, t, in_python=True)
            for t in instances
        )


def _stable_repr(value: Any) -> str:
    """Returns ``repr(value)`` without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _name(transformation: Transformation) -> str:
    cls = type(transformation)
    builtin_name = registry.canonical_name(cls.__name__) if cls.__module__.startswith("optexport.") else None
    return builtin_name or f"{cls.__module__}:{cls.__qualname__}"


def is_built_in(transformation: Transformation) -> bool:
    """Returns True for rules of this package, which never write into a tensor."""
    return isinstance(transformation, Rule) and type(transformation).__module__.startswith("optexport.")


@dataclass(frozen=True)
class Applied:
    """A transformation that was applied, with its report."""

    rule: NamedRule
    report: Report
    nodes_before: int
    nodes_after: int

    @property
    def reversible(self) -> bool:
        return isinstance(self.rule.transformation, ReversibleTransformation)


@dataclass(frozen=True)
class Transformed:
    """A transformed graph.

    Attributes:
        applied: The transformations, with their reports.
        undoable: The reversible transformations that changed the graph after the last irreversible change.
        earlier: The graph before the undoable transformations. It shares its tensors with `graph_module`.
    """

    graph_module: fx.GraphModule
    applied: tuple[Applied, ...]
    undoable: tuple[NamedRule, ...]
    earlier: fx.GraphModule


def sharing_copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph and its module tree, but shares the tensors."""
    tensors = [*graph_module.parameters(), *graph_module.buffers()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates how it copies its own output trees
        return copy.deepcopy(graph_module, {id(tensor): tensor for tensor in tensors})


def transform(
    graph_module: fx.GraphModule, rules: Sequence[NamedRule], dump: Path | None = None, title: str = ""
) -> Transformed:
    """Applies transformations in order, in place if all of them are rules of this package.

    Args:
        graph_module: The graph.
        rules: The transformations.
        dump: Folder for the text of the graph before and after each rule.
        title: Prefix of the file names in `dump`.

    Raises:
        TransformationError: A transformation raised an error or left an invalid graph.
        GateError: A rule matched in fewer places than the config requires.
    """
    if not all(is_built_in(rule.transformation) for rule in rules):
        graph_module = DeepCopy()(graph_module)  # because it shares its weights with the caller's model
    applied: list[Applied] = []
    undoable: list[NamedRule] = []
    earlier = sharing_copy(graph_module)
    for index, rule in enumerate(rules):
        before = str(graph_module.graph)
        nodes_before = len(graph_module.graph.nodes)
        graph_module, report = _run(rule, graph_module)
        applied.append(Applied(rule, report, nodes_before, len(graph_module.graph.nodes)))
        _check_matches(rule, report)
        if dump is not None:
            name = f"{title}{index + 1:02d}-{rule.name.replace(':', '-').replace('/', '-')}"
            (dump / f"{name}-before.txt").write_text(printable(f"{before}\n"), encoding="utf-8")
            (dump / f"{name}-after.txt").write_text(printable(f"{graph_module.graph}\n"), encoding="utf-8")
        if report.changes and applied[-1].reversible:
            undoable.append(rule)
        elif report.changes:
            earlier, undoable = sharing_copy(graph_module), []
    return Transformed(graph_module, tuple(applied), tuple(undoable), earlier)


def _run(rule: NamedRule, graph_module: fx.GraphModule) -> tuple[fx.GraphModule, Report]:
    """Runs a rule; its errors name it as the config does."""
    try:
        return run(rule.transformation, graph_module)
    except TransformationError as error:
        if error.location != type(rule.transformation).__name__:
            raise
        raise TransformationError(error.message, location=rule.name, hint=error.hint) from error
    except OptexportError:
        raise
    except (Exception, SystemExit) as error:  # code of plugins may raise anything
        raise TransformationError(
            f"the rule raised {describe_error_and_line(error)}",
            location=rule.name,
            hint=f"To exclude it, {rule.exclusion_hint}. See the traceback for its line.",
        ) from error


def _check_matches(rule: NamedRule, report: Report) -> None:
    if len(report.changes) < rule.min_matches:
        raise GateError(
            f"too few matches (expected at least {rule.min_matches}, found {len(report.changes)})",
            location=rule.name,
            details="\n".join(f"skipped at {miss.node}: {miss.reason}" for miss in report.near_misses),
            hint="Change the model, or lower min_matches of the rule.",
        )
