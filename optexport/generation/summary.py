"""The summary of a run with a key/value cache, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from optexport.generation.export import GenerationResult
from optexport.generation.tokens import TokenComparison
from optexport.report import json_document, terminal


def show(result: GenerationResult, console: Console, *, verbose: bool = False) -> None:
    """Prints the summary of each part, and the comparison of tokens."""
    for name, part in result.parts.items():
        console.print(f"[bold]Part[/] {name}", highlight=False)
        terminal.show(part, console, verbose=verbose)
        console.print()
    console.print("[bold]Tokens[/] compared with greedy model.generate", highlight=False)
    if result.left_out:
        console.print(
            f"  ignored settings of the model's generation_config: {', '.join(result.left_out)}",
            soft_wrap=True,
            highlight=False,
        )
    for comparison in result.tokens:
        console.print(f"  {escape(_line(comparison))}", soft_wrap=True, highlight=False)


def _line(comparison: TokenComparison) -> str:
    ties = [
        f"row {tie.row} stops at token {tie.token}, a tie of two logits {tie.gap:.2g} apart" for tie in comparison.ties
    ]
    count = f"{comparison.compared} of {comparison.rows * comparison.tokens} compared, all equal"
    rows = f"{comparison.rows} {'row' if comparison.rows == 1 else 'rows'}"
    return "; ".join([f"{comparison.format}, {comparison.prompt} ({rows}): {count}", *ties])


def as_json(result: GenerationResult) -> dict[str, Any]:
    """Returns the result as JSON."""
    parts = {name: json_document.as_json(part) for name, part in result.parts.items()}
    return {
        "passed": all(part["passed"] for part in parts.values()),
        "exit_code": max(part["exit_code"] for part in parts.values()),
        "error": next((part["error"] for part in parts.values() if part["error"]), None),
        "output": str(result.output),
        "mlflow_run_id": next(iter(parts.values()))["mlflow_run_id"],
        "parts": parts,
        "tokens": [asdict(comparison) for comparison in result.tokens],
        "left_out": list(result.left_out),
    }
