"""The steps of a run, which a config determines. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optexport.config.schema import Config, Format
from optexport.transformations.registry import canonical_name


@dataclass(frozen=True)
class FormatGroup:
    """Formats that share a graph.

    Attributes:
        rules: The positions of the rules for this graph.
        precision: The dtype that the graph is cast to after the rules; None if it is not cast.
    """

    formats: tuple[Format, ...]
    rules: tuple[int, ...]
    precision: str | None


def group_formats(config: Config, rule_formats: Sequence[Collection[str] | None]) -> list[FormatGroup]:
    """Groups the formats of a config: formats with the same rules share a graph.

    Lower precision changes the graph of PyTorch formats, but the written file of ONNX.

    Args:
        rule_formats: The formats of each rule; None stands for all.
    """
    groups: dict[tuple[tuple[int, ...], str | None], list[Format]] = {}
    for name in dict.fromkeys(config.export.formats):
        applied = tuple(i for i, formats in enumerate(rule_formats) if formats is None or name in formats)
        precision = None if name == "onnx" or config.precision is None else config.precision.of(name)
        groups.setdefault((applied, precision), []).append(name)
    return [FormatGroup(tuple(formats), *key) for key, formats in groups.items()]


def list_run_steps(config: Config, without: Sequence[str] = (), *, baseline: bool = False) -> list[str] | None:
    """Lists the steps of `optexport.run` in order; returns None with ``[tune]``, which chooses the graphs of a run.

    Args:
        without: Names of rules that the run omits.
        baseline: Whether the run also writes the untransformed export.
    """
    if config.tune is not None:
        return None
    omitted = {canonical_name(name) or name for name in without}
    rules = [rule.formats for rule in config.rules() if (canonical_name(rule.use) or rule.use) not in omitted]
    plain = config.model_copy(update={"precision": None})
    return [
        "load",
        "inputs",
        *(["start tracking"] if config.tracking.enabled else []),
        *(f"baseline: {name}" for name in (list_bundle_steps(plain, (), measured=False) if baseline else ())),
        *list_bundle_steps(config, rules, measured=is_measured(config)),
        *(["track"] if config.tracking.enabled else []),
    ]


def list_bundle_steps(
    config: Config, rule_formats: Sequence[Collection[str] | None], *, measured: bool, tuned: bool = False
) -> list[str]:
    """Lists the steps of an export in order.

    Args:
        rule_formats: The formats of each rule; None stands for all.
        measured: Whether the files are benchmarked.
        tuned: Whether to list only the steps after the search of a tuned run.
    """
    groups = group_formats(config, rule_formats)
    suffixes = ["" if len(groups) == 1 else f" for {', '.join(group.formats)}" for group in groups]
    steps = [] if tuned else ["trace", "reference"]
    steps += [*(f"transform{suffix}" for suffix in suffixes), "other sizes"]
    for group, suffix in zip(groups, suffixes, strict=True):
        steps.append(f"check graph{suffix}")
        if group.precision is not None:
            steps += [f"lower{suffix}", f"check lowered graph{suffix}"]
        for name in group.formats:
            steps += [f"export {name}", f"check {name}"]
        if "onnx" in group.formats and config.precision is not None and config.precision.onnx is not None:
            steps += ["lower onnx", "check lowered onnx"]
        steps.append("undo")
    return [*steps, "node errors", "gain", *(["measure"] if measured else []), "bundle", "report"]


def is_measured(config: Config) -> bool:
    """Returns True if the config asks for times of the exported files."""
    return config.bench.enabled or config.gate.needs_times
