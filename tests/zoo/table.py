"""Writes the results of the zoo as a Markdown table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

FORMATS = ("onnx", "torchscript", "pt2")
STAGES = ("built", "eager", "traced", "graph", *FORMATS)
Record = Mapping[str, Any]

_LIBRARIES = ("transformers", "torch", "onnxruntime")
_INTRODUCTION = (
    "Written by `python -m tests.zoo --table tests/zoo/COVERAGE.md`; do not edit it by hand. Each model type of "
    "transformers {transformers} is built tiny from its own config with random weights, biases and norm statistics, "
    "traced with inputs that optexport makes from that config, transformed by the preset, and verified as a graph and "
    "in each file format, also at sizes that were not traced. torch {torch}, onnxruntime {onnxruntime}."
)
_LEGEND = (
    "`fixed sizes`: the file accepts the traced sizes only. Rules lists the rules of the preset that matched, with "
    "the number of matches."
)
# Symbols of results in the table. A dash marks a stage that did not run.
MARKS = {"done": "✓", "wrong": "**wrong**", "refused": "refused", "crash": "**crash**", "fixed": "fixed sizes"}


def passed(record: Record) -> bool:
    """Returns True if every stage was done and verified."""
    return all(record["stages"].get(stage) == "done" for stage in STAGES)


def only_built(record: Record) -> bool:
    """Returns True if the type was only built and run eagerly."""
    return record["stages"].get("eager") == "done" and "traced" not in record["stages"]


def table(results: Mapping[str, Record], model_types: Sequence[str]) -> str:
    """Returns the whole page: introduction, totals, reasons of failures, and a row for each type.

    Args:
        results: Results by model type.
        model_types: All types, including those that did not run.
    """
    records = [results[name] for name in model_types if name in results]
    lines = [
        "# Coverage",
        "",
        _INTRODUCTION.format(**{name: version(name).partition("+")[0] for name in _LIBRARIES}),
        "",
        *_summary(records, len(model_types)),
        "",
        "## Why types did not get through",
        "",
        *_reasons(records),
        "",
        "## Each type",
        "",
        _LEGEND,
        "",
        "| model type | class | nodes | linears | rules | traced | graph | onnx | torchscript | pt2 | s |",
        "|---|---|---:|---:|---|---|---|---|---|---|---:|",
        *[_row(record) for record in records if "traced" in record["stages"]],
        "",
        "## Not built, or not run eagerly",
        "",
        "| model type | stage | reason |",
        "|---|---|---|",
        *[_unbuilt(record) for record in records if record["stages"].get("eager") != "done"],
    ]
    left = [record["model_type"] for record in records if only_built(record)]
    if left:
        lines += ["", f"## Built and run eagerly, not taken further yet: {len(left)}", "", ", ".join(left)]
    left = [name for name in model_types if name not in results]
    if left:
        lines += ["", f"## Not tried yet: {len(left)}", "", ", ".join(left)]
    return "\n".join(lines) + "\n"


def _summary(records: Sequence[Record], total: int) -> list[str]:
    def count(stage: str, *outcomes: str) -> int:
        return sum(record["stages"].get(stage) in outcomes for record in records)

    further = [record for record in records if "traced" in record["stages"]]
    ran = len(further)
    lines = [
        "| | model types | of those taken further |",
        "|---|---:|---:|",
        f"| known to transformers | {total} | |",
        f"| built | {count('built', 'done')} | |",
        f"| ran eagerly on inputs made from the config | {count('eager', 'done')} | |",
        f"| taken further so far: traced, verified, exported | {ran} | |",
        f"| traced | {count('traced', 'done')} | {share(count('traced', 'done'), ran)} |",
        f"| verified as a graph | {count('graph', 'done')} | {share(count('graph', 'done'), ran)} |",
    ]
    for name in FORMATS:
        lines.append(f"| verified in {name} | {count(name, 'done')} | {share(count(name, 'done'), ran)} |")
    whole = sum(passed(record) for record in further)
    several: list[tuple[str, Callable[[Record], bool]]] = [
        ("a result that is wrong", lambda record: "wrong" in record["stages"].values()),
        ("refused somewhere, with exit 3 or 5", lambda record: "refused" in record["stages"].values()),
        ("TorchScript of the traced sizes only", lambda record: "fixed" in record["stages"].values()),
        ("a crash: an exception that is not optexport's", lambda record: "crash" in record["stages"].values()),
        ("out of time", lambda record: "timeout" in record["stages"].values()),
    ]
    lines.append(f"| verified throughout | {whole} | {share(whole, ran)} |")
    for title, holds in several:
        number = sum(map(holds, further))
        lines.append(f"| {title} | {number} | {share(number, ran)} |")
    return lines


def share(count: int, of: int) -> str:
    return f"{100 * count / of:.1f} %" if of else ""


def _reasons(records: Sequence[Record]) -> list[str]:
    """Returns each reason with its stages and types, the most frequent first."""
    types: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record["stages"].get("eager") == "done":
            for stage, reason in record["reasons"].items():
                befell = types.setdefault((record["stages"][stage], brief(reason)), [])
                befell.append(f"{record['model_type']} ({stage})")
    order = Counter({key: len(names) for key, names in types.items()})
    return [
        f"- {stage}: {reason}: {', '.join(types[stage, reason])}" for (stage, reason), _ in order.most_common()
    ] or ["None."]


def brief(reason: str) -> str:
    line = " ".join(reason.split())
    return (line if len(line) <= 240 else f"{line[:240]} …").replace("|", "\\|").replace("<", "&lt;")


def _row(record: Record) -> str:
    marks = [MARKS.get(record["stages"].get(s, ""), record["stages"].get(s, "-")) for s in STAGES[2:]]
    rules = ", ".join(f"{name} {count}" for name, count in sorted(record["rules"].items()))
    seconds = round(sum(record["seconds"].values()))
    cells = [record["model_type"], record["cls"], record["nodes"], record["linears"], rules, *marks, seconds]
    return f"| {' | '.join(map(str, cells))} |"


def _unbuilt(record: Record) -> str:
    stage = next((s for s in STAGES if record["stages"].get(s) != "done"), "built")
    reason = record["reasons"].get(stage, "").split(" | ")[0]
    return f"| {record['model_type']} | {stage} | {brief(reason)} |"
