"""Exports PyTorch and transformers models, optimized and checked against the original.

Example:
    >>> import optexport, torch
    >>> result = optexport.export(torch.nn.Linear(4, 2).eval(), {"input": torch.randn(3, 4)}, "build/small")
    >>> optexport.Bundle.load(result.output)(input=torch.randn(5, 4))["output"].shape
    (5, 2)

Start with `export` for a model in memory, `run` for a config file, and `Bundle` to use the result. Names are imported
on first use, so that ``import optexport`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optexport._utils import telemetry
from optexport._version import __version__ as __version__

telemetry.disable()


if TYPE_CHECKING:
    from optexport.api import export as export
    from optexport.api import symbolic_trace as symbolic_trace
    from optexport.batch.run import run_batch as run_batch
    from optexport.batch.summary import BatchResult as BatchResult
    from optexport.bundle.sign import sign as sign
    from optexport.errors import BenchError as BenchError
    from optexport.errors import BundleError as BundleError
    from optexport.errors import ConfigError as ConfigError
    from optexport.errors import DeviceError as DeviceError
    from optexport.errors import ExportError as ExportError
    from optexport.errors import GateError as GateError
    from optexport.errors import OptexportError as OptexportError
    from optexport.errors import ParityError as ParityError
    from optexport.errors import SourceError as SourceError
    from optexport.errors import TraceError as TraceError
    from optexport.errors import TrackingError as TrackingError
    from optexport.errors import TransformationError as TransformationError
    from optexport.generation.export import export_generation as export_generation
    from optexport.generation.result import GenerationResult as GenerationResult
    from optexport.generation.run import run_generation as run_generation
    from optexport.generation.runtime import Generator as Generator
    from optexport.inference.bundle import Bundle as Bundle
    from optexport.parity.verify import verify as verify
    from optexport.pipeline.benchmark import benchmark as benchmark
    from optexport.pipeline.diff import diff as diff
    from optexport.pipeline.lock import lock as lock
    from optexport.pipeline.reproduce import reproduce as reproduce
    from optexport.pipeline.run import run as run
    from optexport.report.result import Result as Result
    from optexport.signature.signature import Dim as Dim
    from optexport.tracking.registry.promotion import promote as promote
    from optexport.tracking.registry.promotion import rollback as rollback
    from optexport.tracking.upload import upload as upload

_ERRORS = (
    "BenchError",
    "BundleError",
    "ConfigError",
    "DeviceError",
    "ExportError",
    "GateError",
    "OptexportError",
    "ParityError",
    "SourceError",
    "TraceError",
    "TrackingError",
    "TransformationError",
)
_MODULES = {
    "BatchResult": "batch.summary",
    "Bundle": "inference.bundle",
    "Dim": "signature.signature",
    "GenerationResult": "generation.result",
    "Generator": "generation.runtime",
    "Result": "report.result",
    "benchmark": "pipeline.benchmark",
    "diff": "pipeline.diff",
    "export": "api",
    "export_generation": "generation.export",
    "lock": "pipeline.lock",
    "promote": "tracking.registry.promotion",
    "reproduce": "pipeline.reproduce",
    "rollback": "tracking.registry.promotion",
    "run": "pipeline.run",
    "run_batch": "batch.run",
    "run_generation": "generation.run",
    "sign": "bundle.sign",
    "symbolic_trace": "api",
    "upload": "tracking.upload",
    "verify": "parity.verify",
    **dict.fromkeys(_ERRORS, "errors"),
}

_PUBLIC_MODULES = ("errors", "exporters", "testing", "transformations")

__all__ = ["__version__", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Returns the public names, for tab completion."""
    return sorted([*__all__, *_PUBLIC_MODULES])
