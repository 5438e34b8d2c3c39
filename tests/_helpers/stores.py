"""Embedded MLflow stores for tests. Creating one takes seconds, so all workers copy one store."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from pathlib import Path

from tests import sharing
from tests._helpers import exports

_numbers = itertools.count()

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


def _create(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SQLAlchemy warns about calls in mlflow
        import mlflow

        mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def store(folder: Path) -> str:
    """Creates an empty store in a folder, and returns its URI."""
    shutil.copy(sharing.make_once("mlflow-store", _create), folder / "mlflow.db")
    return f"sqlite:///{folder / 'mlflow.db'}"


CONFIG = (
    """
[model]
source = "python:{module}:load"
"""
    + exports.INPUTS
    + """
[[transformations]]
use = "merge-linears"
{rules}
[tracking]
uri = "{uri}"
experiment = "tracked"
[export]
formats = {formats}
output = "out/block"
"""
)


def project(folder: Path, uri: str, rules: str = "", formats: str = '["onnx", "pt2"]') -> Path:
    """Writes a config that tracks the export of a block, with its model code, and returns the path."""
    # Each project has its own module name, because Python caches modules by name.
    module = f"tracked_{next(_numbers)}"
    (folder / f"{module}.py").write_text("from tests._helpers.exports import block as load\n")
    (folder / "config.toml").write_text(CONFIG.format(module=module, rules=rules, uri=uri, formats=formats))
    return folder / "config.toml"
