"""The OpenVINO format: IR, an XML file with the graph and a ``.bin`` file with the weights.

Needs the extra ``openvino``, which only functions import. Reading and running a file needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optexport._utils import signals, telemetry
from optexport._utils.extras import how_to_install
from optexport.errors import BundleError, ExportError, first_line, unreadable
from optexport.exporters.format import ArrayRun, Benchmark, Format, Loader, Run
from optexport.exporters.onnx.format import OnnxFormat
from optexport.runtime.devices import Device

if TYPE_CHECKING:
    import numpy.typing as npt

    from optexport.exporters.flat_graph import FlatGraph

# Without the hint, OpenVINO computes in bfloat16 on processors that support it.
_FULL_PRECISION = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
_NOISE = re.compile("Exception from |Check '.*' failed at |FrontEnd API failed |Model wasn't fully converted|Summary:")
_HINT = 'Leave "openvino" out of export.formats.'


class OpenVinoFormat(Format):
    """Files of OpenVINO, converted from ONNX."""

    name = "openvino"
    file_name = "model.xml"
    runtime = "OpenVINO"
    passes = tuple(replace(entry, is_default=False) for entry in OnnxFormat.passes if entry.name == "split-linears")
    packages = ("openvino",)
    install = how_to_install("openvino")

    def write(self, graph: FlatGraph, path: Path, passes: Sequence[str]) -> str | None:
        from optexport.exporters.disk_space import check_room

        openvino = import_runtime()

        for spec in (*graph.signature.inputs, *graph.signature.outputs):
            if "bfloat16" in str(spec.dtype):
                raise ExportError(
                    f"the OpenVINO files of optexport support no bfloat16, the dtype of {spec.name}",
                    location="export.formats: openvino",
                    hint=_HINT,
                )
        with signals.temporary_folder() as folder:
            source = folder / OnnxFormat.file_name
            OnnxFormat().write(graph, source, passes)
            try:
                model = openvino.Core().read_model(source)
            except RuntimeError as error:
                raise ExportError(
                    f"OpenVINO cannot convert the graph: {_reason(error)}",
                    location="export.formats: openvino",
                    hint=_HINT,
                ) from error
            _name_nodes(model)
            check_room(path, OnnxFormat().find_size(source))
            openvino.save_model(model, path, compress_to_fp16=False)
        return None

    def open(self, path: Path, outputs: Sequence[str], device: Device) -> Run:
        import torch

        run_arrays = self.open_for_arrays(path, outputs, device, {})

        def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            results = run_arrays({name: tensor.numpy() for name, tensor in inputs.items()})
            return {name: torch.from_numpy(result) for name, result in results.items()}

        return run

    def open_for_arrays(
        self, path: Path, outputs: Sequence[str], device: Device, dtypes: Mapping[str, str]
    ) -> ArrayRun:
        self.check_device(device, path.name)
        compiled = self._compile(path, {})
        names = [port.any_name for port in compiled.inputs]

        def run(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            for name in names:
                _check_integers(name, inputs[name])
            results = compiled([inputs[name] for name in names])
            return {name: results[index] for index, name in enumerate(outputs)}

        return run

    def prepare_benchmark(self, benchmark: Benchmark) -> Callable[[Path], Loader]:
        """Imports OpenVINO, but not torch. A call copies neither inputs nor outputs."""
        from safetensors.numpy import load_file

        openvino = import_runtime()

        def read(inputs: Path) -> Loader:
            return partial(load, load_file(inputs))

        def load(inputs: Mapping[str, Any]) -> Callable[[], object]:
            compiled = self._compile(benchmark.path, {"INFERENCE_NUM_THREADS": str(benchmark.threads)})
            request = compiled.create_infer_request()
            for name, array in benchmark.select(inputs, [port.any_name for port in compiled.inputs]).items():
                request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
            return partial(request.infer, share_outputs=True)

        return read

    def list_files(self, name: str) -> tuple[str, ...]:
        return name, Path(name).with_suffix(".bin").name

    def check_file(self, path: Path) -> None:
        """Checks that a file is IR: OpenVINO opens a file by its content, and other formats may name further files."""
        try:
            with path.open("rb") as file:
                head = file.read(1000)
        except OSError as error:
            raise unreadable(error, path) from error
        if not re.match(rb"\s*(<\?xml[^>]*>)?\s*<net\b", head):
            raise BundleError("the file is not an IR file of OpenVINO", location=str(path))

    def _compile(self, path: Path, settings: Mapping[str, str]) -> Any:
        """Compiles a file for the CPU. Extensions of OpenVINO, which could run code, are never loaded."""
        openvino = import_runtime()

        self.check_file(path)
        core = openvino.Core()
        try:
            return core.compile_model(
                core.read_model(path, path.with_suffix(".bin")), "CPU", {**_FULL_PRECISION, **settings}
            )
        except RuntimeError as error:
            raise ExportError(f"OpenVINO rejects the file: {_reason(error)}", location=path.name, hint=_HINT) from error


def import_runtime() -> Any:
    """Imports OpenVINO. Its version 2026.4 sends an event at every import, and has no other switch for that."""
    return telemetry.import_without("openvino", "openvino_telemetry")


def _check_integers(name: str, array: npt.NDArray[Any]) -> None:
    """Rejects int64 numbers that OpenVINO 2026.4 would cut to int32 on the CPU."""
    if array.dtype.name == "int64" and array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError(f"OpenVINO computes int64 in int32, and {name} contains larger numbers")


def _name_nodes(model: Any) -> None:
    """Numbers the nodes without a name of their own; OpenVINO numbers them through the whole process."""
    for index, node in enumerate(model.get_ordered_ops()):
        if node.get_friendly_name() == node.get_name():
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
        for body in _bodies(node):
            _name_nodes(body)


def _bodies(node: Any) -> list[Any]:
    """Returns the graphs inside of a loop or a branch."""
    if node.get_type_name() in ("Loop", "TensorIterator"):
        return [node.get_function()]
    return [node.get_function(index) for index in range(2)] if node.get_type_name() == "If" else []


def _reason(error: RuntimeError) -> str:
    """Returns the message without the lines that name files of OpenVINO's source, or introduce others."""
    lines = [line.strip("- ") for line in str(error).splitlines()]
    reasons = [line for line in lines if line and not _NOISE.match(line)]
    return " ".join(reasons[:2]) or first_line(error)
