"""Checks the laws of formats, by exporting small models with dynamic axes."""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from optexport.errors import OptexportError
from optexport.exporters import Benchmark, Format, registry
from optexport.testing.rules import assert_close


class _Numbers(nn.Module):
    """A feed-forward block on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class _Tokens(nn.Module):
    """Takes whole numbers and booleans, and returns them too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(self.embedding(ids)).masked_fill(~mask[..., None], 0).softmax(-1)
        return {"scores": scores, "best": scores.argmax(-1), "kept": mask & (ids > 2)}


class _Images(nn.Module):
    """A convolution on images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(image).flatten(1)
        return result


# For a format: a model, its inputs at two sizes, and the names of their axes.
FormatModel = tuple[nn.Module, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, Mapping[int, str]]]


def format_models() -> dict[str, FormatModel]:
    """Returns the models that `check_format` exports by default, by name."""
    text = {0: "batch", 1: "sequence"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small, large = torch.randint(0, 16, (2, 5)), torch.randint(0, 16, (7, 3))
        return {
            "numbers": (_Numbers(), {"x": torch.randn(2, 5, 4)}, {"x": torch.randn(7, 3, 4)}, {"x": text}),
            "tokens": (
                _Tokens(),
                {"ids": small, "mask": small > 4},
                {"ids": large, "mask": large > 4},
                {"ids": text, "mask": text},
            ),
            "images": (
                _Images(),
                {"image": torch.randn(2, 3, 16, 16)},
                {"image": torch.randn(1, 3, 24, 20)},
                {"image": {0: "batch", 2: "height", 3: "width"}},
            ),
        }


def check_format(format_class: type[Format], models: Mapping[str, FormatModel] | None = None) -> None:
    """Asserts the laws of a format, by exporting small models with dynamic axes.

    - Importing its module does not import torch, so that ``optexport --help`` stays fast.
    - A file agrees with the model, at the traced size and at sizes that were never traced.
    - A second export writes the same bytes.
    - All written files are listed by `Format.list_files`, and the bundle verifies.
    - A file of garbage raises an error of optexport.
    - The call for benchmarks runs.

    The format need not be installed.

    Args:
        format_class: The class of the format.
        models: Models by name, each with its inputs at two sizes and the names of their axes; by default
            `format_models`.

    Raises:
        ConfigError: The class is invalid.
    """
    with registry.registered(format_class):  # raises if the class is invalid
        _check_import(format_class)
    for name, (model, inputs, others, axes) in (format_models() if models is None else models).items():
        with registry.registered(format_class), tempfile.TemporaryDirectory() as folder:
            _check_bundle(
                registry.get_format(format_class.name), name, (model.eval(), inputs, others, axes), Path(folder)
            )


def _check_import(format_class: type[Format]) -> None:
    module = format_class.__module__
    script = f"import sys; sys.path[:] = {sys.path!r}; import {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("False\n"), (
        f"{module} must import torch inside of functions only{f': {done.stderr}' if done.stderr else ''}"
    )


def _check_bundle(file_format: Format, name: str, model: FormatModel, folder: Path) -> None:
    from optexport import Bundle, export, verify
    from optexport.cache import store

    module, inputs, others, axes = model
    bundle, again = folder / "bundle", folder / "again" / "bundle"
    with store.disabled():
        for output in (bundle, again):  # raises if a file differs from the model
            result = export(
                module, dict(inputs), output, formats=file_format.name, dynamic=axes, effort="quick", bench=False
            )
    (artifact,) = result.manifest.artifacts
    assert artifact.fixed_shape is None, f"{name}: the file accepts only the traced shape: {artifact.fixed_shape}"
    common = {path.name for path in bundle.iterdir()} & set(_OTHER_FILES)
    unlisted = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*")} - common - set(artifact.paths)
    assert not unlisted, f"{name}: list_files does not name {', '.join(sorted(unlisted))}"
    for path in artifact.paths:
        if (bundle / path).is_file():
            same = (bundle / path).read_bytes() == (again / path).read_bytes()
            assert same, f"{name}: a second export wrote other bytes to {path}"
    opened, names = Bundle.load(bundle, file_format.name), [output.name for output in result.manifest.outputs]
    with torch.no_grad():
        expected = module(**copy.deepcopy(dict(others)))
    results = opened(**others)
    wanted = expected if isinstance(expected, Mapping) else dict(zip(names, [expected], strict=True))
    assert_close(
        [torch.from_numpy(results[key]) for key in names],
        [wanted[key] for key in names],
        f"{name}: at another size",
        scale=1.0,
    )
    assert verify(bundle).passed, f"{name}: the bundle does not verify"
    _check_benchmark(file_format, bundle / artifact.path, inputs, names)
    (bundle / artifact.path).write_bytes(b"garbage")
    try:
        file_format.open(bundle / artifact.path, names, "cpu")
    except OptexportError:
        return
    raise AssertionError(f"{name}: open must raise ExportError for a file of garbage")


# Files of a bundle that are not of a format.
_OTHER_FILES = (
    *("graph_after.txt", "graph_before.txt", "manifest.json", "measurements.json"),
    *("reference.safetensors", "report.html"),
)


def _check_benchmark(file_format: Format, path: Path, inputs: Mapping[str, torch.Tensor], names: list[str]) -> None:
    """Asserts that the call for benchmarks runs, as a worker of `optexport bench` does it."""
    from safetensors.torch import save_file

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        save_file({key: tensor.contiguous() for key, tensor in inputs.items()}, Path(folder) / "inputs.safetensors")
        try:
            read = file_format.prepare_benchmark(Benchmark(path, tuple(inputs), tuple(names), threads, "cpu"))
            read(Path(folder) / "inputs.safetensors")()()
        finally:
            torch.set_num_threads(threads)
            torch.set_grad_enabled(True)
