"""A rule that is wrong, fails, or finds too little is caught and named, or excluded by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optexport.errors import ConfigError, GateError, ParityError, TransformationError
from optexport.pipeline import run
from tests.pipeline.projects import config, nothing_is_left, wrong


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("name", "node"),
    [
        ("ReluForGelu", "gelu"),
        ("SwappedSlices", "linear"),
        ("DroppedBias", "linear"),
        ("BakedSize", "output"),
        ("NotANumber", "linear"),
    ],
)
def test_wrong_rule_is_caught_and_named_and_leaves_nothing(project: Path, name: str, node: str) -> None:
    path = config(project, "merge-linears", wrong(name), "change-true-div-to-mul-by-inverse")
    with pytest.raises(ParityError) as caught:
        run.run(path)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert re.search(r"^graph: hidden(:| is off by) .*\(case: .*\)$", message, re.MULTILINE)
    assert f"The rule {wrong(name)} caused the difference. It changed {node}" in message
    assert f"`without={wrong(name)}`" in message
    assert nothing_is_left(project)


@pytest.mark.slow
def test_slight_scale_on_one_head_is_caught_too(project: Path) -> None:
    with pytest.raises(ParityError, match=r"python:wrong_rules:ScaledHead caused the difference"):
        run.run(config(project, wrong("ScaledHead")))
    assert nothing_is_left(project)


@pytest.mark.slow
def test_size_hard_coded_by_a_rule_is_caught_at_untraced_sizes(project: Path) -> None:
    with pytest.raises(ParityError) as caught:
        run.run(config(project, wrong("BakedSize")))
    assert "(case: batch " in str(caught.value)
    assert "(case: traced" not in str(caught.value)


@pytest.mark.slow
def test_fixed_tolerance_replaces_the_measured_one(project: Path) -> None:
    path = config(project, wrong("ScaledHead"))
    text = path.read_text()
    path.write_text(f"{text}\n[parity]\natol = 0.5\n")
    assert run.run(path).manifest.parity.bounds["hidden"].atol == 0.5
    path.write_text(f"{text}\n[parity]\natol = 1e-9\n")
    with pytest.raises(ParityError):
        run.run(path)


@pytest.mark.slow
def test_rule_that_does_not_preserve_results_needs_a_tolerance(project: Path) -> None:
    path = config(project, "replace-activation", formats=("torchscript", "onnx"))
    with pytest.raises(ConfigError, match=r"transformations\[0\]: replace-activation changes the numbers"):
        run.run(path)
    text = path.read_text()
    path.write_text(f"{text}\n[parity]\natol = 1e-6\n")
    with pytest.raises(ParityError) as caught:
        run.run(path)
    assert caught.value.exit_code == 4
    assert "The rule replace-activation caused the difference. It changed gelu. This rule does not preserve" in str(
        caught.value
    )
    assert "parity.atol" in str(caught.value)
    assert nothing_is_left(project)
    path.write_text(f"{text}\n[parity]\natol = 0.01\n")
    (applied,) = run.run(path).manifest.transformations
    assert (applied.rule, applied.preserves_computation) == ("replace-activation", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Raising", "Unsound", "Returning"])
def test_rule_that_fails_is_named_and_leaves_nothing(project: Path, name: str) -> None:
    with pytest.raises(TransformationError) as caught:
        run.run(config(project, "merge-linears", wrong(name)))
    assert caught.value.exit_code == 5
    assert caught.value.location == wrong(name)
    assert nothing_is_left(project)


@pytest.mark.slow
def test_without_the_wrong_rule_the_run_passes(project: Path) -> None:
    path = config(project, "merge-linears", wrong("ReluForGelu"))
    result = run.run(path, without=[wrong("ReluForGelu")])
    assert result.passed
    assert [t.rule for t in result.manifest.transformations] == ["merge-linears"]


@pytest.mark.slow
def test_excluded_rule_may_be_spelled_as_its_class(project: Path) -> None:
    path = config(project, "merge-linears", "change-true-div-to-mul-by-inverse")
    result = run.run(path, without=["MergeLinears"])
    assert [t.rule for t in result.manifest.transformations] == ["change-true-div-to-mul-by-inverse"]


@pytest.mark.slow
def test_excluding_an_absent_rule_is_refused(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"`without=merge-linear.*\n.*Did you mean \"merge-linears\""):
        run.run(config(project, "merge-linears"), without="merge-linear")


def expecting(project: Path, rule: str, minimum: int) -> Path:
    path = config(project, rule)
    path.write_text(path.read_text().replace(f'use = "{rule}"', f'use = "{rule}"\nmin_matches = {minimum}'))
    return path


@pytest.mark.slow
def test_rule_with_the_expected_number_of_matches_passes(project: Path) -> None:
    result = run.run(expecting(project, "merge-linears", 1))
    assert result.manifest.config["transformations"] == [{"use": "merge-linears", "min_matches": 1}]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("rule", "minimum", "matches"), [("merge-linears", 2, "1"), ("fuse-batch-norm", 1, "0")])
def test_rule_with_too_few_matches_fails_the_run(project: Path, rule: str, minimum: int, matches: str) -> None:
    message = f"{rule}: too few matches (expected at least {minimum}, found {matches})"
    with pytest.raises(GateError, match=re.escape(message)) as caught:
        run.run(expecting(project, rule, minimum))
    assert caught.value.exit_code == 6
    assert nothing_is_left(project)
