"""Code of the hub's that transformers loads, and runs, where the package ``kernels`` is installed.

A model's config names it, as ``"attn_implementation": "org/name"``, or a model of transformers asks for it by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from transformers.integrations import hub_kernels


@contextlib.contextmanager
def refused(options: Mapping[str, Any]) -> Iterator[None]:
    """Has no such code loaded; transformers takes its own where it has some, and raises where it has none.

    Args:
        options: As for ``from_pretrained``: with ``trust_remote_code`` such code is loaded as ever.
    """
    usual = hub_kernels.get_kernel
    if not options.get("trust_remote_code"):
        hub_kernels.get_kernel = _refuse
    try:
        yield
    finally:
        hub_kernels.get_kernel = usual


def _refuse(kernel_name: str, *_: Any, **__: Any) -> NoReturn:
    # The error after which a model goes on without a kernel that it asks for by itself.
    raise FileNotFoundError(f"{kernel_name} is code of the hub's, which runs only with model.trust_remote_code = true")
