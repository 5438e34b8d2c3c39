"""Counts the batches and rows of user data that were not checked."""

from __future__ import annotations

from collections.abc import Sequence

from optexport.parity.cases.case import Case
from optexport.signature.signature import Batch


def describe_unchecked_data(user_batches: Sequence[Batch], rows: int, cases: Sequence[Case]) -> tuple[str, ...]:
    """Describes how much of the user data was not checked.

    Args:
        user_batches: All batches of user data.
        rows: Number of rows of the data, or 0 if the data was not split.
        cases: Cases that were checked.

    Returns:
        One message, or nothing if all data was checked.
    """
    checked_batches = [case.batch for case in cases if case.data]
    if not rows:
        count = len(checked_batches)
        return () if count == len(user_batches) else (f"data: {count} of {len(user_batches)} batches are checked",)
    # Splitting changes only the inputs that differ between the batches.
    split_input = next(
        name for name, tensor in user_batches[0].items() if not all(tensor is batch[name] for batch in user_batches)
    )
    checked_rows = sum(batch[split_input].shape[0] for batch in checked_batches)
    return () if checked_rows == rows else (f"data: {checked_rows} of {rows} rows are checked",)
