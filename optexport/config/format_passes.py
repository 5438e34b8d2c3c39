"""Ways to write one graph to a file that compute the same, of which a runtime runs some faster.

A rule changes the graph, and with it every file; a lowering changes how one format's file says it. Which is faster
depends on the machine, so none is applied unless it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from optexport.runtime.devices import Device


@dataclass(frozen=True)
class FormatPass:
    """One of the ways.

    Attributes:
        formats: Those whose files it changes.
        summary: What it does, in a line.
        cpu_only: Whether it is made for the CPU, and does nothing for another device, or nothing good.
    """

    name: str
    formats: tuple[str, ...]
    summary: str
    cpu_only: bool = False


# The first that has an operator for attention.
ATTENTION_OPSET = 23

# In the order in which they are applied, but for attention, which is a matter of the conversion. Tuning tries them so,
# too: those first that were seen to give most, should there be no time for all.
PASSES = (
    FormatPass(
        "sum-residuals",
        ("onnx",),
        "writes the Add before a LayerNormalization as Sum, which ONNX Runtime does not make SkipLayerNormalization of",
    ),
    FormatPass("attention", ("onnx",), f"writes attention as the one operator that opset {ATTENTION_OPSET} has for it"),
    FormatPass(
        "gemm", ("onnx",), "writes a MatMul by a weight and the Add of its bias as one Gemm on a matrix of rows"
    ),
    FormatPass(
        "transformers-fusions",
        ("onnx",),
        "fuses operators into ONNX Runtime's own, as transformers does for a CPU",
        cpu_only=True,
    ),
    FormatPass(
        "onednn-linear",
        ("torchscript", "pt2"),
        "computes linear layers, and a GELU after one, by oneDNN in place of the BLAS that torch is built with",
        cpu_only=True,
    ),
    FormatPass(
        "channels-last",
        ("torchscript", "pt2"),
        "computes convolutions of images by oneDNN, on images whose channels lie last in memory",
        cpu_only=True,
    ),
    FormatPass("freeze", ("torchscript",), "makes the weights constants of the code, by torch.jit.freeze"),
)


def of_format(file_format: str, device: Device = "cpu") -> tuple[str, ...]:
    """The names of those that change a format's file for a device, in the order in which they are applied."""
    return tuple(
        format_pass.name
        for format_pass in PASSES
        if file_format in format_pass.formats and (device == "cpu" or not format_pass.cpu_only)
    )
