"""Compares the speed of default or tuned files with the files of other exporters.

    python -m tests.benchmarks.peer_turns [MODEL...] [--folder FOLDER] [--budget 10m] [--rounds 10] [--threads 1]
    python -m tests.benchmarks.peer_turns [MODEL...] --default      # the files of a run without tuning

The peers are installed into separate environments. All files of one format run in the same runtime, in this
environment, in turns, like in `optexport bench`; inputs have no padding. Files and times from an earlier run stay in
the folder, so that an interrupted comparison can continue.

The table gives the speed-up of our file over each peer (peer's time / ours, median and 95 % interval). The
summary gives the geometric mean over the single peer that is fastest overall.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from optexport._utils.platform import machine
from optexport.bench.artifact import Artifact, file_size
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.bundle.outcomes import LEAST_ROUNDS
from optexport.pipeline.run import run
from tests.benchmarks.models import RACERS, Racer, install_packages
from tests.benchmarks.peers import PEERS, Failed

_OURS = "optexport"
_INPUTS = {
    "text": ("", "batch = [1, 16]\nsequence = [2, 512]"),
    "image": ('[inputs.tensors.{name}]\nshape = ["batch", 3, 224, 224]\n', "batch = [1, 16]"),
    "sound": ('[inputs.tensors.{name}]\nshape = ["batch", 80, 3000]\n', "batch = [1, 4]"),
}


def ours(name: str, source: Path | None, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the files of a run by format: path, names of inputs, and the choice of tuning."""
    path_of_record = folder / ("default.json" if arguments.default else "ours.json")
    if not path_of_record.exists():
        racer = RACERS[name]
        config = folder / "config.toml"
        config.write_text(_config(racer, source, arguments), encoding="utf-8")
        result = run(config)
        chosen = dict.fromkeys(result.files, "default") | {o.format: o.chosen.change for o in result.tuned}
        inputs = [spec.name for spec in result.manifest.inputs]
        records = {
            key: {"path": str(path), "inputs": inputs, "chosen": chosen[key]} for key, path in result.files.items()
        }
        path_of_record.write_text(json.dumps(records, indent=1))
    stored: dict[str, dict[str, Any]] = json.loads(path_of_record.read_text())
    return stored


def _config(racer: Racer, source: Path | None, arguments: argparse.Namespace) -> str:
    inputs, dynamic = _INPUTS[racer.kind]
    if source is not None:
        model = f'source = "{source}"\ntask = "{racer.task}"'
        inputs = ""
    else:
        assert racer.make is not None
        model = f'source = "python:tests.benchmarks.models:{racer.make.__name__}"'
        inputs = inputs.format(name=next(iter(racer.inputs(racer.shapes[0]))))
    shapes = ", ".join(
        "{ " + ", ".join(f"{key} = {size}" for key, size in _sizes(shape).items()) + " }" for shape in racer.shapes
    )
    tuning = f"""\
[bench]
shapes = [{shapes}]
threads = {arguments.threads}
rounds = {max(LEAST_ROUNDS, arguments.rounds)}

[tune]
budget = "{arguments.budget}"
"""
    return f"""\
[model]
{model}

{inputs}
[inputs.dynamic]
{dynamic}

[export]
formats = ["onnx", "torchscript"]
output = "{"default" if arguments.default else "ours"}"

[parity]
effort = "{arguments.effort}"

[tracking]
enabled = false

{"" if arguments.default else tuning}"""


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(("batch", "sequence"), shape, strict=False))


def raced(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of one model: choices of tuning, peers that failed with reasons, and every ratio."""
    racer = RACERS[name]
    source = racer.folder(folder / "model")
    files = ours(name, source, folder, arguments)
    failures: dict[str, str] = {}
    ratios = []
    workloads = [_workload(racer, shape, folder) for shape in arguments.shapes or racer.shapes]
    for file_format, own in files.items():
        artifacts = [_artifact(_OURS, file_format, Path(own["path"]), own["inputs"])]
        for peer in (key for key, peer in PEERS.items() if peer.format == file_format):
            try:
                path = PEERS[peer].make(peer, name, source, folder.parent / "environments", folder / peer)
            except (Failed, subprocess.TimeoutExpired) as failure:
                failures[peer] = str(failure)
                continue
            inputs = None if file_format == "onnx" else list(racer.inputs(racer.shapes[0]))
            artifacts.append(_artifact(peer, file_format, path, inputs))
        pairs = [(artifacts[0], peer) for peer in artifacts[1:]]
        report = measure(artifacts, workloads, pairs, Settings(arguments.threads, arguments.rounds))
        times = {(figure.artifact.name, figure.workload.label): figure.p50 for figure in report.figures}
        for pair in report.comparisons:
            c, label = pair.comparison, pair.workload.label
            ratios.append(
                {
                    "format": file_format,
                    "shape": label,
                    "peer": pair.baseline.name,
                    "speedup": c.speedup,
                    "low": c.low,
                    "high": c.high,
                    "ms": times[_OURS, label] * 1e3,
                }
            )
    return {"chosen": {key: own["chosen"] for key, own in files.items()}, "failures": failures, "ratios": ratios}


def _workload(racer: Racer, shape: tuple[int, ...], folder: Path) -> Workload:
    file = folder / f"{'x'.join(map(str, shape))}.safetensors"
    inputs = racer.inputs(shape)
    if racer.kind == "text":  # those that some exporters turn into inputs
        ids = inputs["input_ids"]
        positions = ids.new_ones(ids.shape).cumsum(1) - 1
        inputs = {**inputs, "token_type_ids": ids.new_zeros(ids.shape), "position_ids": positions}
    save_file(inputs, file)
    return Workload(_sizes(shape), shape[0], file)


def _artifact(name: str, file_format: str, path: Path, inputs: list[str] | None) -> Artifact:
    return Artifact(
        name, path, file_format, file_size(path, file_format), inputs=None if inputs is None else tuple(inputs)
    )


def rows(name: str, race: dict[str, Any]) -> Iterator[str]:
    """Returns the rows of the table for one model: against the fastest peer of each shape, and against all."""
    by_place: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for ratio in race["ratios"]:
        by_place[ratio["format"], ratio["shape"]].append(ratio)
    for (file_format, shape), ratios in by_place.items():
        ratios.sort(key=lambda ratio: ratio["speedup"])
        cells = [f"{r['peer']} {r['speedup']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for r in ratios]
        label = shape.replace("batch=", "").replace(",sequence=", "x")
        yield f"| {name} | {file_format} | {label} | {ratios[0]['ms']:.1f} | {cells[0]} | {'; '.join(cells[1:])} |"


def summary(races: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Returns the geometric mean over the best single peer, and how often no peer is faster, over all models."""
    for file_format in ("onnx", "torchscript"):
        by_peer: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
        places: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for name, model in races.items():
            for ratio in model["ratios"]:
                if ratio["format"] == file_format:
                    by_peer[ratio["peer"]][name, ratio["shape"]] = ratio["speedup"]
                    places[name, ratio["shape"]].append(ratio)
        if not places:
            continue
        for peer, ratios in sorted(by_peer.items()):
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            yield f"{file_format}: {mean:.2f} times as fast as {peer}, over {len(ratios)} of {len(places)} places"
        smallest = [min(ratios, key=lambda ratio: ratio["speedup"]) for ratios in places.values()]
        mean = math.exp(statistics.fmean(math.log(ratio["speedup"]) for ratio in smallest))
        not_slower = sum(all(ratio["low"] >= 0.97 for ratio in ratios) for ratios in places.values())
        yield (
            f"{file_format}: {mean:.2f} times as fast as the fastest peer of each place; "
            f"no interval under 0.97 at {not_slower} of {len(places)} places"
        )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(RACERS), metavar="MODEL", help=", ".join(RACERS))
    parser.add_argument("--folder", type=Path, default=Path("build/race"))
    parser.add_argument("--default", action="store_true", help="compare the files of a run without tuning")
    parser.add_argument("--budget", default="10m", help="of tuning, for each model")
    parser.add_argument("--effort", default="standard", help="parity.effort of the tuned runs")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="BxS", help="other shapes to measure, as 3x37")
    parser.add_argument("--fresh", action="store_true", help="measure again; the files are kept")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - set(RACERS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; known are {', '.join(RACERS)}")
    folder = arguments.folder.resolve()
    packages = install_packages(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    for peer in PEERS.values():
        peer.install(folder / "environments")
    races = {}
    for name in arguments.models:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"raced-{arguments.threads}{'-default' if arguments.default else ''}.json"
        if arguments.fresh or not path.exists():
            start = time.monotonic()
            path.write_text(json.dumps(raced(name, place, arguments), indent=1))
            print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        races[name] = json.loads(path.read_text())
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s), {arguments.rounds} rounds\n")
    print("| model | file | shape | ms | fastest peer / ours (95 % interval) | others |\n|---|---|---|---|---|---|")
    for name, model in races.items():
        for row in rows(name, model):
            print(row)
    print()
    for name, model in races.items():
        print(f"{name}: chosen {model['chosen']}; without a file: {model['failures'] or 'no peer'}")
    print()
    for line in summary(races):
        print(line)


if __name__ == "__main__":
    main()
