"""Folder with the tensors of a failed parity check and a script that reproduces it."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from optexport._utils import atomic_dir
from optexport.bundle.layout import SCRIPT
from optexport.errors import (
    ConfigError,
    with_hint,
)
from optexport.exporters.registry import find_format_of_file, list_model_files
from optexport.parity import distances
from optexport.parity.checker import ParityChecker, TargetParity
from optexport.parity.record import parity_record
from optexport.runtime.untrusted import archives

_PARITY, _CASE, _PIECE = "parity.json", "case.safetensors", "piece.safetensors"
_NAMES = {
    *(SCRIPT, _PARITY, _CASE, _PIECE, "config.toml", "diagnosis.txt", "piece.onnx"),
    *("before.pt2", "after.pt2", "before.pt", "after.pt"),
    "model.pt",
}

_OPEN = {
    ".pt2": "torch.export.load(FOLDER / {name!r}).module()(**arguments)",
    ".pt": "torch.jit.load(FOLDER / {name!r})(**arguments)",
    ".onnx": "run_onnx(FOLDER / {name!r})",
}
_CHECKS: Mapping[str, Callable[[Path], object]] = {".pt2": archives.check_pt2, ".pt": archives.load_torchscript}
_NAME_ARGUMENTS = """
arguments = {{re.sub(r"\\W", "_", name): value for name, value in inputs.items()}}
"""
_RUN_FORMAT = """
def run_file(path):
    run = get_format("{file_format}").open(path, list(OUTPUTS), "cpu")
    return list(run(inputs).values())
"""
_RUN_ONNX = """
def run_onnx(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    if recorded := session.get_modelmeta().custom_metadata_map.get("optexport.providers"):
        session.set_providers([*json.loads(recorded), "CPUExecutionProvider"])
    arrays = {{value.name: inputs[value.name].numpy() for value in session.get_inputs()}}
    return [torch.from_numpy(result) for result in session.run(list(OUTPUTS), arrays)]
"""
_IMPORT_FORMAT = "import torch\nfrom optexport.exporters.registry import get_format"
# Imports and functions by the suffix of the file with the wrong results.
_SETUP = {
    **dict.fromkeys((".pt", ".pt2"), ("import re\nimport torch", _NAME_ARGUMENTS)),
    ".onnx": ("import json\nimport onnxruntime\nimport torch", _RUN_ONNX),
}
_SCRIPT = '''\
"""{title}"""
import sys
from pathlib import Path
{imports}
from safetensors.torch import load_file
FOLDER = Path(__file__).parent
OUTPUTS = {outputs}  # tolerance and dtype
tensors = load_file(FOLDER / {tensors!r})
inputs = {{key.removeprefix("inputs."): value for key, value in tensors.items() if key.startswith("inputs.")}}
{functions}
expected = {expected}
actual = {actual}
wrong = False
for (name, (limit, dtype)), a, b in zip(OUTPUTS.items(), actual, expected, strict=True):
    distance = torch.tensor(float("inf"))
    if a.shape == b.shape and str(a.dtype) == dtype:
        same = (a == b) | (a.isnan() & b.isnan())
        gap = (a.double() - b.double()).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
        distance = torch.cat([gap.flatten(), gap.new_zeros(1)]).max()
    print(f"{{name}} is off by {{distance:.1e}}, tolerance {{limit:.1e}}")
    wrong = wrong or bool(distance > limit)
sys.exit(int(wrong))
'''


@dataclass(frozen=True)
class Reproduction:
    """Script and files that reproduce a failure.

    Attributes:
        title: Description of the difference.
        actual: File with the wrong results.
        expected: File with the right results, or the prefix of the expected tensors.
        outputs: Allowed distance and dtype, by output name.
        write: Writes the files to a folder.
        tensors: Inputs and expected tensors of a piece; None for the tensors of the whole case.
        level: Optimization level of ONNX Runtime.
        raises: True if the failure is an error.
    """

    title: str
    actual: str
    expected: str
    outputs: Mapping[str, tuple[float, torch.dtype]]
    write: Callable[[Path], object]
    tensors: Mapping[str, torch.Tensor] | None = None
    level: str = "ORT_DISABLE_ALL"
    raises: bool = False

    def script(self) -> str:
        """Returns a Python script of fewer than 30 lines."""
        suffix = Path(self.actual).suffix
        imports, functions = _SETUP.get(suffix, (_IMPORT_FORMAT, _RUN_FORMAT))
        results = f"[tensors[f'{self.expected}.{{name}}'] for name in OUTPUTS]"
        expected_suffix = Path(self.expected).suffix
        return _SCRIPT.format(
            title=textwrap.shorten(self.title.replace('"', "'").replace("\\", "/"), 110),
            imports=imports,
            outputs={name: (limit, str(dtype)) for name, (limit, dtype) in self.outputs.items()},
            tensors=_CASE if self.tensors is None else _PIECE,
            functions=functions.format(level=self.level, file_format=find_format_of_file(self.actual)).strip(),
            expected=_OPEN[expected_suffix].format(name=self.expected) if expected_suffix else results,
            actual=_OPEN.get(suffix, "run_file(FOLDER / {name!r})").format(name=self.actual),
        ).replace("\n\n", "\n")


@dataclass(frozen=True)
class Finding:
    """Cause of a failed parity check.

    Attributes:
        target: Target that fails.
        case: Index of the compared case.
        explanation: Lines for the user.
        reproductions: Candidates; the first that reproduces the failure is written.
        hint: What the user can do.
    """

    target: str
    case: int
    explanation: str
    reproductions: Sequence[Reproduction] = field(default=())
    hint: str | None = None


def write_folder(
    folder: Path, checker: ParityChecker, finding: Finding | None, config_text: str | None, explanation: str
) -> bool:
    """Writes the folder of a failure and replaces an earlier one.

    Args:
        config_text: Content of the config; None to write no config.
        explanation: Text of diagnosis.txt.

    Returns:
        True if the folder contains a script that reproduces the failure.

    Raises:
        ConfigError: The path contains something else.
        OSError: The folder cannot be written.
    """
    _check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_dir.drafting(folder, _check_replaceable) as draft:
        if config_text is not None:
            (draft / "config.toml").write_text(config_text, encoding="utf-8")
        record = parity_record(checker).model_dump(mode="json")
        (draft / _PARITY).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        hint = None if finding is None else finding.hint
        (draft / "diagnosis.txt").write_text(f"{with_hint(explanation, hint)}\n", encoding="utf-8")
        if finding is None:
            return False
        save_file(_case_tensors(checker, finding), draft / _CASE)
        return any(_write_reproduction(reproduction, draft) for reproduction in finding.reproductions)


def remove(folder: Path) -> None:
    """Removes the folder of an earlier failure; other content stays."""
    with contextlib.suppress(ConfigError):
        _check_replaceable(folder)
        if (folder / _PARITY).is_file():
            shutil.rmtree(folder)


def _check_replaceable(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {""}
    models = set(list_model_files())
    if names and not (names <= _NAMES | models and _PARITY in names):
        raise ConfigError("the path is not a folder of a failed check, so it is not replaced", location=str(folder))


def _case_tensors(checker: ParityChecker, finding: Finding) -> dict[str, torch.Tensor]:
    """Returns the failing case: inputs, original outputs, float64 outputs, target outputs."""
    reference = checker.reference
    case, outputs, exact = reference.cases[finding.case], reference.outputs[finding.case], reference.exact[finding.case]
    double = {name: distances.expected_values(exact[name], tensor) for name, tensor in outputs.items()}
    result = checker.result(finding.target, case.name)
    parts = {"inputs": case.batch, "outputs": outputs, "float64": double}
    if not isinstance(result, str):
        parts["candidate"] = result
    return {
        f"{part}.{name}": tensor.detach().contiguous().clone()
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }


def _write_reproduction(reproduction: Reproduction, draft: Path) -> bool:
    """Writes a reproduction and runs its script; removes the files if the script does not fail."""
    before = set(draft.iterdir())
    try:
        reproduction.write(draft)
        for path in set(draft.iterdir()) - before:  # the script opens files without these checks
            _CHECKS.get(path.suffix, Path.exists)(path)
        if reproduction.tensors is not None:
            save_file({k: v.detach().contiguous().clone() for k, v in reproduction.tensors.items()}, draft / _PIECE)
        (draft / SCRIPT).write_text(reproduction.script(), encoding="utf-8")
        if _fails(draft / SCRIPT, reproduction.raises):
            return True
    except Exception:  # noqa: S110 - torch.export rejects some pieces; the next reproduction has the whole graph
        pass
    for path in set(draft.iterdir()) - before:
        path.unlink()
    return False


def _fails(script: Path, raises: bool) -> bool:
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryFile("w") as quiet:
        try:
            with contextlib.redirect_stderr(quiet):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return end.code == 1
        except Exception:  # a failure that raises when the model runs
            return raises
    return False


def failing_case(checker: ParityChecker, target: TargetParity) -> int:
    """Returns the index of the smallest failing case, or 0 if only gates fail."""
    cases = checker.reference.cases
    failing = {case.case for output in target.outputs for case in output.cases if case.failure is not None}
    indices = [index for index, case in enumerate(cases) if case.name in failing]
    return min(indices or [0], key=lambda index: sum(tensor.numel() for tensor in cases[index].batch.values()))


def outputs_at(
    checker: ParityChecker, target: TargetParity, case: int
) -> tuple[dict[str, tuple[float, torch.dtype]], str]:
    """Returns the tolerance and dtype per output, and the prefix of the expected tensors."""
    name, originals = checker.reference.cases[case].name, checker.reference.outputs[case]
    limits = {o.output: next(c.limit for c in o.cases if c.case == name) for o in target.outputs}
    fixed = any(bound.fixed for bound in checker.tolerances.values())
    return {key: (limits[key], originals[key].dtype) for key in limits}, "outputs" if fixed else "float64"
