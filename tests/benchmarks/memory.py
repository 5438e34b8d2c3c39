"""Measures the peak memory of every step of a run, as multiples of the model's weights.

    python -m tests.benchmarks.memory [--size 100M] [--dtype float32] [--formats onnx,pt2] [--noise-multiple 4]

A decoder like Llama with random weights is saved as safetensors. `optexport run` exports it in a separate process,
without MLflow, with sequences of up to 32 tokens. Its resident memory is sampled every 10 ms. Anonymous memory belongs
to the process alone. File-backed memory is code and mapped weights, which the system can reclaim. The memory of a
process with only the same imports is subtracted from both. The last row is the system's peak (`VmHWM`, which
`/usr/bin/time -v` prints as maximum resident set size), without the peak of the imports. A run is killed when less
than 2 GiB of the machine's memory are free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from optexport._utils.platform import machine

# In one process, so that each step has its own time and memory.
PROGRAM = """
from optexport._utils import forked
from optexport.cli.main import main
forked.is_useful = lambda: False
main()
"""
# The imports of a run; the program prints its memory afterwards.
IMPORTS = """
import gc, optexport.cli, optexport.pipeline, onnxscript, transformers.models.llama.modeling_llama
import torch.onnx._internal.exporter._core
print(open("/proc/self/status").read())
"""
# Hidden size, layers, heads, heads of keys and values, inner size and vocabulary; True if head and embedding are tied.
SIZES = {
    "100M": (768, 12, 12, 4, 2048, 8000, False),
    "300M": (2048, 4, 32, 4, 5632, 32000, False),
    "1.1B": (2048, 22, 32, 4, 5632, 32000, False),
    "2B": (2560, 24, 20, 4, 8704, 32000, False),
    "3B": (3072, 28, 24, 8, 8192, 128256, True),
}
MAKE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
hidden, layers, heads, key_heads, inner, vocabulary, tied = {size}
torch.manual_seed(0)
config = LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, vocab_size=vocabulary,
    num_key_value_heads=key_heads, intermediate_size=inner, tie_word_embeddings=tied, max_position_embeddings=2048)
torch.set_default_dtype(torch.{dtype})
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
CONFIG = """
[model]
source = "{model}"
task = "text-generation"
dtype = "{dtype}"
[inputs.dynamic]
batch = [1, 4]
sequence = [2, 32]
[export]
formats = {formats}
output = "{output}"
[parity]
effort = "{effort}"
noise_multiple = {multiple}
[tracking]
enabled = false
"""
LEAST_FREE = 2 << 30
GIB = 1 << 30


def bytes_of(text: str, *keys: str) -> tuple[int, ...]:
    """Returns values of a file in /proc in bytes; the file has kB."""
    values = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M))
    return tuple(1024 * int(values[key]) for key in keys)


class Watch:
    """Runs a Python program and samples its memory until it ends.

    Attributes:
        peaks: For each step whose end it printed: seconds, and anonymous and file-backed memory at the largest sum.
        cpu_seconds: CPU seconds of each of these steps, of all threads.
        peak: Largest resident memory.
    """

    def __init__(self, arguments: Sequence[str], threads: int) -> None:
        self.peaks: dict[str, tuple[float, int, int]] = {}
        self.cpu_seconds: dict[str, float] = {}
        self.peak = 0
        self._current, self._said = (0, 0), list[str]()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPTEXPORT_CACHE": ""}
        command = [sys.executable, "-c", *arguments]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        ) as process:
            reader = threading.Thread(target=self._read, args=[process])
            reader.start()
            self._sample(process)
            reader.join()
        if process.returncode:
            raise SystemExit(f"{''.join(self._said)}exit code {process.returncode}, {self.peaks}")

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        before = 0.0
        for line in process.stderr:
            self._said.append(line)
            if match := re.fullmatch(r"\s*\d+(?:/\d+)? (.+?) +([\d.]+) s\n", line):
                self.peaks[match[1]], self._current = (float(match[2]), *self._current), (0, 0)
                with contextlib.suppress(psutil.NoSuchProcess):  # after the last step
                    times = psutil.Process(process.pid).cpu_times()
                    self.cpu_seconds[match[1]] = times.user + times.system - before
                    before = times.user + times.system

    def _sample(self, process: subprocess.Popen[str]) -> None:
        status, machine_ = Path(f"/proc/{process.pid}/status"), Path("/proc/meminfo")
        while process.poll() is None:
            text = status.read_text(encoding="ascii")
            if "RssAnon" in text:  # a finished process has no such line
                *now, self.peak = bytes_of(text, "RssAnon", "RssFile", "VmHWM")
                self._current = max(self._current, tuple(now), key=sum)
            if bytes_of(machine_.read_text(encoding="ascii"), "MemAvailable")[0] < LEAST_FREE:
                process.kill()
                self._said.append(f"ended: less than {LEAST_FREE >> 30} GiB of memory were free\n")
            time.sleep(0.01)


def run(program: str, *arguments: str) -> str:
    """Returns the output of a Python program."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--formats", default="onnx,torchscript,pt2")
    parser.add_argument("--effort", choices=("quick", "standard"), default="quick")
    parser.add_argument("--noise-multiple", type=float, default=4.0, help="parity.noise_multiple")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where a folder for the model and the bundle is made for the time")
    arguments = parser.parse_args()
    *imports, imported = bytes_of(run(IMPORTS), "RssAnon", "RssFile", "VmHWM")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        run(MAKE.format(size=SIZES[arguments.size], dtype=arguments.dtype), str(folder / "model"))
        weights = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        values = {
            "model": folder / "model",
            "dtype": arguments.dtype,
            "formats": json.dumps(arguments.formats.split(",")),
            "output": folder / "bundle",
            "effort": arguments.effort,
            "multiple": arguments.noise_multiple,
        }
        (folder / "config.toml").write_text(CONFIG.format(**values), encoding="utf-8")
        watch = Watch([PROGRAM, "run", str(folder / "config.toml")], arguments.threads)
    about = machine()
    print(f"{about['processor']} ({about['cpus']} cores), {arguments.threads} thread(s); {arguments.size} in "
          f"{arguments.dtype}, {arguments.formats}, {arguments.effort}: {weights / GIB:.2f} GiB of weights, "
          f"{imported / GIB:.2f} GiB of imports\n")  # fmt: skip
    print("| step | seconds | peak, times the weights | anonymous | backed by files |\n|---|---|---|---|---|")
    for step, (seconds, *memory) in watch.peaks.items():
        anonymous, file = ((part - base) / weights for part, base in zip(memory, imports, strict=True))
        print(f"| {step} | {seconds:.1f} | {anonymous + file:.2f} | {anonymous:.2f} | {file:.2f} |")
    print(f"| whole run | | {(watch.peak - imported) / weights:.2f} | | |")


if __name__ == "__main__":
    main()
