"""The process that serves one artifact. It imports no more than the artifact's own runtime needs."""

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
from optexport.runtime import devices
from optexport.runtime.devices import Device

# One sample of a time is at least this long, so that neither the clock's grain nor reading it counts.
_LEAST_SAMPLE = 1e-4
_USUAL_SAMPLES = 3
# No further call begins once a turn has taken so many times as long: of a large model three take minutes.
_LONGEST = 10
# A TorchScript file is optimised at its second call, by what was seen at the first.
_WARMING_CALLS = 2

Run = Callable[[], object]
Loader = Callable[[], Run]
# What makes a loader of a safetensors file of inputs, by name.
Reader = Callable[[Path], Loader]


@dataclass(frozen=True)
class Task:
    """What a worker is to serve.

    Attributes:
        format: "onnx", "torchscript" or "pt2".
        names: The inputs that it takes; None where only its runtime knows.
        device: Where it runs.
    """

    path: Path
    format: str
    names: tuple[str, ...] | None
    threads: int
    device: Device


def main() -> None:
    """Serves over the connection whose file descriptor is the first argument, until it is closed."""
    with Connection(int(sys.argv[1])) as calls:
        try:
            _serve(calls)
        except EOFError:  # the parent is gone, or is done
            return
        except Exception as error:  # a runtime may raise anything; the parent says where it happened
            kind, told = type(error).__name__, first_line(error)
            whole = isinstance(error, OptexportError) or told.startswith(kind)
            calls.send((False, told if whole else f"{kind}: {told}"))


def _serve(calls: Connection) -> None:
    task = calls.recv()
    read = (_onnx if task.format == "onnx" else _torch)(task)
    calls.send((True, None))
    run: Any = None
    while True:
        order, given = calls.recv()
        answer: Any = None
        if order == "inputs":
            run = None  # each inputs have a model of their own: a runtime may adapt it to the first that it sees
            load = read(given)
        elif order == "load":
            before = _memory(reset_peak=True)
            start = time.perf_counter()
            run = load()
            answer = time.perf_counter() - start
        elif order == "warm up":
            repeats = max(1, round(_LEAST_SAMPLE / min(_samples(run, given, least=_WARMING_CALLS))))
        elif order == "turn":
            answer = _samples(run, given, repeats)
        elif before is not None and (after := _memory()) is not None:
            answer = max(0, after["VmHWM"] - before["VmRSS"])
        calls.send((True, answer))


def _samples(run: Run, seconds: float, repeats: int = 1, least: int = 1) -> list[float]:
    """Seconds of one call, sampled for that long; each sample is the mean of some calls."""
    samples: list[float] = []
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    while (
        len(samples) < least
        or (spent := time.perf_counter() - begun) < seconds
        or (len(samples) < _USUAL_SAMPLES and spent < _LONGEST * seconds)
    ):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        samples.append((time.perf_counter() - start) / repeats)
    gc.enable()
    return samples


def _onnx(task: Task) -> Reader:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime
    from safetensors.numpy import load_file

    def read(file: Path) -> Loader:
        inputs = load_file(file)
        return lambda: load(inputs)

    def load(inputs: dict[str, Any]) -> Run:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = task.threads
        options.log_severity_level = 4  # what it refuses, it raises too
        # Threads that spin after a run would take the cores from the artifact whose turn is next.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = devices.onnx_session(task.path, options, task.device)
        batch = _chosen(inputs, [given.name for given in session.get_inputs()])
        return (lambda: session.run(None, batch)) if task.device == "cpu" else bound(session, batch, task.device)

    return read


def bound(session: Any, batch: dict[str, Any], device: Device) -> Run:
    """How to run a session on inputs that lie on a device already, and leave its outputs there.

    So a call of an ONNX file is timed as one of torch is: without the copying of both.
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


def _torch(task: Task) -> Reader:
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
        batch = inputs if task.names is None else _chosen(inputs, task.names)
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
            torch.cuda.synchronize()  # a call on a card returns before it is done
            return results

        return run

    return read


def _chosen(inputs: dict[str, Any], names: Any) -> dict[str, Any]:
    if missing := [name for name in names if name not in inputs]:
        raise LookupError(f"it takes {', '.join(missing)}, and the inputs are {', '.join(inputs)}")
    return {name: inputs[name] for name in names}


def _memory(*, reset_peak: bool = False) -> dict[str, int] | None:
    """Returns the resident memory now and at its peak in bytes, or None if the system is not Linux.

    psutil tells no peak, and that of getrusage cannot be reset.
    """
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
