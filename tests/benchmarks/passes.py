"""Measures each format pass: the speed of a file with it over the same file without any.

    python -m tests.benchmarks.passes [--threads N] [--rounds N] [--format FORMAT] [NAME ...]

The graphs are those after the preset, and the files are measured like in `optexport bench`. The table gives the median
of the ratio plain / with pass (above 1: the pass makes the file faster) and its 95 % interval. A pass that does not
change a file is skipped. This benchmark verifies no file; `tests/exporters/test_passes.py` does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import onnxruntime
import torch
from safetensors.torch import save_file
from torch import nn

from optexport import Dim
from optexport._utils.platform import machine, processor_flags
from optexport.bench.artifact import Artifact
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.exporters import pt2, registry, torchscript
from optexport.signature.signature import Dynamic
from tests.benchmarks import models, workloads
from tests.exporters import files

FORMATS = ("onnx", "torchscript", "pt2")
_IMAGE: Dynamic = {"x": {0: Dim("batch", 1, 16)}}
_Model = tuple[Callable[[], nn.Module], Callable[..., workloads.Batch], Dynamic, Sequence[tuple[int, ...]]]
MODELS: dict[str, _Model] = {
    "MiniLM": (workloads._minilm, workloads._text, workloads._TEXT, ((1, 8), (1, 16), (1, 128), (8, 128))),
    "ALBERT": (workloads._albert, workloads._text, workloads._TEXT, ((1, 16), (1, 128), (8, 128))),
    "MobileNetV2": (workloads._mobilenet, workloads._image, _IMAGE, ((1,), (8,))),
    **{
        name: (
            models.RACERS[name].load,
            partial(workloads._image, name="pixel_values"),
            workloads._PIXELS,
            models.RACERS[name].shapes,
        )
        for name in ("ResNet-50", "ConvNeXt-tiny")
    },
}


def write(subject: files.Prepared, file_format: str, names: Sequence[str], folder: Path) -> Artifact:
    """Writes a file with some format passes."""
    title = " + ".join(names) or "plain"
    path = folder / title.replace(" ", "") / f"model.{file_format}"  # TorchScript writes the name into the file
    path.parent.mkdir(exist_ok=True)
    if file_format == "onnx":
        files.save_onnx(subject, path, passes=names)
    elif file_format == "torchscript":
        torchscript.save(subject.program, subject.signature, subject.example, path, passes=names)
    else:
        pt2.save(subject.program, path, passes=names)
    inputs = tuple(spec.name for spec in subject.signature.inputs)
    return Artifact(title, path, file_format, path.stat().st_size, inputs=inputs)


def race(model: str, formats: Sequence[str], folder: Path, settings: Settings) -> Iterator[str]:
    """Returns the rows of the table for one model."""
    make, batch, dynamic, shapes = MODELS[model]
    subject = files.prepare(make().eval(), batch(*[size + 1 for size in shapes[0]]), dynamic, rules=True)
    loads = []
    for shape in shapes:
        label = "x".join(map(str, shape))
        save_file(batch(*shape), folder / f"{label}.safetensors")
        loads.append(Workload({label: shape[0]}, shape[0], folder / f"{label}.safetensors"))
    for file_format in formats:
        names = registry.list_passes(file_format)
        plain = write(subject, file_format, (), folder)
        default = tuple(registry.default_passes(file_format, processor_flags()))
        combinations = dict.fromkeys([*((name,) for name in names), default, names])
        # The first of equal files.
        written = {plain.path.read_bytes(): plain}
        for some in combinations:
            artifact = write(subject, file_format, some, folder)
            written.setdefault(artifact.path.read_bytes(), artifact)
        _, *raced = written.values()
        report = measure([plain, *raced], loads, [(artifact, plain) for artifact in raced], settings)
        for artifact in raced:
            comparisons = [pair.comparison for pair in report.comparisons if pair.artifact == artifact]
            cells = [
                f"{next(iter(load.sizes))}: {c.speedup:.2f} ({c.low:.2f} to {c.high:.2f})"
                for load, c in zip(loads, comparisons, strict=True)
            ]
            yield f"| {model} | {file_format} | {artifact.name} | {'; '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--format", action="append", choices=FORMATS, help="all unless given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s), {arguments.rounds} rounds, "
          f"ONNX Runtime {onnxruntime.__version__}, torch {torch.__version__}\n")  # fmt: skip
    print("| model | file | lowering | plain / lowered, by shape (95 % interval) |\n|---|---|---|---|")
    for model in arguments.names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            for row in race(
                model, arguments.format or FORMATS, Path(folder), Settings(arguments.threads, arguments.rounds)
            ):
                print(row, flush=True)


if __name__ == "__main__":
    main()
