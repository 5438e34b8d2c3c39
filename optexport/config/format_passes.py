"""Format passes: other ways to write the same graph to a file, some faster in a runtime.

A rule changes the graph, and therefore all files. A format pass changes the file of one format. The fastest choice
depends on the machine, so no pass is on by default.
"""

from __future__ import annotations

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
    """Returns the names of the passes of a format on a device, in the order of application."""
    return tuple(
        format_pass.name
        for format_pass in PASSES
        if file_format in format_pass.formats and (device == "cpu" or not format_pass.cpu_only)
    )
