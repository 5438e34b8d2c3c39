"""Traces ``torch.vmap`` as calls of operators on whole batches.

``torch.export`` of torch 2.13 records the calls for one element between calls that start and end the batch. No file
format supports the latter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch import apis
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing

_PROXY = torch._C._TorchDispatchModeKey.PROXY


@contextlib.contextmanager
def expand_vmap() -> Iterator[None]:
    """Records the operators that ``torch.vmap`` calls for a batch, in the traces within the block."""
    original = vars(apis)["vmap_impl"]

    def vmap_impl(*args: Any, **kwargs: Any) -> Any:
        mode = torch._ops._get_dispatch_mode_pre_dispatch(_PROXY)
        if mode is None:  # no trace, or within another vmap
            return original(*args, **kwargs)
        # A mode below the batching of vmap sees whole batches. The trace's own mode is above it.
        below = ProxyTorchDispatchMode(mode.tracer, mode.tracing_mode)
        with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), below:
            return original(*args, **kwargs)

    with mock.patch.object(apis, "vmap_impl", vmap_impl):
        yield
