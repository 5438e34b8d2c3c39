"""File formats: writes traced graphs to files that run without optexport, and opens them.

`Format` is what a package subclasses to add a format.
"""

from optexport.exporters.format import Benchmark, Format, FormatPass
from optexport.exporters.registry import get_format

__all__ = ["Benchmark", "Format", "FormatPass", "get_format"]
