"""The CI files under ``pipelines`` keep what a job leaves, also of one that fails, and name what is there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
GITHUB = yaml.safe_load((ROOT / "pipelines" / "github-actions.yml").read_text(encoding="utf-8"))
GITLAB = yaml.safe_load((ROOT / "pipelines" / "gitlab-ci.yml").read_text(encoding="utf-8"))


def test_the_bundle_that_they_keep_is_the_output_of_their_config() -> None:
    for variables in (GITHUB["env"], GITLAB["variables"]):
        config = ROOT / variables["CONFIG"]
        output = tomllib.loads(config.read_text(encoding="utf-8"))["export"]["output"]
        assert ROOT / variables["BUNDLE"] == config.parent / output


def test_github_keeps_the_folder_of_a_failed_proof() -> None:
    kept: dict[str, Any] = {
        step["with"]["name"]: step
        for step in GITHUB["jobs"]["export"]["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    assert kept["failure"]["if"] == "failure()"
    assert kept["failure"]["with"]["path"] == "${{ env.BUNDLE }}-failure"
    assert kept["failure"]["with"]["if-no-files-found"] == "ignore"
    assert kept["reports"]["if"] == "always()"
    assert "if" not in kept["bundle"]


def test_gitlab_keeps_the_folder_of_a_failed_proof() -> None:
    artifacts = GITLAB["export"]["artifacts"]
    assert artifacts["when"] == "always"
    assert artifacts["paths"] == ["$BUNDLE", "${BUNDLE}-failure"]
    assert any(f"--junit {artifacts['reports']['junit']}" in line for line in GITLAB["export"]["script"])
