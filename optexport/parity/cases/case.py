"""A case: one batch on which targets are compared."""

from __future__ import annotations

from dataclasses import dataclass

from optexport.signature.signature import Batch


@dataclass(frozen=True)
class Case:
    """One batch on which targets are compared.

    Attributes:
        extreme: True if the values are unlike data, so that their rounding differs from that of other cases.
        optional: True if the user did not declare the values, so that the model may reject them.
        data: True if the batch is user data.
        fallbacks: Batches with less padding, to try in this order if the model rejects `batch`.
    """

    name: str
    batch: Batch
    extreme: bool = False
    optional: bool = False
    data: bool = False
    fallbacks: tuple[Batch, ...] = ()
