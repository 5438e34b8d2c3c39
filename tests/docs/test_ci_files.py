"""Tests of the CI files under ``pipelines``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from optexport.config.load import parse_config
from tests._helpers.cli import CliRunner, cli

ROOT = Path(__file__).parents[2]
GITHUB = yaml.safe_load((ROOT / "pipelines" / "github-actions.yml").read_text(encoding="utf-8"))
GITLAB = yaml.safe_load((ROOT / "pipelines" / "gitlab-ci.yml").read_text(encoding="utf-8"))
KUBERNETES = list(yaml.safe_load_all((ROOT / "pipelines" / "kubernetes-job.yml").read_text(encoding="utf-8")))
NIGHTLY = list(yaml.safe_load_all((ROOT / "pipelines" / "kubernetes-nightly.yml").read_text(encoding="utf-8")))
ARGO = yaml.safe_load((ROOT / "pipelines" / "argo-workflow.yml").read_text(encoding="utf-8"))
RAY = yaml.safe_load((ROOT / "pipelines" / "ray-job.yml").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("pipelines/github-actions.yml", ["vendor.github-workflows"]),
        (".github/workflows/ci.yml", ["vendor.github-workflows"]),
        (".github/ISSUE_TEMPLATE/config.yml", ["vendor.github-issue-config"]),
        (".github/ISSUE_TEMPLATE/bug.yml", ["vendor.github-issue-forms"]),
        (".github/ISSUE_TEMPLATE/feature.yml", ["vendor.github-issue-forms"]),
        ("pipelines/gitlab-ci.yml", ["vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_file_follows_the_schema_of_its_host(name: str, schema: list[str]) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", *schema, str(ROOT / name)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.sample(4)
@pytest.mark.parametrize("document", [*KUBERNETES, *NIGHTLY], ids=lambda document: document["kind"])
def test_kubernetes_accepts_the_documents(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_job_runs_a_valid_config(tmp_path: Path) -> None:
    config_map, _, job = KUBERNETES
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *options, path = container["args"]
    assert program in cli.commands
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert Path(path).parent == Path(mounts["config"])
    config = parse_config(config_map["data"][Path(path).name], tmp_path / "config.toml")
    assert Path(config.export.output).parent == Path(mounts["work"]), "the bundle is written next to its final folder"
    assert not config.tracking.uri.startswith("sqlite:"), "the config folder is read-only"
    (policy,) = job["spec"]["podFailurePolicy"]["rules"]
    assert policy["onExitCodes"]["containerName"] == container["name"]
    help_text = CliRunner().invoke(cli, ["--help"]).stdout.partition("Exit codes:")[2]
    codes = {int(line.split()[0]) for line in help_text.splitlines() if line.strip()}
    assert set(policy["onExitCodes"]["values"]) == codes - {0, 1, 130}, (
        "exit code 1 may be a full disk, so the job is retried"
    )


def test_kubernetes_job_says_how_to_upload_its_bundle_later() -> None:
    text = (ROOT / "pipelines" / "kubernetes-job.yml").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("#   args: ")]
    command, *arguments = yaml.safe_load(line.removeprefix("#"))["args"]
    options = cli.commands[command].make_context(command, arguments).params
    assert str(options["bundle"]) == tomllib.loads(KUBERNETES[0]["data"]["config.toml"])["export"]["output"]
    assert str(options["config_path"]) == KUBERNETES[-1]["spec"]["template"]["spec"]["containers"][0]["args"][-1]


def _pods() -> dict[str, dict[str, Any]]:
    """Returns the pods that Argo and Ray create."""
    argo = next(template for template in ARGO["spec"]["templates"] if "container" in template)
    cluster = RAY["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {
        "argo": {"containers": [{"name": "main", **argo["container"]}], "volumes": ARGO["spec"]["volumes"]},
        "ray head": cluster["headGroupSpec"]["template"]["spec"],
        "ray worker": workers["template"]["spec"],
    }


@pytest.mark.parametrize("name", ["argo", "ray head", "ray worker"])
def test_kubernetes_accepts_the_pods_of_argo_and_ray(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": _pods()[name]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    mounted = {mount["name"] for container in pod["spec"]["containers"] for mount in container.get("volumeMounts", [])}
    assert mounted <= {volume["name"] for volume in pod["spec"].get("volumes", [])}


def test_pipelines_call_optexport_with_valid_options() -> None:
    nightly = NIGHTLY[-1]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    ray = shlex.split(RAY["spec"]["entrypoint"])[-1]
    argo = next(template for template in ARGO["spec"]["templates"] if "container" in template)["container"]
    calls = [shlex.split(nightly.splitlines()[-1])[1:], shlex.split(ray), [*argo["command"], *argo["args"]]]
    for program, command, *arguments in calls:
        assert program == "optexport"
        cli.commands[command].make_context(command, arguments)  # parses every option


def test_change_of_the_sources_does_not_reinstall_the_dependencies_of_the_image() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    after = lines[lines.index("COPY optexport optexport") : lines.index("FROM ${PYTHON_IMAGE}")]
    (install,) = [line for line in after if "pip install" in line]
    assert install == "RUN /opt/optexport/bin/pip install --no-deps ."


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_steps_in_comments_have_valid_options_in_their_order(name: str) -> None:
    text = (ROOT / "pipelines" / name).read_text(encoding="utf-8")
    calls = re.findall(r'(?:"\$IMAGE"|- optexport) ((?:check|run|sign|upload|verify|promote) .*)', text)
    for call in calls:
        command, *arguments = shlex.split(call)
        cli.commands[command].make_context(command, arguments)
    assert [call.split()[0] for call in calls] == ["check", "run", "sign", "upload", "verify", "promote"]


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_file_is_valid_yaml_with_the_steps_in_comments(name: str) -> None:
    text = (ROOT / "pipelines" / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)# ((?:promote:|- env:|- optexport).*\n(?:\1# .*\n)*)", text, re.MULTILINE)
    assert len(blocks) == 2
    for indent, block in blocks:
        comment = "".join(f"{indent}# {line}" for line in block.splitlines(keepends=True)).replace(
            f"# {indent}# ", "# "
        )
        text = text.replace(comment, re.sub(rf"^{indent}# ", indent, comment, flags=re.MULTILINE))
    jobs = yaml.safe_load(text)
    assert "promote" in jobs.get("jobs", jobs)
    assert " sign " in yaml.dump(jobs)


def test_nightly_config_equals_nightly_toml() -> None:
    text = (ROOT / "pipelines" / "nightly.toml").read_text(encoding="utf-8")
    assert tomllib.loads(NIGHTLY[0]["data"]["nightly.toml"]) == tomllib.loads(text)


def test_cluster_runs_the_pinned_version_of_ray() -> None:
    version = RAY["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_pre_commit_hook_accepts_many_files() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, command, *options = hook["entry"].split()
    assert program == "optexport"
    result = CliRunner().invoke(cli, [command, *options, *map(str, sorted(ROOT.glob("pipelines/*.toml")))])
    assert result.exit_code == 0, result.output
    assert "for each model, use: optexport batch CONFIG --from-registry FILTER" in result.output


def test_pre_commit_hook_ignores_bundles(tmp_path: Path) -> None:
    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    (hook,) = yaml.safe_load(text)
    (shown,) = [line.removeprefix("#") for line in text.splitlines() if "hooks: [" in line]
    (snippet,) = yaml.safe_load(shown)["hooks"]
    for patterns in (hook, snippet):
        for path, expected in {
            "pipelines/a.toml": True,
            "pipelines/build/a/config.toml": False,
            "a.toml": False,
        }.items():
            matches = re.search(patterns["files"], path) and not re.search(patterns["exclude"], path)
            assert bool(matches) == expected, path


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Complete", "Failed"])
def test_wait_command_ends_when_the_kubernetes_job_ends(end: str, tmp_path: Path) -> None:
    text = (ROOT / "pipelines/kubernetes-job.yml").read_text(encoding="utf-8")
    (command,) = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   timeout ")]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\necho 'FailureTarget {end}'\n")
    kubectl.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = subprocess.run(command, shell=True, env={"PATH": path}, capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stdout) == (0, f"FailureTarget {end}\n")


def test_pipelines_keep_the_output_of_their_config() -> None:
    for variables in (GITHUB["env"], GITLAB["variables"]):
        config = ROOT / variables["CONFIG"]
        output = tomllib.loads(config.read_text(encoding="utf-8"))["export"]["output"]
        assert ROOT / variables["BUNDLE"] == config.parent / output


def test_github_keeps_the_folder_of_a_failed_check() -> None:
    steps: dict[str, Any] = {
        step["with"]["name"]: step
        for step in GITHUB["jobs"]["export"]["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    }
    assert steps["failure"]["if"] == "failure()"
    assert steps["failure"]["with"]["path"] == "${{ env.BUNDLE }}-failure"
    assert steps["failure"]["with"]["if-no-files-found"] == "ignore"
    assert steps["reports"]["if"] == "always()"


def test_github_keeps_a_bundle_that_mlflow_did_not_get() -> None:
    (step,) = [step for step in GITHUB["jobs"]["export"]["steps"] if step.get("with", {}).get("name") == "bundle"]
    assert step["if"] == "always()"
    assert step["with"]["if-no-files-found"] == "ignore"


def test_gitlab_keeps_the_folder_of_a_failed_check() -> None:
    artifacts = GITLAB["export"]["artifacts"]
    assert artifacts["when"] == "always"
    assert artifacts["paths"] == ["$BUNDLE", "${BUNDLE}-failure"]
    assert any(f"--junit {artifacts['reports']['junit']}" in line for line in GITLAB["export"]["script"])
