"""Measures exported generative models against `model.generate` and onnxruntime-genai, in tokens per second.

    python -m tests.benchmarks.generation FOLDER [--threads N] [--rounds N] [--prompt N] [--new N] [--precision NAME...]

FOLDER gets a Llama with random weights (100 million parameters) and its exports; a second call uses them again.
Prefill is the time to the first token, decode the time of each later one. The three take turns in one process.
onnxruntime-genai takes part if it is installed, with the file that its own builder makes of the same weights.
With --precision, the export in float32 takes turns with exports in lower precision, all of whose layers are lowered.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import optexport
from optexport._utils.platform import machine

# Low, so that no layer returns to float32: the weights are random.
_GATE = {"argmax_agreement": 0.1}

Run = Callable[[np.ndarray[Any, Any], int], None]  # takes a prompt [1, sequence], and how many tokens to add


def make_model(folder: Path) -> LlamaForCausalLM:
    """Returns the model, and writes it if the folder is new."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=8_000, hidden_size=768, intermediate_size=2_048, num_hidden_layers=14, num_attention_heads=12,
            num_key_value_heads=4, max_position_embeddings=2_048, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        LlamaForCausalLM(config).eval().save_pretrained(folder)
        words = Tokenizer(WordLevel({f"word{number}": number for number in range(8_000)}, unk_token="word0"))
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)  # the builder wants one
    return LlamaForCausalLM.from_pretrained(folder).eval()


def eager(model: LlamaForCausalLM) -> Run:
    """Returns greedy generation in eager PyTorch."""

    def run(prompt: np.ndarray[Any, Any], new: int) -> None:
        ids = torch.from_numpy(prompt)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new)

    return run


def exported(model: LlamaForCausalLM, folder: Path, precision: str | None = None) -> Run:
    """Returns greedy generation with the ONNX file of an export."""
    if not folder.is_dir():
        prompt = torch.randint(2, 8_000, (2, 12))
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        lowered: dict[str, Any] = {} if precision is None else {"precision": {"onnx": precision}, "metrics": _GATE}
        optexport.export_generation(model, inputs, folder, formats=["onnx"], new_tokens=16, progress=True, **lowered)
    generator = optexport.Generator.load(folder)

    def run(prompt: np.ndarray[Any, Any], new: int) -> None:
        generator.generate(prompt, max_new_tokens=new, eos_token_id=())

    return run


def describe(folder: Path) -> str:
    """Returns the size of an export's file, and how many tokens a lowered file predicts like the model."""
    tokens = json.loads((folder / "generation.json").read_text())["tokens"]
    size = (folder / "decoder" / "model.onnx").stat().st_size / 1e6
    agreeing, compared = (sum(row[key] or 0 for row in tokens) for key in ("agreeing", "compared"))
    return f"{folder.name}: {size:.0f} MB" + (f", {agreeing} of {compared} tokens agree" if agreeing else "")


def genai(source: Path, folder: Path) -> Run:
    """Returns greedy generation with onnxruntime-genai."""
    import onnxruntime_genai as og

    if not folder.is_dir():
        options = ["-m", str(source), "-o", str(folder), "-p", "fp32", "-e", "cpu"]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *options], check=True)
    model = og.Model(str(folder))

    def run(prompt: np.ndarray[Any, Any], new: int) -> None:
        params = og.GeneratorParams(model)
        length = prompt.shape[1] + new
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = og.Generator(model, params)
        generator.append_tokens(prompt)
        for _ in range(new):
            generator.generate_next_token()

    return run


def spread(base: list[float], own: list[float]) -> str:
    """Returns the median and the range of the ratios of paired times."""
    ratios = [one / other for one, other in zip(base, own, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--precision", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = make_model(arguments.folder / "model")
    runs = {"optexport": exported(model, arguments.folder / "optexport")}
    if arguments.precision:
        runs |= {name: exported(model, arguments.folder / name, name) for name in arguments.precision}
    else:
        runs = {"eager": eager(model), **runs}
    if importlib.util.find_spec("onnxruntime_genai") is not None and not arguments.precision:
        runs["onnxruntime-genai"] = genai(arguments.folder / "model", arguments.folder / "genai")
    prompt = np.random.default_rng(0).integers(2, 8_000, (1, arguments.prompt))
    first: dict[str, list[float]] = {name: [] for name in runs}
    later: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(arguments.rounds + 1):
        for name, run in runs.items():
            times = []
            for new in (1, arguments.new):
                start = time.perf_counter()
                run(prompt, new)
                times.append(time.perf_counter() - start)
            if turn:  # the first turn warms up
                first[name].append(times[0])
                later[name].append((times[1] - times[0]) / (arguments.new - 1))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.0f} million parameters, prompt of {arguments.prompt}, {arguments.new} new tokens,", end=" ")
    print(f"{arguments.threads} threads, {arguments.rounds} rounds. {machine()}")
    base = next(iter(runs))
    print(f"| | prefill, tokens/s | decode, tokens/s | prefill over {base}, median (range) | decode |")
    print("|---|---|---|---|---|")
    for name in runs:
        prefill = arguments.prompt / statistics.median(first[name])
        decode = 1 / statistics.median(later[name])
        spreads = [spread(times[base], times[name]) for times in (first, later)]
        print(f"| {name} | {prefill:.0f} | {decode:.1f} | {' | '.join(spreads)} |")
    for name in ("optexport", *arguments.precision):
        print(describe(arguments.folder / name))


if __name__ == "__main__":
    main()
