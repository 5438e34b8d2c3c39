"""The formats that torch runs: TorchScript and ``.pt2``. Needs no torch, except in functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport._utils.platform import AMX, AVX2, AVX512
from optexport.exporters.format import Benchmark, Format, FormatPass, Loader, Run
from optexport.runtime import devices
from optexport.runtime.devices import Device

if TYPE_CHECKING:
    from optexport.exporters.flat_graph import FlatGraph

# The gains of the defaults are in docs/explanation/measurements.md.
_PASSES = (
    FormatPass(
        "shared-masks",
        "converts a boolean mask of several attentions to numbers once",
        cpu_only=True,
        is_default=True,
        default_precisions=("bfloat16",),
    ),
    FormatPass(
        "onednn-linear",
        "computes linear layers, and a GELU or a sum after one, with oneDNN instead of the BLAS library of torch",
        cpu_only=True,
        is_default=True,
        default_flag=AVX512,
        slower_flag=AMX,
        default_precisions=("bfloat16",),
    ),
    FormatPass(
        "channels-last",
        "computes convolutions with oneDNN, on images in channels-last memory format",
        cpu_only=True,
        is_default=True,
        default_flag=AVX2,
    ),
)


class TorchScriptFormat(Format):
    """Files of TorchScript."""

    name = "torchscript"
    file_name = "model.torchscript.pt"
    runtime = "TorchScript"
    passes = (*_PASSES, FormatPass("freeze", "turns the weights into constants of the code (torch.jit.freeze)"))
    devices = ("cpu", "cuda")

    def write(self, graph: FlatGraph, path: Path, passes: Sequence[str]) -> str | None:
        from optexport.exporters import torchscript

        example = {name: tensor.to(graph.device) for name, tensor in graph.example.items()}
        return torchscript.save(graph.program, graph.signature, example, path, passes=passes)

    def open(self, path: Path, outputs: Sequence[str], device: Device) -> Run:
        from optexport.runtime import runners

        return runners.open_torchscript(path, outputs, device)

    def prepare_benchmark(self, benchmark: Benchmark) -> Callable[[Path], Loader]:
        from optexport.runtime.untrusted import archives

        return _prepare(benchmark, archives.load_torchscript)


class Pt2Format(Format):
    """Files of ``torch.export``."""

    name = "pt2"
    file_name = "model.pt2"
    runtime = "torch.export"
    # A file stays as traced by default: any device or compiler can use it.
    passes = tuple(replace(entry, is_default=False, default_flag=None, slower_flag=None) for entry in _PASSES)
    devices = ("cpu", "cuda")
    is_timed = False  # Python runs its operators one by one, as those of the original

    def write(self, graph: FlatGraph, path: Path, passes: Sequence[str]) -> str | None:
        from optexport.exporters import pt2

        pt2.save(graph.program, path, passes=passes)
        return None

    def open(self, path: Path, outputs: Sequence[str], device: Device) -> Run:
        from optexport.runtime import runners

        return runners.open_pt2(path, outputs, device)

    def prepare_benchmark(self, benchmark: Benchmark) -> Callable[[Path], Loader]:
        from optexport.runtime.untrusted import archives

        return _prepare(benchmark, archives.pt2_module)


def _prepare(benchmark: Benchmark, open_module: Callable[[Path], Callable[..., Any]]) -> Callable[[Path], Loader]:
    """Returns a reader whose calls run the module alone, without copies of inputs and results."""
    import warnings

    import torch
    from safetensors.torch import load_file

    from optexport.signature.signature import as_arguments

    warnings.simplefilter("ignore")
    torch.set_num_threads(benchmark.threads)
    devices.check_torch(benchmark.device, benchmark.path.name)
    if benchmark.device != "cpu":
        devices.set_float32_precision()

    def read(inputs: Path) -> Loader:
        batch = as_arguments(benchmark.select(load_file(inputs)))
        return partial(load, {name: tensor.to(benchmark.device) for name, tensor in batch.items()})

    def load(arguments: dict[str, Any]) -> Callable[[], object]:
        module = open_module(benchmark.path)
        torch.set_grad_enabled(False)
        if benchmark.device == "cpu":
            return lambda: module(**arguments)

        def run() -> object:
            results = module(**arguments)
            torch.cuda.synchronize()  # a call on a GPU returns before the work is done
            return results

        return run

    return read
