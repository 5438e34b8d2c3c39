"""The ONNX format. Needs no torch, except to write files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport._utils.platform import AMX
from optexport.errors import BenchError, ExportError, OptexportError, first_line
from optexport.exporters.format import ArrayRun, Benchmark, Format, FormatPass, Loader, Run
from optexport.exporters.onnx import external_data
from optexport.exporters.onnx.opsets import ATTENTION_OPSET
from optexport.runtime import devices
from optexport.runtime.devices import Device

if TYPE_CHECKING:
    import numpy.typing as npt

    from optexport.exporters.flat_graph import FlatGraph


class OnnxFormat(Format):
    """Files of ONNX, for ONNX Runtime."""

    name = "onnx"
    file_name = "model.onnx"
    runtime = "ONNX Runtime"
    # In the order of application, except attention, which is part of the conversion. The gains of the defaults are in
    # docs/explanation/measurements.md.
    passes = (
        FormatPass(
            "sum-residuals",
            "writes the Add before a LayerNormalization as Sum, so that ONNX Runtime does not fuse the two",
            is_default=True,
        ),
        FormatPass(
            "split-linears",
            "writes a linear whose result is only cut into parts, as after merge-linears, as one linear for each part",
            is_default=True,
        ),
        FormatPass(
            "attention",
            f"writes attention as one operator; needs opset {ATTENTION_OPSET} or newer",
            is_default=True,
            min_opset=ATTENTION_OPSET,
        ),
        FormatPass(
            "gemm",
            "writes a MatMul with a weight and the Add of its bias as one Gemm on a matrix of rows",
            is_default=True,
            default_flag=AMX,
        ),
        FormatPass(
            "transformers-fusions",
            "fuses operators into operators of ONNX Runtime, as transformers does for CPUs",
            cpu_only=True,
        ),
    )
    devices = ("cpu", "cuda")

    def write(self, graph: FlatGraph, path: Path, passes: Sequence[str]) -> str | None:
        from optexport.exporters.onnx import exporter

        model = exporter.convert_graph(graph, passes)
        exporter.write(model, path, metadata=graph.metadata(passes), passes=passes)
        return None

    def open(self, path: Path, outputs: Sequence[str], device: Device) -> Run:
        from optexport.runtime import runners

        return runners.open_onnx(path, outputs, device, optimized=True, spinning=True)

    def list_openers(self, path: Path, outputs: Sequence[str], device: Device) -> list[tuple[str, Callable[[], Run]]]:
        """Lists the file without and with the optimizations of ONNX Runtime."""
        from optexport.runtime import runners

        return [
            ("onnx", partial(runners.open_onnx, path, outputs, device, optimized=False)),
            ("onnx-optimized", partial(runners.open_onnx, path, outputs, device, optimized=True)),
        ]

    def open_for_arrays(
        self,
        path: Path,
        outputs: Sequence[str],
        device: Device,
        dtypes: Mapping[str, str],
    ) -> ArrayRun:
        """Opens a file with numpy and ONNX Runtime only."""
        import numpy as np

        from optexport.runtime import onnx_session

        onnxruntime = _import_runtime()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are also raised
        try:
            session = onnx_session.open_session(path, options, device)
        except OptexportError:
            raise
        except Exception as error:  # the runtime's exceptions have no common base class
            raise ExportError(f"ONNX Runtime cannot load the file: {first_line(error)}", location=str(path)) from error
        names = [node.name for node in session.get_inputs()]

        def run(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            results = onnx_session.run_session(session, outputs, {name: inputs[name] for name in names})
            return {name: np.asarray(result) for name, result in zip(outputs, results, strict=True)}

        return run

    def prepare_benchmark(self, benchmark: Benchmark) -> Callable[[Path], Loader]:
        """Imports ONNX Runtime, but not torch."""
        onnxruntime = _import_runtime()
        from safetensors.numpy import load_file

        from optexport.runtime import onnx_session

        def read(inputs: Path) -> Loader:
            return functools.partial(load, load_file(inputs))

        def load(inputs: dict[str, Any]) -> Callable[[], object]:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = benchmark.threads
            options.log_severity_level = 4  # errors are raised as well
            # Threads that spin after a run would slow down the artifact whose turn is next.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            session = onnx_session.open_session(benchmark.path, options, benchmark.device)
            batch = benchmark.select(inputs, [value.name for value in session.get_inputs()])
            if benchmark.device == "cpu":
                return lambda: session.run(None, batch)
            return onnx_session.bind_session(session, batch, benchmark.device)

        return read

    def list_files(self, name: str) -> tuple[str, ...]:
        return name, f"{name}.data"

    def check_file(self, path: Path) -> None:
        external_data.check_locations(path)

    def find_size(self, path: Path) -> int:
        names = {path.name} | external_data.locations(read_onnx(path))
        try:
            return sum((path.parent / name).stat().st_size for name in names)
        except (OSError, ValueError) as error:  # ValueError for a name with a null character
            raise BenchError(f"the external data of the file is missing: {error}", location=str(path)) from error

    def check_device(self, device: Device, location: str) -> None:
        devices.check_onnx_runtime(device, location)


def read_onnx(path: Path) -> Any:
    """Reads an ONNX file without its external data.

    Raises:
        BenchError: The file is not a valid ONNX file.
    """
    import onnx

    try:
        return onnx.load_model(path, load_external_data=False)
    except Exception as error:  # protobuf's errors and OSError have no common base class
        raise BenchError(f"the file is not a valid ONNX file: {first_line(error)}", location=str(path)) from error


def _import_runtime() -> Any:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads it on import; keeps the user's own setting
    import onnxruntime

    return onnxruntime
