"""The result of an export with a key/value cache, as data, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from optexport._utils import notebook
from optexport.generation.tokens import TokenComparison
from optexport.report import json_document, terminal
from optexport.report.result import Result


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """Result of an export with a cache.

    Attributes:
        output: The folder with the parts' bundles and ``generation.json``.
        parts: The result of each part, by name: ``decoder``, and ``encoder`` if the model has one.
        tokens: The comparison of the files' tokens with the most likely tokens of ``model.generate``.
        left_out: Settings of the model's generation config that are ignored.
    """

    output: Path
    parts: Mapping[str, Result]
    tokens: tuple[TokenComparison, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        compared = sum(comparison.compared for comparison in self.tokens)
        return f"GenerationResult({', '.join(self.parts)}, {compared:,} tokens compared, in {self.output})"

    def summary(self) -> str:
        """Returns the text that ``optexport run`` prints at its end."""
        return notebook.as_text(self.show)

    def _repr_html_(self) -> str:
        return notebook.as_html(self.show)

    def show(self, console: Console, *, verbose: bool = False) -> None:
        """Prints the summary of each part, and the comparison of tokens."""
        for name, part in self.parts.items():
            console.print(f"[bold]Part[/] {name}", highlight=False)
            terminal.show(part, console, verbose=verbose)
            console.print()
        console.print("[bold]Tokens[/] compared with greedy model.generate", highlight=False)
        if self.left_out:
            console.print(
                f"  ignored settings of the model's generation_config: {', '.join(self.left_out)}",
                soft_wrap=True,
                highlight=False,
            )
        for comparison in self.tokens:
            console.print(f"  {escape(_line(comparison))}", soft_wrap=True, highlight=False)

    def as_json(self) -> dict[str, Any]:
        """Returns the result as JSON."""
        parts = {name: json_document.as_json(part) for name, part in self.parts.items()}
        return {
            "passed": all(part["passed"] for part in parts.values()),
            "exit_code": max(part["exit_code"] for part in parts.values()),
            "error": next((part["error"] for part in parts.values() if part["error"]), None),
            "output": str(self.output),
            "mlflow_run_id": next(iter(parts.values()))["mlflow_run_id"],
            "parts": parts,
            "tokens": [asdict(comparison) for comparison in self.tokens],
            "left_out": list(self.left_out),
        }


def _line(comparison: TokenComparison) -> str:
    ties = [
        f"row {tie.row} stops at token {tie.token}, a tie of two logits {tie.gap:.2g} apart" for tie in comparison.ties
    ]
    count = f"{comparison.compared} of {comparison.rows * comparison.tokens} compared, all equal"
    if comparison.agreeing is not None:
        count = f"{comparison.agreeing} of {comparison.compared} predicted, each after the model's earlier tokens"
    rows = f"{comparison.rows} {'row' if comparison.rows == 1 else 'rows'}"
    return "; ".join([f"{comparison.format}, {comparison.prompt} ({rows}): {count}", *ties])
