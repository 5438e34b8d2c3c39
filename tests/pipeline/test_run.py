"""A run leaves one complete bundle, or the earlier one, and reports its progress."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optexport._utils.progress import Progress
from optexport.errors import ConfigError, ParityError
from optexport.parity.verify import verify
from optexport.pipeline import run
from tests._helpers import exports
from tests.pipeline.projects import at, config, nothing_is_left, wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["trace", "check graph", "export onnx", "bundle"])
def test_interrupt_at_any_stage_leaves_nothing(project: Path, stage: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(config(project, formats=("onnx",)), progress=at(stage, interrupt))
    assert nothing_is_left(project)


@pytest.mark.slow
def test_earlier_bundle_is_replaced_only_by_a_successful_run(project: Path) -> None:
    earlier = Path(shutil.copytree(exports.exported().output, project / "out" / "block"))
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}
    with pytest.raises(ParityError) as failed:
        run.run(config(project, wrong("ReluForGelu")))
    assert f"\n  The earlier bundle in {earlier} is unchanged.\n" in str(failed.value)
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before
    assert sorted(path.name for path in (project / "out").iterdir()) == ["block", "block-failure"]
    result = run.run(config(project, "merge-linears"))
    assert result.output == earlier
    assert sorted(path.name for path in earlier.iterdir()) == sorted(
        {*exports.FILES, "config.toml"} - {"model.onnx", "model.torchscript.pt"}
    )
    assert all(place.passed for place in verify(earlier).targets)


@pytest.mark.slow
def test_output_that_is_not_a_bundle_is_refused_before_loading(project: Path) -> None:
    (project / "out" / "block").mkdir(parents=True)
    (project / "out" / "block" / "letter.txt").write_text("mine")
    loaded: list[str] = []
    progress = Progress(lambda name, seconds: loaded.append(name))
    with pytest.raises(ConfigError, match="the path exists and is not a bundle"):
        run.run(config(project), progress=progress)
    assert loaded == []
    assert (project / "out" / "block" / "letter.txt").read_text() == "mine"


@pytest.mark.slow
def test_baseline_is_the_untransformed_export_next_to_the_bundle(project: Path) -> None:
    result = run.run(config(project, "merge-linears", formats=("onnx",)), baseline=True)
    plain = project / "out" / "block-baseline"
    assert all(place.passed for folder in (result.output, plain) for place in verify(folder).targets)
    manifests = [json.loads((folder / "manifest.json").read_bytes()) for folder in (result.output, plain)]
    assert [[t["rule"] for t in m["transformations"]] for m in manifests] == [["merge-linears"], []]
    assert manifests[0]["nodes_before"] == manifests[1]["nodes_after"]
    assert (plain / "graph_after.txt").read_text() == (result.output / "graph_before.txt").read_text()
    assert [m["model"]["weights_sha256"] for m in manifests] == [manifests[0]["model"]["weights_sha256"]] * 2


@pytest.mark.slow
def test_dump_has_the_graph_before_and_after_each_transformation(project: Path, tmp_path: Path) -> None:
    rules = ("merge-linears", wrong("ReluForGelu"), "change-true-div-to-mul-by-inverse")
    with pytest.raises(ParityError):
        run.run(config(project, *rules), dump=tmp_path / "dump")
    written = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert [name.partition("-")[0] for name in written] == ["01", "01", "02", "02", "03", "03"]
    first_after, second_before = ((tmp_path / "dump" / name).read_text() for name in (written[0], written[3]))
    assert first_after == second_before
    assert "relu" in (tmp_path / "dump" / written[2]).read_text()
    assert "relu" not in second_before


@pytest.mark.slow
def test_bundle_contains_the_config_unchanged(project: Path) -> None:
    path = config(project, "merge-linears")
    result = run.run(path)
    assert (result.output / "config.toml").read_text() == path.read_text()
    assert result.manifest.config["transformations"] == [{"use": "merge-linears"}]
    assert result.manifest.model.source == "python:pipeline_models:block"
    assert result.run_id is None
    assert result.tracking_failure is None


def test_every_stage_is_announced_at_its_start_and_end(project: Path) -> None:
    announcements: list[tuple[str, bool]] = []
    progress = Progress(lambda name, seconds: announcements.append((name, seconds is None)))
    run.run(config(project, formats=("torchscript",)), progress=progress)
    started = [name for name, starts in announcements if starts]
    assert started == [name for name, starts in announcements if not starts]
    assert started == [
        "load",
        "inputs",
        "trace",
        "reference",
        "transform",
        "other sizes",
        "check graph",
        "export torchscript",
        "check torchscript",
        "undo",
        "node errors",
        "gain",
        "bundle",
        "report",
    ]
    assert str(progress.count) == f"{len(started)}/{len(started)}"
    assert set(progress.seconds) == set(started)
