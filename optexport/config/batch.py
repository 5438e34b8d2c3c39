"""Options of a batch. On the command line, click checks most of them first."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from optexport.config.benchmarks import parse_duration
from optexport.config.validation import Table


def _check_duration(text: str) -> str:
    parse_duration(text)
    return text


class BatchOptions(Table):
    """Options of `optexport.run_batch`, which describes them."""

    jobs: int | None = Field(default=None, ge=1, le=1024)
    engine: Literal["local", "ray"] = "local"
    address: str | None = None
    # In GiB: less than an idle process needs, or more than any machine has, is a typing error.
    memory: Annotated[float, Field(ge=0.1, le=2.0**20)] | None = None
    timeout: Annotated[str, AfterValidator(_check_duration)] = "1h"
    retries: int = Field(default=1, ge=0, le=100)
    resume: bool = False
    from_registry: str | None = None
