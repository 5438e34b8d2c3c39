"""Shows the choices of tuning for the example models, and their speed over the plain export.

    python -m tests.benchmarks.tuning [MODEL...] [--format FORMAT...] [--precision PRECISION] [--budget 10m]
        [--rounds 20] [--threads 1]

Each model runs with `[tune]` and an empty cache. The table lists the choice for each file, and the plain export's time
over the file's time with its 95 % interval: in the race, over all shapes, and in a last measurement of each shape. With
--precision, the plain export of the race has that precision too, while that of the last measurement is in float32; the
gate is a smallest cosine of 0.99.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from optexport._utils.platform import machine
from optexport.bundle.outcomes import PYTORCH
from optexport.pipeline.run import run
from optexport.report.result import Result
from optexport.transformations.registry import PRESET
from tests.benchmarks.workloads import EXAMPLES

_TEXT = ("{ batch = 1, sequence = 16 }", "{ batch = 1, sequence = 128 }", "{ batch = 8, sequence = 128 }")
_POOLED = "".join(f'\n[[transformations]]\nuse = "{rule}"\n' for rule in PRESET)
# The config of each model, additional lines for it, and the shapes.
MODELS = {
    "MiniLM": ("minilm.toml", "", _TEXT),
    "MiniLM's pooler_output": (
        "minilm.toml",
        f'\n[[transformations]]\nuse = "keep-outputs"\noutputs = ["pooler_output"]\n{_POOLED}',
        _TEXT,
    ),
    "ALBERT": ("albert.toml", "", _TEXT),
    "MobileNetV2": ("mobilenet.toml", "", ("{ batch = 1 }", "{ batch = 8 }")),
}


def tuned(name: str, folder: Path, arguments: argparse.Namespace) -> Result:
    """Runs a model's config with tuning, in a copy of the examples."""
    config, more, shapes = MODELS[name]
    text = (EXAMPLES / config).read_text(encoding="utf-8")
    formats = ", ".join(f'"{name}"' for name in arguments.format)
    text = text.replace("[export]\n", f"[export]\nformats = [{formats}]\n")
    text = text.replace("[tracking]\n", "[tracking]\nenabled = false\n")
    bench = (
        f"enabled = true\nshapes = [{', '.join(shapes)}]\nthreads = {arguments.threads}\nrounds = {arguments.rounds}"
    )
    if arguments.precision is not None:
        precisions = "".join(f'{name} = "{arguments.precision}"\n' for name in arguments.format)
        more += f"\n[precision]\n{precisions}\n[parity.metrics]\ncosine = 0.99\n"
    path = folder / f"tuned-{config}"
    path.write_text(f'{text}{more}\n[bench]\n{bench}\n\n[tune]\nbudget = "{arguments.budget}"\n', encoding="utf-8")
    return run(path)


def rows(name: str, result: Result) -> list[str]:
    """Returns one row of the table for each format."""
    assert result.bench is not None
    lines = []
    for outcome in result.tuned:
        shapes = [
            f"{d.workload.label.replace('batch=', '').replace(',sequence=', 'x')}: "
            f"{d.comparison.speedup:.2f} ({d.comparison.low:.2f} to {d.comparison.high:.2f})"
            for d in result.bench.comparisons
            if d.artifact.format == outcome.format and d.baseline.name != PYTORCH
        ]
        race = outcome.over_plain
        raced = "not compared" if race is None else f"{race.speedup:.2f} ({race.low:.2f} to {race.high:.2f})"
        lines.append(f"| {name} | {outcome.format} | {outcome.chosen.change} | {raced} | {'; '.join(shapes)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--format", action="append", choices=["onnx", "torchscript", "pt2"])
    parser.add_argument("--precision", help="of all formats, such as int8-rows; by default float32")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    arguments.format = arguments.format or ["onnx", "torchscript"]
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"there is no {', '.join(unknown)}; known are {', '.join(MODELS)}")
    os.environ["OPTEXPORT_CACHE"] = ""
    print(f"{machine()}, {arguments.threads} threads, {arguments.rounds} rounds, budget {arguments.budget} a model\n")
    print("| model | file | chosen | plain / tuned, race | plain / tuned (95 % interval) |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "examples"
        shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("build", "mlartifacts", "*.db"))
        for name in arguments.models:
            for row in rows(name, tuned(name, folder, arguments)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
