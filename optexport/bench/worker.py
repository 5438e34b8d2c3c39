"""Runs one artifact in its own process, importing only what its runtime needs."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from optexport.errors import OptexportError, first_line
from optexport.runtime import devices, onnx_session
from optexport.runtime.devices import Device

# Seconds; shorter samples would measure the clock's resolution and the cost of reading it.
_MIN_SAMPLE = 1e-4
_USUAL_SAMPLES = 3
# No call starts after a turn took this many times its length. Three calls of a large model may take minutes.
_MAX_OVERRUN = 10
# TorchScript optimizes a file at the second call, by profiles of the first.
_WARMUP_CALLS = 2

Run = Callable[[], object]
Loader = Callable[[], Run]
# Makes a loader from a safetensors file of inputs by name.
Reader = Callable[[Path], Loader]


@dataclass(frozen=True)
class Task:
    """Settings of a worker.

    Attributes:
        path: The file.
        format: "onnx", "torchscript" or "pt2".
        names: Names of its inputs; None if only the runtime knows them.
        threads: Number of threads.
        device: Device to run on.
    """

    path: Path
    format: str
    names: tuple[str, ...] | None
    threads: int
    device: Device


def main() -> None:
    """Serves orders over the connection of the file descriptor ``sys.argv[1]``."""
    with Connection(int(sys.argv[1])) as connection:
        try:
            _serve(connection)
        except EOFError:  # the parent process has finished
            return
        except Exception as error:  # a runtime may raise anything; the parent adds the location
            kind, message = type(error).__name__, first_line(error)
            is_complete = isinstance(error, OptexportError) or message.startswith(kind)
            connection.send((False, message if is_complete else f"{kind}: {message}"))


def _serve(connection: Connection) -> None:
    task = connection.recv()
    read = (_onnx_reader if task.format == "onnx" else _torch_reader)(task)
    connection.send((True, None))
    run: Any = None
    while True:
        order, argument = connection.recv()
        answer: Any = None
        if order == "inputs":
            run = None  # load again for other inputs, because a runtime may adapt a model to the first ones
            load = read(argument)
        elif order == "load":
            before = _memory(reset_peak=True)
            start = time.perf_counter()
            run = load()
            answer = time.perf_counter() - start
        elif order == "warm up":
            repeats = max(1, round(_MIN_SAMPLE / min(_sample(run, argument, min_samples=_WARMUP_CALLS))))
        elif order == "turn":
            answer = _sample(run, argument, repeats)
        elif before is not None and (after := _memory()) is not None:
            answer = max(0, after["VmHWM"] - before["VmRSS"])
        connection.send((True, answer))


def _sample(run: Run, seconds: float, repeats: int = 1, min_samples: int = 1) -> list[float]:
    """Measures calls for some seconds; each sample is the mean of ``repeats`` calls."""
    samples: list[float] = []
    gc.collect()
    gc.disable()
    turn_start = time.perf_counter()
    while (
        len(samples) < min_samples
        or (elapsed := time.perf_counter() - turn_start) < seconds
        or (len(samples) < _USUAL_SAMPLES and elapsed < _MAX_OVERRUN * seconds)
    ):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        samples.append((time.perf_counter() - start) / repeats)
    gc.enable()
    return samples


def _onnx_reader(task: Task) -> Reader:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime
    from safetensors.numpy import load_file

    def read(file: Path) -> Loader:
        inputs = load_file(file)
        return lambda: load(inputs)

    def load(inputs: dict[str, Any]) -> Run:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = task.threads
        options.log_severity_level = 4  # errors are raised as well
        # Threads that spin after a run would slow down the artifact whose turn is next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnx_session.open_session(task.path, options, task.device)
        batch = _select_inputs(inputs, [value.name for value in session.get_inputs()])
        if task.device == "cpu":
            return lambda: session.run(None, batch)
        return bind_session(session, batch, task.device)

    return read


def bind_session(session: Any, batch: dict[str, Any], device: Device) -> Run:
    """Returns a call that runs a session with inputs and outputs on a device.

    The call does not copy between device and host, so that its time compares with a call of torch.
    """
    import onnxruntime

    binding = session.io_binding()
    for name, array in batch.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, device)

    def run() -> Any:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return binding.get_outputs()

    return run


def _torch_reader(task: Task) -> Reader:
    import warnings

    import torch
    from safetensors.torch import load_file

    from optexport.runtime.untrusted import archives
    from optexport.signature.signature import as_arguments

    warnings.simplefilter("ignore")
    torch.set_num_threads(task.threads)
    devices.check_torch(task.device, task.path.name)
    if task.device != "cpu":
        devices.set_float32_precision()

    def read(file: Path) -> Loader:
        inputs = load_file(file)
        batch = inputs if task.names is None else _select_inputs(inputs, task.names)
        arguments = {name: tensor.to(task.device) for name, tensor in as_arguments(batch).items()}
        return lambda: load(arguments)

    def load(arguments: dict[str, Any]) -> Run:
        if task.format == "torchscript":
            module: Callable[..., Any] = archives.load_torchscript(task.path)
        else:
            module = archives.pt2_module(task.path)
        torch.set_grad_enabled(False)
        if task.device == "cpu":
            return lambda: module(**arguments)

        def run() -> object:
            results = module(**arguments)
            torch.cuda.synchronize()  # a call on a GPU returns before the work is done
            return results

        return run

    return read


def _select_inputs(inputs: dict[str, Any], names: Any) -> dict[str, Any]:
    if missing := [name for name in names if name not in inputs]:
        raise LookupError(f"inputs {', '.join(missing)} are missing (found {', '.join(inputs)})")
    return {name: inputs[name] for name in names}


def _memory(*, reset_peak: bool = False) -> dict[str, int] | None:
    """Returns current and peak resident bytes, or None without /proc.

    psutil does not report the peak.
    """
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
