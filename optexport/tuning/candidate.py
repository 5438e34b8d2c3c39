"""Candidates of tuning: which rules of the run, and which format passes, make a file."""

from __future__ import annotations

from collections.abc import Sequence

from optexport.bundle.outcomes import AS_CONFIGURED
from optexport.config.schema import Format
from optexport.exporters.registry import all_passes
from optexport.job import Job
from optexport.transformations.apply import NamedRule

# The position of a rule in the run, or the name of a format pass.
Option = int | str
Candidate = frozenset[Option]


def configured(job: Job, file_format: Format) -> Candidate:
    """Returns the candidate that the config describes."""
    rules = [i for i, rule in enumerate(job.rules) if rule.formats is None or file_format in rule.formats]
    return frozenset([*rules, *job.config.export.passes.get(file_format, [])])


def rules_in(candidate: Candidate) -> list[int]:
    """Returns the positions of a candidate's rules, in the order of application."""
    return sorted(option for option in candidate if isinstance(option, int))


def passes_in(candidate: Candidate) -> list[str]:
    """Returns a candidate's format passes, in the order of application."""
    return [entry.name for entry, _ in all_passes() if entry.name in candidate]


def in_order(candidate: Candidate) -> list[Option]:
    """Returns a candidate's rules and format passes, in the order of application."""
    return [*rules_in(candidate), *passes_in(candidate)]


def describe_change(start: Candidate, candidate: Candidate, rules: Sequence[NamedRule]) -> str:
    """Describes a candidate's changes, such as ``without merge-linears, with gemm``.

    Rules with equal names are numbered.
    """
    names = [rule.name for rule in rules]
    titles = [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]
    removed = [titles[i] for i in rules_in(start - candidate)] + passes_in(start - candidate)
    added = [titles[i] for i in rules_in(candidate - start)] + passes_in(candidate - start)
    changes = [f"without {name}" for name in removed] + [f"with {name}" for name in added]
    return ", ".join(changes) or AS_CONFIGURED
