"""Format passes: other ways to write the same graph to a file, some faster in a runtime.

A rule changes the graph, and therefore all files. A format pass changes the file of one format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from optexport.runtime.devices import Device


@dataclass(frozen=True)
class FormatPass:
    """A format pass.

    Attributes:
        formats: The formats whose files it changes.
        summary: One line of help.
        cpu_only: Whether it has no use on other devices than the CPU.
    """

    name: str
    formats: tuple[str, ...]
    summary: str
    cpu_only: bool = False


# The first opset with an operator for attention.
ATTENTION_OPSET = 23

# In the order of application, except attention, which is part of the conversion. Tuning tries them in this order
# too, so the passes with the largest measured gains come first.
PASSES = (
    FormatPass(
        "sum-residuals",
        ("onnx",),
        "writes the Add before a LayerNormalization as Sum, so that ONNX Runtime does not fuse the two",
    ),
    FormatPass(
        "split-linears",
        ("onnx",),
        "writes a linear whose result is only cut into parts, as after merge-linears, as one linear for each part",
    ),
    FormatPass("attention", ("onnx",), f"writes attention as one operator; needs opset {ATTENTION_OPSET} or newer"),
    FormatPass(
        "gemm", ("onnx",), "writes a MatMul with a weight and the Add of its bias as one Gemm on a matrix of rows"
    ),
    FormatPass(
        "transformers-fusions",
        ("onnx",),
        "fuses operators into operators of ONNX Runtime, as transformers does for CPUs",
        cpu_only=True,
    ),
    FormatPass(
        "shared-masks",
        ("torchscript", "pt2"),
        "converts a boolean mask of several attentions to numbers once",
        cpu_only=True,
    ),
    FormatPass(
        "onednn-linear",
        ("torchscript", "pt2"),
        "computes linear layers, and a GELU after one, with oneDNN instead of the BLAS library of torch",
        cpu_only=True,
    ),
    FormatPass(
        "channels-last",
        ("torchscript", "pt2"),
        "computes convolutions with oneDNN, on images in channels-last memory format",
        cpu_only=True,
    ),
    FormatPass("freeze", ("torchscript",), "turns the weights into constants of the code (torch.jit.freeze)"),
)

# Flags of processors in /proc/cpuinfo.
AVX512, AMX = "avx512f", "amx_tile"

# The passes of a file if the config names none for its format, each with the flag that the processor must have for it.
# The gains are in docs/explanation/measurements.md. A .pt2 file stays as traced: any device or compiler can use it.
_DEFAULTS: Mapping[str, Mapping[str, str | None]] = {
    "onnx": {"sum-residuals": None, "split-linears": None, "attention": None, "gemm": AMX},
    "torchscript": {"shared-masks": None, "onednn-linear": AVX512, "channels-last": AVX512},
    "pt2": {},
}


def default_passes(file_format: str, flags: Collection[str], opset: int | None = None) -> list[str]:
    """Returns the passes that a file for the CPU gets by default.

    Args:
        flags: The flags of the processor.
        opset: The requested opset of an ONNX file.
    """
    return [
        name
        for name, flag in _DEFAULTS[file_format].items()
        if (flag is None or flag in flags) and (name != "attention" or opset is None or opset >= ATTENTION_OPSET)
    ]


def list_passes(file_format: str, device: Device = "cpu") -> tuple[str, ...]:
    """Returns the names of the passes of a format on a device, in the order of application."""
    return tuple(
        format_pass.name
        for format_pass in PASSES
        if file_format in format_pass.formats and (device == "cpu" or not format_pass.cpu_only)
    )
