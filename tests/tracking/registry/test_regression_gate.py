"""Tests the comparison of a version with the champion."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optexport.config.registration import MaxRegressionConfig
from optexport.errors import BundleError
from optexport.tracking.bundle_record import BundleRecord
from optexport.tracking.registry.regression_gate import Verdict, compare
from tests._helpers import exports
from tests.tracking.bundles import HOST, bundle, timed

Change = Callable[[dict[str, Any]], object]


def nothing(document: dict[str, Any]) -> None:
    """Leaves a document unchanged."""


def verdict(folder: Path, new: dict[str, Change], champion: dict[str, Change], **allowed: float) -> Verdict:
    ours, theirs = (BundleRecord.read(bundle(folder, **changes)) for changes in (new, champion))
    return compare(ours, theirs, MaxRegressionConfig(**allowed))


def multiple(value: float | None, target: str = "onnx") -> Change:
    """Returns a change that sets an output's distance as a multiple of the noise floor."""

    def change(document: dict[str, Any]) -> None:
        (record,) = [record for record in document["parity"]["targets"] if record["target"] == target]
        record["outputs"][0]["floor_ratio"] = value

    return change


def of_size(size: int) -> Change:
    def change(document: dict[str, Any]) -> None:
        (record,) = [file for file in document["files"] if file["path"] == "model.onnx"]
        record["size"] = size

    return change


def lowered(precision: str, value: float, low: float | None = None, high: float | None = None) -> Change:
    """Returns a change that gives the ONNX file a lower precision and a decision metric."""

    def change(document: dict[str, Any]) -> None:
        gate_result = {"measure": "argmax_agreement", "output": "hidden", "value": value, "mean": value, "low": low}
        gate_result |= {"high": high, "count": 9, "ties": 0, "min": 0.5, "failure": None, "cases": []}
        for target in document["parity"]["targets"]:
            if target["target"].startswith("onnx"):
                target |= {"precision": precision, "gate_results": [gate_result]}

    return change


def test_a_bundle_matches_itself(tmp_path: Path) -> None:
    result = verdict(tmp_path, {}, {})
    assert result.worse == ()
    assert result.not_compared == ("latency: this run has no benchmark",)


@pytest.mark.parametrize(
    ("ours", "theirs", "worse"),
    [
        (2.0, 2.0, False),
        (2.4, 2.0, False),
        (2.6, 2.0, True),
        (1.5, 2.0, False),
        (0.9, 0.1, False),  # both within the noise floor
        (1.1, 0.1, True),
        (None, 2.0, False),
        (2.0, None, False),
    ],
)
def test_parity_is_worse_beyond_its_tolerance_and_one_floor(
    tmp_path: Path, ours: float | None, theirs: float | None, worse: bool
) -> None:
    result = verdict(tmp_path, {"manifest": multiple(ours)}, {"manifest": multiple(theirs)}, parity=0.25)
    expected = (f"parity: onnx, hidden: {ours} times the noise floor (champion: {theirs:g})",) if worse else ()
    assert result.worse == expected


def away(distance: float, *, floor: float = 0.0, **bound: float) -> Change:
    """Returns a change that sets the distance of an ONNX output without a noise floor."""

    def change(document: dict[str, Any]) -> None:
        multiple(None if distance else 0.0)(document)
        (record,) = [record for record in document["parity"]["targets"] if record["target"] == "onnx"]
        record["outputs"][0]["max_abs"] = distance
        document["parity"]["bounds"]["hidden"] |= {"floor": floor, "largest": 1.0, **bound}

    return change


@pytest.mark.parametrize(
    ("ours", "theirs", "worse"),
    [
        (away(0.01, atol=0.05), away(0.0, atol=0.05), True),
        (away(0.01, atol=0.05), away(0.001), True),
        (away(0.01, atol=0.05), away(0.009, atol=0.05), False),
        (away(1e-7, atol=0.05), away(0.0), False),  # a unit in the last place
        (away(1e-7), away(0.0), False),
    ],
)
def test_outputs_without_a_noise_floor_are_compared_by_distance(
    tmp_path: Path, ours: Change, theirs: Change, worse: bool
) -> None:
    """A file of lower precision took the alias from a bit-exact one."""
    result = verdict(tmp_path, {"manifest": ours}, {"manifest": theirs}, parity=0.25)
    assert [line.partition(": ")[0] for line in result.worse] == ["parity"] * worse


def test_every_target_is_compared(tmp_path: Path) -> None:
    result = verdict(tmp_path, {"manifest": multiple(3.0, "pt2")}, {"manifest": multiple(1.0, "pt2")})
    assert result.worse == ("parity: pt2, hidden: 3 times the noise floor (champion: 1)",)


def test_size_is_worse_beyond_its_tolerance(tmp_path: Path) -> None:
    champion = {"manifest": of_size(1000)}
    assert verdict(tmp_path, {"manifest": of_size(1010)}, champion, size=0.01).worse == ()
    (worse,) = verdict(tmp_path, {"manifest": of_size(1011)}, champion, size=0.01).worse
    assert worse == "size: onnx has 1011 bytes (champion: 1000)"


@pytest.mark.parametrize(
    ("ours", "theirs", "worse"),
    [
        ((2.0, 2.2), (1.0, 1.1), True),
        ((1.05, 1.3), (1.0, 1.1), False),  # the intervals overlap
        ((1.12, 1.3), (1.0, 1.1), False),  # apart, and within the tolerance
        ((1.16, 1.3), (1.0, 1.1), True),
        ((0.5, 0.6), (1.0, 1.1), False),
    ],
)
def test_latency_is_worse_only_if_the_intervals_are_apart(
    tmp_path: Path, ours: tuple[float, float], theirs: tuple[float, float], worse: bool
) -> None:
    new, champion = ({"measurements": timed(*interval)} for interval in (ours, theirs))
    result = verdict(tmp_path, new, champion, latency=0.05)
    assert [line.partition(" takes")[0] for line in result.worse] == (["latency: onnx at batch=1"] if worse else [])
    assert result.not_compared == ()


@pytest.mark.parametrize(
    ("new", "champion", "reason"),
    [
        (nothing, timed(1, 2), "this run has no benchmark"),
        (timed(9, 9), nothing, "the champion has no benchmark"),
        (timed(9, 9), timed(1, 2, host="there"), "another machine, with host here (champion: there)"),
        (timed(9, 9), timed(1, 2, cpus=64), "another machine, with cpus 2 (champion: 64)"),
        (timed(9, 9, processor="x"), timed(1, 2), "another machine, with processor x (champion: a processor)"),
        (timed(9, 9), lambda m: [timed(1, 2)(m), m["bench"].update(threads=4)], "1 threads (champion: 4)"),
        (timed(9, 9), lambda m: [timed(1, 2)(m), m["bench"]["figures"][0].update(shape="x")], "at the same sizes"),
        (
            timed(9, 9),
            lambda m: [timed(1, 2)(m), m["bench"]["figures"][0].update(low_ms=None, high_ms=None)],
            "with enough rounds for an interval",
        ),
    ],
)
def test_incomparable_latencies_are_listed_and_not_compared(
    tmp_path: Path, new: Change, champion: Change, reason: str
) -> None:
    result = verdict(tmp_path, {"measurements": new}, {"measurements": champion})
    assert result.worse == ()
    (line,) = result.not_compared
    assert line.startswith("latency: ")
    assert reason in line


def test_a_different_interface_is_worse(tmp_path: Path) -> None:
    def renamed(document: dict[str, Any]) -> None:
        document["inputs"][0]["name"] = "y"

    def sized(document: dict[str, Any]) -> None:
        document["outputs"][0]["shape"][-1] = 9

    (line,) = verdict(tmp_path, {"manifest": renamed}, {}).worse
    assert line.startswith("inputs: y float32 [?, ?, 8]; mask int64 [?, ?] (champion: x float32")
    (line,) = verdict(tmp_path, {}, {"manifest": sized}).worse
    assert line.startswith("outputs: hidden float32 [?, ?, 8]")


def sized(dims: dict[str, list[int | None]], **shapes: list[str | int]) -> Change:
    """Returns a change that sets the ranges of dimensions and the shapes of inputs."""

    def change(document: dict[str, Any]) -> None:
        document["dims"] = {name: {"min": low, "max": high} for name, (low, high) in dims.items()}
        for record in document["inputs"]:
            record["shape"] = shapes.get(record["name"], record["shape"])

    return change


@pytest.mark.parametrize(
    ("new", "champion", "worse"),
    [
        ({"s": [17, 64]}, {"s": [17, 64]}, ()),
        ({"s": [1, 128]}, {"s": [17, 64]}, ()),
        ({"s": [1, None]}, {"s": [17, None]}, ()),
        ({"s": [2, 16]}, {"s": [17, 64]}, ("2 to 16 (champion: 17 to 64)",)),
        ({"s": [2, 16]}, {"s": [2, 64]}, ("2 to 16 (champion: 2 to 64)",)),
        ({"s": [18, 64]}, {"s": [17, 64]}, ("18 to 64 (champion: 17 to 64)",)),
        ({"s": [1, 64]}, {"s": [1, None]}, ("1 to 64 (champion: 1 or more)",)),
    ],
)
def test_fewer_sizes_than_the_champions_are_worse(
    tmp_path: Path, new: dict[str, list[int | None]], champion: dict[str, list[int | None]], worse: tuple[str, ...]
) -> None:
    ours, theirs = (
        {"manifest": sized({"b": [1, 8], **dims}, x=["b", "s", 8], mask=["b", 1])} for dims in (new, champion)
    )
    assert verdict(tmp_path, ours, theirs).worse == tuple(f"inputs: x[1] accepts {ranges}" for ranges in worse)


@pytest.mark.slow
def test_an_interface_difference_is_one_short_line(tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["inputs"][0]["name"] = "x\nblock version 1 holds champion" + "x" * 3_000_000

    (line, *_) = verdict(tmp_path, {}, {"manifest": change}).worse
    assert r"(champion: x\nblock version 1" in line
    assert "\n" not in line
    assert len(line) < 3000


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (of_size(10**400), "size"),
        (of_size(-1), "size"),
        (multiple(-1.0), "floor_ratio"),
        (lambda document: document["dims"]["batch"].update(min=-(10**400)), "min"),
        (lambda document: document["dims"]["batch"].update(max=10**400), "max"),
    ],
)
def test_a_manifest_with_impossible_figures_is_refused(tmp_path: Path, change: Change, where: str) -> None:
    with pytest.raises(BundleError, match=rf"the document does not match its schema: .*{where}: "):
        verdict(tmp_path, {}, {"manifest": change})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"manifest": multiple(1e308)}, "onnx, hidden: 1e[+]308 times the noise floor"),
        ({"manifest": lambda m: m["config"]["parity"].update(noise_multiple=0.5)}, "schema: parity.noise_multiple"),
        ({"manifest": lowered("int8", -1e308)}, "argmax_agreement: -1e[+]308 is not within"),
        ({"measurements": timed(-1.0, 1e300)}, "onnx at batch=1: the interval is -1 to 1e[+]300 ms"),
    ],
)
def test_a_champion_with_failing_figures_is_refused(tmp_path: Path, changes: dict[str, Change], problem: str) -> None:
    """Every version would be better and get the alias."""
    with pytest.raises(BundleError, match=problem):
        verdict(tmp_path, {}, changes)


def test_a_sum_of_dimensions_has_the_range_of_both(tmp_path: Path) -> None:
    def change(high: int) -> Change:
        return sized({"p": [0, 8], "s": [1, high]}, x=["p", "s", 8], mask=[1, "p + s"])

    worse = verdict(tmp_path, {"manifest": change(3)}, {"manifest": change(4)}).worse
    assert worse == (
        "inputs: x[1] accepts 1 to 3 (champion: 1 to 4)",
        "inputs: mask[1] accepts 1 to 11 (champion: 1 to 12)",
    )


def test_tied_sizes_are_worse_than_independent_sizes(tmp_path: Path) -> None:
    dims: dict[str, list[int | None]] = {"b": [1, 32], "s": [2, 64], "t": [2, 64]}
    tied, free, summed = (sized(dims, x=["b", "s", 8], mask=["b", size]) for size in ("s", "t", "b + s"))
    assert verdict(tmp_path, {"manifest": free}, {"manifest": tied}).worse == ()
    (line,) = verdict(tmp_path, {"manifest": tied}, {"manifest": free}).worse
    assert line == "inputs: mask[1] must be as long as x[1] (champion: independent)"
    assert "inputs: mask[1] must be as long as x[0] + x[1] (champion: independent)" in (
        verdict(tmp_path, {"manifest": summed}, {"manifest": free}).worse
    )
    renamed = sized({"p": [1, 32], "q": [2, 64]}, x=["p", "q", 8], mask=["p", "p + q"])
    assert verdict(tmp_path, {"manifest": summed}, {"manifest": renamed}).worse == ()


def test_a_static_axis_is_worse_than_a_dynamic_axis(tmp_path: Path) -> None:
    (line,) = verdict(tmp_path, {"manifest": sized({"b": [1, 32]}, x=["b", 5, 8], mask=["b", 5])}, {}).worse
    assert line.startswith("inputs: x float32 [?, 5, 8]; mask int64 [?, 5] (champion: x float32 [?, ?, 8]")

    def traced_alone(document: dict[str, Any]) -> None:
        document["artifacts"][0]["fixed_shape"] = "it has to"

    (line,) = verdict(tmp_path, {"manifest": traced_alone}, {}).worse
    assert line.endswith(" accepts only the traced sizes (champion: other sizes too)")
    assert verdict(tmp_path, {}, {"manifest": traced_alone}).worse == ()


def test_latencies_measured_by_one_run_only_are_listed(tmp_path: Path) -> None:
    def more(document: dict[str, Any]) -> None:
        timed(1.0, 1.1)(document)
        (row,) = document["bench"]["figures"]
        document["bench"]["figures"] += [{**row, "shape": "batch=64"}, {**row, "artifact": "pt2", "high_ms": None}]

    less = {"measurements": timed(1.0, 1.1)}
    for new, champion in ((less, {"measurements": more}), ({"measurements": more}, less)):
        result = verdict(tmp_path, new, champion)
        assert result.worse == ()
        assert result.not_compared == (
            "latency: onnx at batch=64, pt2 at batch=1: not measured in both runs with enough rounds for an interval",
        )


def test_half_an_interval_is_not_compared(tmp_path: Path) -> None:
    def half(document: dict[str, Any]) -> None:
        timed(1.0, 1.1)(document)
        document["bench"]["figures"][0]["high_ms"] = None

    (line,) = verdict(tmp_path, {"measurements": timed(9, 9)}, {"measurements": half}).not_compared
    assert "with enough rounds for an interval" in line


def test_measurements_of_another_bundle_are_refused(tmp_path: Path) -> None:
    target = bundle(tmp_path)
    exports.edit_json(target / "measurements.json", lambda document: document.update(manifest="0" * 64))
    with pytest.raises(BundleError, match="the measurements belong to another bundle"):
        BundleRecord.read(target)


def test_lower_precision_files_are_compared_by_decisions(tmp_path: Path) -> None:
    champion = {"manifest": lowered("int8", 0.9)}
    assert verdict(tmp_path, {"manifest": lowered("int8", 0.9)}, champion).worse == ()
    worse = verdict(tmp_path, {"manifest": lowered("int8", 0.8)}, champion).worse
    assert worse[0] == "parity: onnx (int8), argmax_agreement of hidden: 0.8 (champion: 0.9)"
    sure = {"manifest": lowered("int8", 0.9, 0.85, 0.95)}
    assert verdict(tmp_path, {"manifest": lowered("int8", 0.88, 0.8, 0.92)}, sure).worse == ()
    assert verdict(tmp_path, {"manifest": lowered("int8", 0.7, 0.6, 0.8)}, sure).worse


def test_a_version_without_a_gate_of_the_champion_is_worse(tmp_path: Path) -> None:
    """A version with fewer gates would get the alias."""

    def without(document: dict[str, Any]) -> None:
        lowered("int8", 0.9)(document)
        for target in document["parity"]["targets"]:
            for gate_result in target["gate_results"]:
                gate_result["measure"] = "top_k_agreement"

    worse = verdict(tmp_path, {"manifest": without}, {"manifest": lowered("int8", 0.9)}).worse
    assert worse[0] == "parity: onnx (int8), argmax_agreement of hidden: not measured in this run (champion: 0.9)"


def test_another_precision_is_worse(tmp_path: Path) -> None:
    worse = verdict(tmp_path, {"manifest": lowered("int8", 1.0)}, {}).worse
    assert worse[0] == "parity: onnx is in int8 (champion: full precision)"


def test_different_cases_and_files_are_listed(tmp_path: Path) -> None:
    def changed(document: dict[str, Any]) -> None:
        document["parity"]["cases"].append("data")
        document["artifacts"] = [artifact for artifact in document["artifacts"] if artifact["format"] != "pt2"]

    assert verdict(tmp_path, {}, {"manifest": changed}).not_compared[::2] == (
        "parity on the same cases: the champion was checked on other cases",
        "pt2: only one of the two versions has this format",
    )


def test_measurements_describe_the_machine(tmp_path: Path) -> None:
    assert HOST.keys() <= BundleRecord.read(bundle(tmp_path)).measurements.model_fields_set
