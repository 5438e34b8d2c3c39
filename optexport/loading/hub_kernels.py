"""Blocks kernels of the hub: code that transformers runs if ``kernels`` is installed.

A model's config may name one, as ``"attn_implementation": "org/name"``. Some transformers models also request one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from transformers.integrations import hub_kernels


@contextlib.contextmanager
def refused(options: Mapping[str, Any]) -> Iterator[None]:
    """Blocks kernels of the hub; transformers uses its own code instead, or raises.

    Args:
        options: Options of ``from_pretrained``. ``trust_remote_code`` allows the kernels.
    """
    usual = hub_kernels.get_kernel
    if not options.get("trust_remote_code"):
        hub_kernels.get_kernel = _refuse
    try:
        yield
    finally:
        hub_kernels.get_kernel = usual


def _refuse(kernel_name: str, *_: Any, **__: Any) -> NoReturn:
    # transformers continues without a kernel after this error, if the model requested the kernel by default.
    raise FileNotFoundError(f"{kernel_name} is code of the hub's, which runs only with model.trust_remote_code = true")
