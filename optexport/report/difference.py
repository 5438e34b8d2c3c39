"""Difference of two bundles, for people and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from optexport._utils import notebook
from optexport.bundle.manifest import Manifest
from optexport.bundle.measurements import Measured
from optexport.errors import on_one_line

Cell = str | int | float | None
Verdict = Literal["same", "same to rounding", "different", "not known"]
# Columns that are shown under another heading than their key in the JSON document.
_HEADINGS = {
    "": "name",
    "distance in A": "error in A",
    "limit in A": "tolerance in A",
    "distance in B": "error in B",
    "limit in B": "tolerance in B",
}


@dataclass(frozen=True)
class Side:
    """One of the two bundles."""

    folder: Path
    manifest: Manifest
    measured: Measured


@dataclass(frozen=True)
class Section:
    """A table of differences; only rows that differ, unless the note says otherwise.

    Attributes:
        title: Title of the section.
        columns: Keys of the columns in the JSON document.
        rows: Cells of each row.
        same: Number of equal rows, which are omitted.
        note: Text below the table.
        digits: Digits of a fraction for people.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    same: int = 0
    note: str = ""
    digits: int = 3

    @property
    def headings(self) -> list[str]:
        """Headings of the columns for people."""
        return [_HEADINGS.get(column, column) for column in self.columns]


@dataclass(frozen=True, repr=False)
class Difference:
    """Differences of two bundles.

    Attributes:
        side_a: The bundle A.
        side_b: The bundle B.
        computes: Whether both compute the same: their files are equal to the byte, both match the same original to
            rounding, or they differ. "not known" if the graphs differ and no input is shared.
        sentence: The verdict as a sentence.
        reasons: Reasons for the verdict.
        sections: Tables of differences.
    """

    side_a: Side
    side_b: Side
    computes: Verdict
    sentence: str
    reasons: tuple[str, ...]
    sections: tuple[Section, ...]

    def __repr__(self) -> str:
        return f"Difference({self.computes}: {self.sentence})"

    def summary(self) -> str:
        """Returns the text that ``optexport diff`` prints."""
        return notebook.as_text(self.show)

    def _repr_html_(self) -> str:
        return notebook.as_html(self.show)

    def as_json(self) -> dict[str, Any]:
        """Returns the difference as the document of ``--json``."""
        return {
            "a": str(self.side_a.folder),
            "b": str(self.side_b.folder),
            "computes": self.computes,
            "verdict": self.sentence,
            "reasons": list(self.reasons),
            "sections": {
                section.title: {
                    "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows],
                    "equal": section.same,
                }
                for section in self.sections
            },
        }

    def show(self, console: Console) -> None:
        """Prints the difference."""
        for letter, side in (("A", self.side_a), ("B", self.side_b)):
            console.print(f"[bold]{letter}[/] {escape(on_one_line(str(side.folder)))}", soft_wrap=True, highlight=False)
        console.print(f"[bold]{escape(on_one_line(self.sentence))}[/]", soft_wrap=True, highlight=False)
        for section in self.sections:
            if not section.rows:
                continue
            console.print(f"\n[bold]{section.title}[/] {_equal_text(section)}".rstrip(), highlight=False)
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for heading, cells in zip(section.headings, zip(*section.rows, strict=True), strict=True):
                is_number = all(isinstance(cell, int | float | None) for cell in cells)
                table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
            for row in section.rows:
                table.add_row(*(escape(on_one_line(cell_text(cell, section.digits))) for cell in row))
            console.print(table)
            if section.note:
                console.print(section.note, soft_wrap=True, highlight=False)
        equal = [section.title for section in self.sections if not section.rows and section.same]
        if equal:
            console.print(f"\n[bold]Equal[/] {', '.join(equal)}", soft_wrap=True, highlight=False)


def cell_text(cell: Cell, digits: int = 3) -> str:
    """Returns a cell's value for people."""
    if cell is None:
        return "\N{EN DASH}"
    if isinstance(cell, float):
        return f"{cell:.{digits}g}" if math.isfinite(cell) else str(cell)
    return f"{cell:,}" if isinstance(cell, int) else cell


def _equal_text(section: Section) -> str:
    return f"({section.same:,} more {'is' if section.same == 1 else 'are'} equal)" if section.same else ""
