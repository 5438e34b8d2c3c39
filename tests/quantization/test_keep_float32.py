"""``precision.keep_float32`` with layers that a rule merged or left separate."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optexport.cli.main import cli
from optexport.errors import ConfigError
from optexport.pipeline.run import run
from optexport.report.result import Result
from tests.quantization import models

_LOWERED = 'onnx = "int8"\nkeep_float32 = ["{}"]'


def _kept(folder: Path, keep: str, rules: str, model: str = "merging") -> dict[str, str | None]:
    folder.mkdir()
    config = models.write(folder, _LOWERED.format(keep), model=model, gates="cosine = 0.9")
    config.write_text(f"transformations = [{rules}]\n{config.read_text()}")
    return _layers(run(config))


def _layers(result: Result) -> dict[str, str | None]:
    precision = result.manifest.artifacts[0].precision
    assert precision is not None
    return {layer.layer: layer.kept for layer in precision.layers}


@pytest.mark.slow
def test_merged_layer_and_its_parts_stand_for_each_other(tmp_path: Path) -> None:
    merge = '{ use = "merge-linears" }'
    merged = _kept(tmp_path / "merged", "block.a-b-merged", merge)
    assert merged == {"block.a-b-merged": "asked for", "last": None}
    assert _kept(tmp_path / "part", "block.b", merge) == merged
    separate = _kept(tmp_path / "apart", "block.a-b-merged", "")
    assert separate == {"block.a": "asked for", "block.b": "asked for", "last": None}


@pytest.mark.slow
def test_numbered_merged_layer_is_refused_if_it_is_not_merged(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'no layer "block.a-and-5-merged".*\n.*set formats of the merging rule, or remove'
    ):
        _kept(tmp_path / "counted", "block.a-and-5-merged", "")


@pytest.mark.slow
def test_summary_excludes_the_layers_that_stay(tmp_path: Path) -> None:
    config = models.write(tmp_path, _LOWERED.format("block.a"), model="merging", gates="cosine = 0.9")
    done = CliRunner().invoke(cli, ["run", str(config)])
    assert done.exit_code == 0, done.output
    assert "with all except those in keep_float32 in int8: cosine of output 0.9" in done.output
    page = (tmp_path / "bundle" / "report.html").read_text(encoding="utf-8")
    assert "all layers except those in keep_float32 lowered" in page
