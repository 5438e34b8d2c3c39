"""Times the exported files on an NVIDIA GPU, next to other ways to run the same model.

    python -m tests.gpu.speed FOLDER [MODEL...] [--rounds 4] [--device cuda]

Each model is exported for the device, which includes its checks there. Then all callables take turns in this process,
in float32 without TF32. Inputs and outputs stay on the device, and every call is synchronized. The table goes to
FOLDER/speed.md as well. `--device cpu` tries the script itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import onnxruntime
import torch
from torch import nn

from optexport import Dim, export
from optexport.runtime import devices, onnx_session
from optexport.runtime.devices import Device
from optexport.runtime.untrusted import archives
from tests.benchmarks.models import RACERS, Racer
from tests.benchmarks.peers import export_with_torch, traced_shape
from tests.benchmarks.turns import in_turns

# Models that need no package, with the shapes to measure: small calls, where launching kernels takes most of the time,
# and large ones.
SHAPES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "BERT-classifier": ((1, 128), (32, 128)),
    "ViT-base": ((1,), (32,)),
    "Llama-prefill": ((1, 256), (16, 256)),
    "Whisper-encoder": ((1,), (8,)),
}
# These take less than 5 minutes together.
_DEFAULT = ["BERT-classifier", "ViT-base"]
_OURS = "optexport"

Call = Callable[..., Any]


def time_model(name: str, folder: Path, rounds: int, device: Device) -> list[str]:
    """Exports a model, times all callables, and returns the rows of its table."""
    racer = RACERS[name]
    calls, sessions = torch_calls(racer, folder, device)
    rows = []
    for shape in SHAPES[name]:
        batch = racer.inputs(shape)
        moved = {key: tensor.to(device) for key, tensor in batch.items()}
        ready: dict[str, Call] = {key: partial(_synchronized, call, moved, device) for key, call in calls.items()}
        arrays = {key: tensor.numpy() for key, tensor in batch.items()}
        for key, session in sessions.items():
            inputs = {node.name: arrays[node.name] for node in session.get_inputs()}
            ready[key] = onnx_session.bind_session(session, inputs, device)
        times = in_turns(ready, rounds)
        for key, seconds in times.items():
            ratios = [eager / own for eager, own in zip(times["eager"], seconds, strict=True)]
            text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append(
                f"| {name} | {'x'.join(map(str, shape))} | {key} | {1e3 * statistics.median(seconds):.2f} | {text} |"
            )
    return rows


def torch_calls(racer: Racer, folder: Path, device: Device) -> tuple[dict[str, Call], dict[str, Any]]:
    """Returns the callables that take tensors, and the sessions of ONNX Runtime."""
    has_onnx = device == "cpu" or devices.CUDA_PROVIDER in onnxruntime.get_available_providers()
    model = racer.load()
    example = racer.inputs(traced_shape(racer))
    axes = {0: Dim("batch", 1, 64)} | ({1: Dim("sequence", 2, 512)} if racer.kind == "text" else {})
    formats = ("torchscript", "pt2", *(["onnx"] if has_onnx else []))
    result = export(
        model, example, folder / "ours", formats=formats, device=device, dynamic=dict.fromkeys(example, axes)
    )
    print(result.summary(), flush=True)
    sessions = {}
    if has_onnx:
        plain = folder / "torch.onnx" / "model.onnx"
        plain.parent.mkdir(parents=True, exist_ok=True)
        export_with_torch(racer, racer.load(), plain)
        for key, path in {f"{_OURS} onnx": result.files["onnx"], "torch.onnx": plain}.items():
            sessions[key] = onnx_session.open_session(path, onnxruntime.SessionOptions(), device)
    moved: nn.Module = model.to(device)
    inputs = {key: tensor.to(device) for key, tensor in example.items()}
    calls: dict[str, Call] = {
        "eager": moved,
        "torch.compile": torch.compile(moved, dynamic=True),
        "jit.trace + freeze": torch.jit.freeze(torch.jit.trace(moved, example_kwarg_inputs=inputs, strict=False)),
        f"{_OURS} torchscript": archives.load_torchscript(result.files["torchscript"]),
        f"{_OURS} pt2": archives.pt2_module(result.files["pt2"]),
    }
    return calls, sessions


def _synchronized(call: Call, inputs: Mapping[str, torch.Tensor], device: Device) -> object:
    result = call(**inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", default=_DEFAULT, metavar="MODEL", help=", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", choices=get_args(Device), default="cuda")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{devices.describe(arguments.device)}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}",
        "",
        "| model | shape | run by | ms | eager / this (range of rounds) |",
        "|---|---|---|---|---|",
    ]
    # The older setting, because torch.export and torch.compile read it, and fail if only the newer ones are set.
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        for name in arguments.models:
            lines += time_model(name, arguments.folder / name, arguments.rounds, arguments.device)
            (arguments.folder / "speed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()
    print("\n".join(lines))


if __name__ == "__main__":
    main()
