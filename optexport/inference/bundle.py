"""A bundle as a callable: its file in its runtime, with its tokenizer or processor.

Does not need the original model, its code or its weights. An ONNX file needs only numpy and ONNX Runtime, and
transformers to preprocess texts, images or sounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optexport._utils import notebook
from optexport._utils.paths import as_path
from optexport._utils.platform import is_of_memory
from optexport.bundle.digests import read_manifest
from optexport.bundle.manifest import ApplicationRecord, ArtifactRecord, Manifest
from optexport.errors import (
    BundleError,
    ConfigError,
    DeviceError,
    ExportError,
    OptexportError,
    did_you_mean,
    first_line,
    printable,
)
from optexport.exporters.format import ArrayRun
from optexport.exporters.registry import get_format
from optexport.inference import predictions
from optexport.inference.answers import Answer
from optexport.inference.arrays import Arrays, as_input, constant_error, describe_inputs, is_constant
from optexport.inference.preprocessing import Preprocessing


class Bundle:
    """A loaded bundle, see `Bundle.load`; call it with inputs by name.

    Attributes:
        manifest: The bundle's manifest.
        format: The format of the loaded file.
    """

    def __init__(self, folder: Path, manifest: Manifest, artifact: ArtifactRecord, run: ArrayRun) -> None:
        self.manifest = manifest
        self.format: str = artifact.format
        self._folder, self._artifact, self._run = folder, artifact, run
        self.preprocessing = Preprocessing(folder, manifest)

    @classmethod
    def load(cls, path: str | os.PathLike[str], format: str | None = None) -> Bundle:  # noqa: A002 - as in the config
        """Opens a bundle, after checking that it is complete and unchanged.

        Args:
            path: The bundle's folder.
            format: A format such as "onnx" or "pt2"; by default ONNX, or else the first format of the bundle.

        Raises:
            ConfigError: The folder is not a bundle, or has no file in that format.
            BundleError: A file is missing, added, changed, or cannot be loaded.
            DeviceError: This machine does not have the file's device.
        """
        folder = as_path(path, "path")
        manifest = read_manifest(folder)
        artifacts = {artifact.format: artifact for artifact in manifest.artifacts}
        file_format = format or ("onnx" if "onnx" in artifacts else manifest.artifacts[0].format)
        artifact = next((record for name, record in artifacts.items() if name == file_format), None)
        if artifact is None:
            hint = f"Use one of the formats {', '.join(artifacts)}."
            raise ConfigError(f"the bundle has no {file_format} file", location=str(folder), hint=hint)
        try:
            run = _open(folder, artifact, manifest)
        except (ConfigError, DeviceError):
            raise
        except OptexportError as error:
            raise BundleError(error.message, location=error.location) from error
        return cls(folder, manifest, artifact, run)

    def __repr__(self) -> str:
        names = [[spec.name for spec in specs] for specs in (self.manifest.inputs, self.manifest.outputs)]
        return f"Bundle({str(self._folder)!r}, format={self.format!r}, inputs={names[0]}, outputs={names[1]})"

    def summary(self) -> str:
        """Returns the file, inputs, outputs and dynamic axes, a line each."""
        manifest = self.manifest
        axes = "; ".join(f"{name} {dim.describe()}" for name, dim in manifest.dims.items())
        lines = {
            "Bundle": str(self._folder),
            "Open file": f"{self._artifact.path} (the bundle has {', '.join(a.format for a in manifest.artifacts)})",
            "Inputs": "; ".join(spec.describe() for spec in manifest.inputs),
            "Outputs": "; ".join(spec.describe() for spec in manifest.outputs),
            "Dynamic axes": axes or "none",
            "Task": self.application.task or "none",
        }
        return "".join(f"{title:14}{printable(text)}\n" for title, text in lines.items())

    def _repr_html_(self) -> str:
        return notebook.preformatted(self.summary())

    @property
    def application(self) -> ApplicationRecord:
        """The use of the model; without a record, it has no task, labels or preprocessors."""
        return self.preprocessing.application

    @property
    def tokenizer(self) -> Any:
        """The bundle's tokenizer, loaded by transformers.

        Raises:
            ConfigError: The bundle has no tokenizer.
            BundleError: The tokenizer cannot be loaded.
        """
        return self.preprocessing.tokenizer

    @property
    def image_processor(self) -> Any:
        """The bundle's image processor, loaded by transformers; raises like `tokenizer`."""
        return self.preprocessing.image_processor

    @property
    def feature_extractor(self) -> Any:
        """The bundle's feature extractor, loaded by transformers; raises like `tokenizer`."""
        return self.preprocessing.feature_extractor

    def __call__(self, /, **inputs: Any) -> Arrays:
        """Runs the file.

        Args:
            inputs: numpy arrays or torch tensors by the names of the manifest's inputs. Integers and floating point
                numbers with fewer bits than the model's are converted. For bfloat16, which numpy lacks, float32 arrays
                are rounded.

        Returns:
            The outputs by name; bfloat16 outputs as float32.

        Raises:
            ConfigError: An input is missing, unknown, or has a wrong dtype, rank or size, or the runtime rejects it.
            DeviceError: The processor lacks the instructions for a layer.
            ExportError: There is not enough memory.
        """
        specs = {spec.name: spec for spec in self.manifest.inputs}
        inputs = self._without_constants(inputs)
        for name in inputs:
            if name not in specs:
                raise ConfigError("unknown input", location=name, hint=did_you_mean(name, specs))
        if missing := [name for name in specs if name not in inputs]:
            raise ConfigError(f"missing {', '.join(missing)}", location="inputs", hint=describe_inputs(self.manifest))
        arrays = {name: as_input(spec, inputs[name]) for name, spec in specs.items()}
        self._check_sizes(arrays)
        try:
            return self._run(arrays)
        except DeviceError:
            raise
        except Exception as error:  # each runtime has its own exceptions
            if is_of_memory(error):
                raise ExportError(
                    "there is not enough memory to run the file on these inputs",
                    location=self._artifact.path,
                    hint="Free memory, or pass fewer or shorter rows.",
                ) from error
            fixed = self._artifact.fixed_shape
            raise ConfigError(
                f"the file cannot run on these inputs: {first_line(error)}",
                location=self._artifact.path,
                hint=describe_inputs(self.manifest)
                if fixed is None
                else f"Pass inputs of the traced sizes; the file takes no others, because {fixed}.",
            ) from error

    def _without_constants(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Removes inputs that are constants of the file, after checking their values."""
        for name, constant in self.manifest.constants.items():
            if name in inputs and not is_constant(constant, inputs[name]):
                raise constant_error(name, constant)
        return {name: value for name, value in inputs.items() if name not in self.manifest.constants}

    def _check_sizes(self, arrays: Arrays) -> None:
        """Checks that fixed sizes match, and that each dynamic size is the same everywhere and a declared multiple.

        Sizes outside the verified ranges are not refused; the runtime may fail on them.
        """
        first: dict[str, tuple[str, int]] = {}
        for spec in self.manifest.inputs:
            for axis, (expected, size) in enumerate(zip(spec.shape, arrays[spec.name].shape, strict=True)):
                if isinstance(expected, str):
                    first_name, first_size = first.setdefault(expected, (spec.name, size))
                    expectation = f"{first_size} as in {first_name}"
                else:
                    first_size, expectation = expected, str(expected)
                if size != first_size:
                    dimension = expected if isinstance(expected, str) else f"axis {axis}"
                    raise ConfigError(
                        f"{dimension}: expected size {expectation}, found {size}",
                        location=spec.name,
                        hint=describe_inputs(self.manifest),
                    )
                dim = self.manifest.dims.get(str(expected))
                if dim is not None and size % dim.multiple_of:
                    raise ConfigError(
                        f"{expected}: expected a multiple of {dim.multiple_of}, found {size}",
                        location=spec.name,
                        hint=f"Resize or pad the input to a size of {dim.describe()}.",
                    )

    def predict(self, inputs: Any) -> list[Answer]:
        """Returns the answers of the model's task, like ``optexport predict``.

        Args:
            inputs: A text, or an image or a sound as for `preprocess`; or a list of them.

        Returns:
            One dict for each input, for example ``{"labels": [{"label": "cat", "score": 0.98}, ...]}``; the outputs
            under ``"outputs"`` if the task is unknown.

        Raises:
            ConfigError: The bundle has no tokenizer or processor for them, or an input cannot be read.
        """
        items = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        return predictions.predict_all(self, self.preprocessing, predictions.as_queries(self.preprocessing, items))

    def preprocess(self, texts: str | Sequence[str] | None = None, images: Any = None, sounds: Any = None) -> Arrays:
        """Converts texts, images or sounds, or several of them, to inputs.

        Texts are padded on the right to the longest one, and cut to the longest that the model takes.

        Args:
            texts: One text, or several.
            images: One image, or several: paths, PIL images or numpy arrays.
            sounds: One sound, or several of one length: paths of WAV files, or numpy arrays [samples] from -1 to 1, at
                the model's sampling rate.

        Returns:
            Those inputs of the model that come from the arguments, by name.

        Raises:
            ConfigError: The bundle has no tokenizer or processor for them, or they cannot be read or padded.
        """
        return self.preprocessing(texts, images, sounds)


def _open(folder: Path, artifact: ArtifactRecord, manifest: Manifest) -> ArrayRun:
    chosen = get_format(artifact.format)
    chosen.check_installed(f"{folder}: {artifact.path}")
    outputs, dtypes = [output.name for output in manifest.outputs], {spec.name: spec.dtype for spec in manifest.inputs}
    return chosen.open_for_arrays(folder / artifact.path, outputs, artifact.device, dtypes)
