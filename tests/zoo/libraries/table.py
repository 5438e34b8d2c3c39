"""Writes the results as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from optexport._utils import platform
from tests.zoo.libraries.judge import FORMATS, PEERS
from tests.zoo.libraries.model import Model
from tests.zoo.table import MARKS, Record, brief, share

_TITLES = {"onnx_dynamo": "torch.onnx", "onnx_legacy": "torch.onnx, dynamo=False", "jit_trace": "torch.jit.trace"}
_INTRODUCTION = """\
# Models of other libraries

Written by `python -m tests.zoo.libraries --table`; do not edit it by hand. Each model is built small from its
library, with random weights, biases and norm statistics. It is exported to ONNX and TorchScript, with the dynamic axes
that a user would declare. The results of the files are then compared with eager PyTorch at two sizes that were not
traced, with other values. `right` means that both files are right at all sizes. Models that are not right are also
exported by torch's own exporters and judged in the same way. Results of earlier runs are kept, so rows may come from
several commits and efforts.

{machine}; {versions}. The seconds were measured while other processes ran.
"""


def is_right(record: Record) -> bool:
    """Returns True if both files are right at all sizes."""
    return all(record["stages"].get(stage) == "done" for stage in ("eager", "exported", *FORMATS))


def table(models: Mapping[str, Model], results: Mapping[str, Record], peers: Mapping[str, Record]) -> str:
    """Returns the whole page: totals by library, reasons of failures, and a row for each model."""
    records = [results[name] for name in models if name in results]
    failed = [record for record in records if not is_right(record)]
    behind = sum(bool(rights(peers.get(record["model_type"]))) for record in failed)
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("torch", "onnxruntime"))
    lines = [
        _INTRODUCTION.format(machine=_machine(), versions=versions),
        f"| library | models | right | refused | wrong | crash, timeout | {' | '.join(_TITLES.values())} |",
        f"|---|{'---:|' * (5 + len(PEERS))}",
        *[_library_row(library, records, peers) for library in sorted({_library(record) for record in records})],
        _library_row("", records, peers),
        "",
        f"{len(records)} of {len(models)} models ran. {behind} are right with torch's exporters only.",
        "",
        "## Not right",
        "",
        "| model | result | reason | right by |",
        "|---|---|---|---|",
        *[_failure_row(record, peers.get(record["model_type"])) for record in failed],
        "",
        "## Each model",
        "",
        f"| model | class | traced inputs | onnx | torchscript | {' | '.join(_TITLES.values())} | s |",
        f"|---|---|---|---|---|{'---|' * len(PEERS)}---:|",
        *[_row(record, peers.get(record["model_type"])) for record in records],
    ]
    left = [name for name in models if name not in results]
    if left:
        lines += ["", f"## Not tried yet: {len(left)}", "", ", ".join(left)]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    return f"{platform.processor()}, {platform.usable_cores()} cores"


def result(record: Record) -> str:
    """Returns the worst result of a model: right, refused, fixed, wrong, crash, timeout or not built."""
    if is_right(record):
        return "right"
    outcomes = set(record["stages"].values())
    return next(
        (name for name in ("wrong", "crash", "timeout", "not built", "fixed", "refused") if name in outcomes), ""
    )


def _library(record: Record) -> str:
    return str(record["model_type"]).partition("/")[0]


def _library_row(library: str, records: Iterable[Record], peers: Mapping[str, Record]) -> str:
    chosen = [record for record in records if library in ("", _library(record))]
    results = [result(record) for record in chosen]
    counts: list[Any] = [len(chosen), f"{results.count('right')} ({share(results.count('right'), len(chosen))})"]
    counts += [sum(map(results.count, names)) for names in (("refused", "fixed"), ("wrong",), ("crash", "timeout"))]
    for peer in PEERS:
        judged = [peers[record["model_type"]] for record in chosen if record["model_type"] in peers]
        counts.append(f"{sum(record['stages'].get(peer) == 'done' for record in judged)} of {len(judged)}")
    return f"| {library or '**all**'} | {' | '.join(map(str, counts))} |"


def rights(peer: Record | None) -> Sequence[str]:
    """Returns the exporters of torch that export the model rightly."""
    return [] if peer is None else [_TITLES[name] for name in PEERS if peer["stages"].get(name) == "done"]


def _failure_row(record: Record, peer: Record | None) -> str:
    reason = brief(next(iter(record["reasons"].values()), ""))
    return f"| {record['model_type']} | {result(record)} | {reason} | {', '.join(rights(peer)) or '-'} |"


def _row(record: Record, peer: Record | None) -> str:
    inputs = ", ".join(f"{name} {shape}" for name, shape in record["inputs"].items())
    exported = record["stages"].get("exported")
    marks = [MARKS.get(record["stages"].get(name, exported), "-") for name in FORMATS]
    marks += [MARKS.get(peer["stages"].get(name, ""), "-") if peer else "-" for name in PEERS]
    seconds = round(sum(record["seconds"].values()))
    return f"| {record['model_type']} | {record['cls']} | {inputs} | {' | '.join(marks)} | {seconds} |"
