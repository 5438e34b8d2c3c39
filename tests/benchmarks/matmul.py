"""Times tuned files and only the matrix products of the model's linear layers.

    python -m tests.benchmarks.matmul [MODEL...] [--folder FOLDER] [--rounds 12] [--threads 1]

The products are computed by `torch.nn.functional.linear`, which calls torch's BLAS, and by oneDNN, on inputs of the
shapes that the layers get. They are computed once more in bfloat16: no file of that precision can gain more on
products. The products and the tuned files, which `peer_turns.py` left in the same folder, take turns in one process,
without padding. Products in attention are not counted, because they have no weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn
from torch.nn import functional

from optexport._utils.platform import machine
from optexport.bench.comparison import compare
from tests.benchmarks.models import RACERS, Racer
from tests.benchmarks.turns import in_turns

_BLAS, _ONEDNN, _BFLOAT16 = "products, BLAS", "products, oneDNN", "products, bfloat16"
Call = Callable[[], object]


def products(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, Call]:
    """Returns functions that compute every product of a call's linear layers, one for each method."""
    layers: list[tuple[torch.Tensor, nn.Linear]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: layers.append((torch.rand_like(args[0]), layer)))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()

    def by_blas() -> None:
        for x, layer in layers:
            functional.linear(x, layer.weight, layer.bias)

    def by_onednn() -> None:
        for x, layer in layers:
            torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")

    short = [[t.bfloat16() for t in (x, layer.weight, layer.bias) if t is not None] for x, layer in layers]

    def in_bfloat16() -> None:
        for operands in short:
            functional.linear(*operands)

    return {_BLAS: by_blas, _ONEDNN: by_onednn, _BFLOAT16: in_bfloat16}


def files(folder: Path, inputs: dict[str, torch.Tensor], threads: int) -> dict[str, Call]:
    """Returns functions that call each tuned file on inputs."""
    records = json.loads((folder / "ours.json").read_text())
    module = torch.jit.load(records["torchscript"]["path"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(records["onnx"]["path"], options, providers=["CPUExecutionProvider"])
    arrays = {name: inputs[name].numpy() for name in records["onnx"]["inputs"]}
    return {"onnx": lambda: session.run(None, arrays), "torchscript": lambda: module(**inputs)}


def measured(racer: Racer, folder: Path, shape: tuple[int, ...], rounds: int, threads: int) -> dict[str, list[float]]:
    """Returns the seconds of a call in every round, by callable."""
    inputs = racer.inputs(shape)
    return in_turns({**products(racer.load(), inputs), **files(folder, inputs, threads)}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["MiniLM"], metavar="MODEL", help=", ".join(RACERS))
    parser.add_argument(
        "--folder", type=Path, default=Path("build/race"), help="folder of peer_turns.py, which must run first"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about: dict[str, Any] = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s)\n")
    print(
        "| model | shape | products, ms: BLAS; oneDNN | onnx / oneDNN | torchscript / oneDNN | oneDNN / in bfloat16 |\n"
        "|---|---|---|---|---|---|"
    )
    for name in arguments.models:
        for shape in RACERS[name].shapes:
            with torch.no_grad():
                times = measured(
                    RACERS[name], arguments.folder.resolve() / name, shape, arguments.rounds, arguments.threads
                )
            pairs = (("onnx", _ONEDNN), ("torchscript", _ONEDNN), (_ONEDNN, _BFLOAT16))
            cells = [compare([times[longer]], [times[shorter]]) for longer, shorter in pairs]
            ratios = " | ".join(f"{c.speedup:.2f} ({c.low:.2f} to {c.high:.2f})" for c in cells)
            alone = "; ".join(f"{statistics.median(times[method]) * 1e3:.1f}" for method in (_BLAS, _ONEDNN))
            print(f"| {name} | {'x'.join(map(str, shape))} | {alone} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
