"""How one file is made of the trace: which of the run's rules are applied, and which passes."""

from __future__ import annotations

from collections.abc import Sequence

from optexport.config.format_passes import PASSES
from optexport.config.schema import Format
from optexport.job import Job
from optexport.transformations.apply import NamedRule
from optexport.tuning.outcome import AS_CONFIGURED

# The position of a rule among the run's, or the name of a lowering.
Ingredient = int | str
Recipe = frozenset[Ingredient]


def configured(job: Job, file_format: Format) -> Recipe:
    """The recipe that the config gives."""
    rules = [i for i, rule in enumerate(job.rules) if rule.formats is None or file_format in rule.formats]
    return frozenset([*rules, *job.config.export.passes.get(file_format, [])])


def rules_in(recipe: Recipe) -> list[int]:
    """The positions of its rules, in the order in which they are applied."""
    return sorted(one for one in recipe if isinstance(one, int))


def passes_in(recipe: Recipe) -> list[str]:
    """Its passes, in the order in which they are applied."""
    return [format_pass.name for format_pass in PASSES if format_pass.name in recipe]


def in_order(recipe: Recipe) -> list[Ingredient]:
    """Its ingredients, in the order in which they are applied."""
    return [*rules_in(recipe), *passes_in(recipe)]


def change_in_words(start: Recipe, recipe: Recipe, rules: Sequence[NamedRule]) -> str:
    """What is other in a recipe than in the one that is configured: ``without merge-linears, with gemm``.

    Of rules with the same name the position among all tells which is meant.
    """
    names = [rule.name for rule in rules]
    titles = [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]
    without = [titles[i] for i in rules_in(start - recipe)] + passes_in(start - recipe)
    added = [titles[i] for i in rules_in(recipe - start)] + passes_in(recipe - start)
    said = [f"without {name}" for name in without] + [f"with {name}" for name in added]
    return ", ".join(said) or AS_CONFIGURED
