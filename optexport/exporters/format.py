"""Interface of a file format. Importing this module needs no torch.

A format is a subclass of `Format` in a module that imports torch and its runtime only inside of functions: a config and
``--help`` ask a format for its name and passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar

from optexport.errors import BenchError, ConfigError, DeviceError
from optexport.runtime.devices import Device

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from optexport.exporters.flat_graph import FlatGraph

Run = Callable[[Mapping[str, "torch.Tensor"]], dict[str, "torch.Tensor"]]
ArrayRun = Callable[[Mapping[str, "npt.NDArray[Any]"]], dict[str, "npt.NDArray[Any]"]]
# Opens the file, and returns a call of it.
Loader = Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class FormatPass:
    """A format pass: another way to write the same graph to a file, which may be faster in a runtime.

    A rule changes the graph, and therefore all files. A format pass changes the files of its formats.

    Attributes:
        name: Name in ``[export.passes]``.
        summary: One line of help.
        cpu_only: True if it has no use on other devices than the CPU.
        is_default: True if a file for the CPU gets it when the config names no passes of the format.
        default_flag: Flag that the processor must have for the default, as in /proc/cpuinfo.
        slower_flag: Flag of processors on which it slows down some shapes, so that it is no default in float32.
        default_precisions: Values of ``[precision]`` with which it is a default too.
        min_opset: The first ONNX opset that it can be used with.
    """

    name: str
    summary: str
    cpu_only: bool = False
    is_default: bool = False
    default_flag: str | None = None
    slower_flag: str | None = None
    default_precisions: tuple[str, ...] = ()
    min_opset: int | None = None


@dataclass(frozen=True)
class Benchmark:
    """What a benchmark runs.

    Attributes:
        path: The file.
        inputs: Names of its inputs; None if only the runtime knows them.
        outputs: Names of its outputs; None if only the runtime knows them.
        threads: Number of threads.
        device: Device to run on.
    """

    path: Path
    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None
    threads: int
    device: Device

    def select(self, tensors: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the inputs of the file.

        Args:
            tensors: Inputs by name.
            names: Names of the file's inputs; by default those of the benchmark, or all.

        Raises:
            LookupError: An input is missing.
        """
        names = self.inputs if names is None else names
        if names is None:
            return dict(tensors)
        if missing := [name for name in names if name not in tensors]:
            raise LookupError(f"inputs {', '.join(missing)} are missing (found {', '.join(tensors)})")
        return {name: tensors[name] for name in names}


class Format(ABC):
    """A file format: how graphs are written to files of it, and how its runtime opens them.

    A format has no state: one object serves all graphs. `write` and `open` are all that a format must define.

    Attributes:
        name: Name in configs: lower-case letters and digits, starting with a letter.
        file_name: Name of the file in a bundle. Other programs select the format by its suffix.
        runtime: Name of the runtime in messages.
        passes: Format passes in the order of application. Tuning tries them in this order too, so the ones with the
            largest gains come first.
        devices: Devices that files can be written for.
        packages: Distributions that the format needs besides those of optexport. A manifest records their versions.
        install: Command that installs them.
        is_timed: True if every run times the file for its summary.
    """

    name: ClassVar[str]
    file_name: ClassVar[str]
    runtime: ClassVar[str]
    passes: ClassVar[Sequence[FormatPass]] = ()
    devices: ClassVar[Sequence[Device]] = ("cpu",)
    packages: ClassVar[Sequence[str]] = ()
    install: ClassVar[str] = ""
    is_timed: ClassVar[bool] = True

    @abstractmethod
    def write(self, graph: FlatGraph, path: Path, passes: Sequence[str]) -> str | None:
        """Writes a file. A second call must write the same bytes.

        Args:
            graph: The graph; not changed.
            path: The file to write.
            passes: Names of the format passes to apply, in their order.

        Returns:
            None, or the reason why the file accepts only the shapes of the example.

        Raises:
            ExportError: The format does not support the graph.
        """

    @abstractmethod
    def open(self, path: Path, outputs: Sequence[str], device: Device) -> Run:
        """Opens a file as in production. It may be a stranger's file, so opening it must not run code in it.

        Args:
            path: The file.
            outputs: Names of the outputs, in the order of the graph.
            device: Device that the file was written for.

        Returns:
            A function from the inputs by name to the outputs by name, with all tensors on the CPU. It must compute
            float32 in full precision.

        Raises:
            ExportError: The runtime rejects the file.
            DeviceError: The device is not available.
        """

    def list_openers(self, path: Path, outputs: Sequence[str], device: Device) -> list[tuple[str, Callable[[], Run]]]:
        """Lists the ways to open a file that are compared with the original; by default only `open`.

        Returns:
            The name of each target, which is the format's name, or starts with it and a hyphen, and a function that
            opens the file. The last target is the one for production.
        """
        return [(self.name, partial(self.open, path, outputs, device))]

    def open_for_arrays(
        self, path: Path, outputs: Sequence[str], device: Device, dtypes: Mapping[str, str]
    ) -> ArrayRun:
        """Opens a file for numpy arrays; by default, torch converts them.

        Args:
            path: The file.
            outputs: Names of the outputs.
            device: Device that the file was written for.
            dtypes: Dtypes of the inputs by name. Arrays of bfloat16, which numpy lacks, are float32.

        Raises:
            OptexportError: As for `open`.
        """
        import torch

        opened = self.open(path, outputs, device)

        def run(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
            tensors = {name: torch.from_numpy(array).to(getattr(torch, dtypes[name])) for name, array in inputs.items()}
            return {
                name: (result.float() if result.dtype == torch.bfloat16 else result).numpy()
                for name, result in opened(tensors).items()
            }

        return run

    def prepare_benchmark(self, benchmark: Benchmark) -> Callable[[Path], Loader]:
        """Imports the runtime for a benchmark, in a process of its own or at the end of a run.

        The default times `open` and its result. A format with a faster call should return that call.

        Returns:
            A function that reads a safetensors file of inputs by name. It returns a function that opens the file, which
            is timed, and returns a call of it without arguments, which is timed too.
        """
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(benchmark.threads)

        def read(inputs: Path) -> Loader:
            tensors = benchmark.select(load_file(inputs))
            if benchmark.outputs is None:
                raise LookupError("the outputs of the file are unknown, because it is not in a bundle")
            outputs = benchmark.outputs
            return lambda: partial(self.open(benchmark.path, outputs, benchmark.device), tensors)

        return read

    def list_files(self, name: str) -> tuple[str, ...]:
        """Returns the names of all files that may belong to a model, such as one for its weights.

        Args:
            name: Name of the model's own file, which comes first.
        """
        return (name,)

    def existing_files(self, path: Path) -> list[Path]:
        """Returns those of `list_files` that exist."""
        return [file for name in self.list_files(path.name) if (file := path.with_name(name)).is_file()]

    def check_file(self, path: Path) -> None:  # noqa: B027 - most formats have one file
        """Checks that a stranger's file reads no other files than those of `list_files`, before it is opened.

        Raises:
            BundleError: It reads others, or cannot be parsed.
        """

    def find_size(self, path: Path) -> int:
        """Returns the bytes of a model, with all of its files.

        Raises:
            BenchError: A file cannot be read.
        """
        try:
            return sum(file.stat().st_size for file in {path, *self.existing_files(path)})
        except OSError as error:
            raise BenchError(f"the file cannot be read: {error}", location=str(path)) from error

    def check_installed(self, location: str) -> None:
        """Checks that the packages of the format are installed, without importing them.

        Raises:
            ConfigError: A package is missing.
        """
        if missing := [package for package in self.packages if _find_version(package) is None]:
            raise ConfigError(
                f"the format {self.name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
                "not installed",
                location=location,
                hint=self.install or f"Install it: pip install {' '.join(missing)}",
            )

    def check_device(self, device: Device, location: str) -> None:
        """Checks that files of the format can run on a device here.

        Raises:
            DeviceError: They cannot.
        """
        if device not in self.devices:
            raise DeviceError(
                f"the format {self.name} does not support the device {device}",
                location=location,
                hint=f'Leave "{self.name}" out of export.formats, or remove model.device.',
            )

    @property
    def suffix(self) -> str:
        """Suffix of the files."""
        return PurePath(self.file_name).suffix

    def list_passes(self, device: Device = "cpu") -> tuple[str, ...]:
        """Returns the names of the passes for a device, in the order of application."""
        return tuple(entry.name for entry in self.passes if device == "cpu" or not entry.cpu_only)

    def default_passes(
        self, flags: Collection[str], opset: int | None = None, precision: str | None = None
    ) -> list[str]:
        """Returns the passes that a file for the CPU gets by default.

        Args:
            flags: The flags of the processor.
            opset: The requested opset of an ONNX file.
            precision: The requested value of ``[precision]``.
        """
        return [
            entry.name
            for entry in self.passes
            if entry.is_default
            and (precision is None or precision in entry.default_precisions)
            and (entry.default_flag is None or entry.default_flag in flags)
            and (precision is not None or entry.slower_flag not in flags)
            and (entry.min_opset is None or opset is None or opset >= entry.min_opset)
        ]

    def versions(self) -> dict[str, str]:
        """Returns the versions of the format's own packages."""
        return {package: version for package in self.packages if (version := _find_version(package)) is not None}


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
