"""Lowers the precision of tuning's candidates, with one choice of layers for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from torch import fx

from optexport.job import Job
from optexport.parity.checker import GRAPH, ParityChecker
from optexport.parity.reference import Call
from optexport.quantization.half import HalfCaster
from optexport.quantization.int8 import Quantizer
from optexport.quantization.sensitivity import Choice, LayerChoices, find_layers
from optexport.transformations.apply import Applied


class CandidateLowering:
    """Lowers candidates to the precision of their format.

    The first candidate of a precision, which is the configured one, decides which layers stay in float32. Candidates
    compute the same, so the same layers are sensitive in all of them, and a search for each would take most of the
    budget. A choice that does not suit a candidate fails its check.

    Args:
        job: The run.
        call: Runs a graph on a batch and names its outputs.
        checker: Checker with the reference and the gates.
        choices: Choices of the run. The export of the same graph or file reuses them.
    """

    def __init__(self, job: Job, call: Call, checker: ParityChecker, choices: LayerChoices) -> None:
        self._job, self._call, self._checker, self._choices = job, call, checker, choices
        self._float32_units: dict[str, list[str]] = {}
        self._search_seconds: dict[str, float] = {}

    def layer_search_seconds(self, precision: str) -> float:
        """Returns the seconds of the search for the layers that stay in float32, 0 before the first candidate."""
        return self._search_seconds.get(precision, 0.0)

    def cast_graph(self, graph_module: fx.GraphModule, precision: str) -> tuple[fx.GraphModule, Applied]:
        """Returns a copy of a graph in half precision, and the applied rule."""
        caster = HalfCaster(graph_module, precision)

        def choose() -> Choice:
            return caster.choose_layers(f"lowered {GRAPH}", self._job, self._call, self._checker, self._choices)

        return caster.cast(self._find_float32_layers(precision, caster.layers, choose))

    def quantize_file(self, source: Path, target: Path, precision: str, graph_module: fx.GraphModule) -> None:
        """Writes an ONNX file in lower precision. Temporary files are written to the folder of the source."""
        quantizer = Quantizer(source, precision, self._job.weight_bits, self._checker)

        def choose() -> Choice:
            return quantizer.choose_layers(self._job, graph_module, self._choices)

        quantizer.write(self._find_float32_layers(precision, quantizer.layers, choose), target)

    def _find_float32_layers(
        self, precision: str, layers: Collection[str], choose: Callable[[], Choice]
    ) -> Collection[str]:
        if precision not in self._float32_units:
            start = time.monotonic()
            self._float32_units[precision] = choose().float32_units
            self._search_seconds[precision] = time.monotonic() - start
        return find_layers(self._float32_units[precision], layers)
