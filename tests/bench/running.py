"""Calls ``optexport bench`` for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from optexport.bench.workload import Workload
from optexport.cli.main import cli
from tests.bench.files import WIDTH

BRIEF = ("--rounds", "2", "--seconds", "0.01")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def workload(folder: Path, sequence: int = 32) -> Workload:
    save_file({"x": np.ones((4, sequence, WIDTH), "float32")}, folder / "x.safetensors")
    return Workload({"batch": 4, "length": sequence}, 4, folder / "x.safetensors")
