"""The command ``optexport verify``, which checks files, signature and outputs of a bundle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, junit_option, key_option, outcome, print_json
from optexport.errors import ConfigError, GateError, OptexportError, ParityError, on_one_line

if TYPE_CHECKING:
    from optexport.bundle.manifest import Manifest
    from optexport.bundle.parity_records import ParityRecord
    from optexport.parity.checker import ParityChecker, TargetParity


@click.command(
    cls=Command,
    examples=[
        "optexport verify build/my-model",
        "optexport verify build/my-model --key public.pem",
    ],
)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@key_option
@junit_option
@json_option
def verify(bundle: Path, key: Path | None, junit: Path | None, as_json: bool) -> None:
    """Check that BUNDLE is unchanged and still works.

    Use this after a copy or a download, or on another machine before deployment. It compares the digest of every file
    with the manifest. Then it runs the exported files on the stored inputs and compares the results with the stored
    outputs. It needs neither the original model nor transformers.

    With --key, the bundle must have a valid signature. For a generative model, give one part or the folder that has
    all parts.
    """
    from optexport.bundle.layout import SIGNATURE
    from optexport.bundle.parts import read_bundles
    from optexport.report import github
    from optexport.report import junit as report_junit

    report_junit.start(junit, [bundle])
    checks: list[_BundleCheck] = []
    try:
        if key is None:
            bundles = read_bundles(bundle)
        else:
            from optexport.bundle.signing import folder_signature

            bundles = folder_signature.check(bundle, key)
        if junit is not None and len(bundles) > 1:
            raise ConfigError(
                f"a JUnit file can describe only one bundle (found {len(bundles)} parts)",
                location="--junit",
                hint="Verify each part separately, or remove --junit.",
            )
        has_parts = bundle.resolve() not in (folder.resolve() for folder in bundles)  # a generative model
        for folder, manifest in bundles.items():
            checks.append(_check(folder, manifest, bundle / folder.name if has_parts else bundle))
    except OptexportError as error:
        github.publish(bundle.name, None, error)
        report_junit.write(junit, None, error)
        raise
    for check in checks:
        github.publish(check.folder.name, check.record, check.failure)
        report_junit.write(junit, check.record, check.failure)
    failure = next((check.failure for check in checks if check.failure is not None), None)
    if as_json:
        documents = {check.folder.name: check.as_json() for check in checks}
        result = {"parts": documents} if has_parts else documents[bundle.name]
        print_json({**outcome(failure), "signature_checked": key is not None, **result})
    if failure is not None:
        raise failure
    if not as_json:
        signed = "" if key is None else f"signed with the key of {key}, "
        for check in checks:
            echo(f"{check.folder}: OK ({signed}files unchanged; {check.summary()})")
        if key is None and (bundle / SIGNATURE).exists():
            echo("The signature was not checked. To check it: --key PUBLIC.pem")


@dataclass(frozen=True)
class _BundleCheck:
    """Result of the checks of one bundle.

    Attributes:
        folder: Its folder, as the user wrote it.
        unchecked: Gates that were not checked.
        failures: Outputs that differ from the stored outputs.
        gates: Failed gates.
        fixed: Formats of files that work at the traced shape only.
    """

    folder: Path
    checker: ParityChecker
    record: ParityRecord
    unchecked: list[str]
    failures: list[str]
    gates: list[str]
    fixed: Sequence[str]

    @property
    def failure(self) -> OptexportError | None:
        location, details = str(self.folder), "\n".join(self.failures + self.gates)
        if self.failures:
            return ParityError("the files do not reproduce the stored outputs", location=location, details=details)
        if self.gates:
            return GateError("the files no longer meet their gates", location=location, details=details)
        return None

    def as_json(self) -> dict[str, Any]:
        rows = [{"target": p.target, "output": o.output, "max_abs": o.max_abs,
                 "limit": o.limit if math.isfinite(o.limit) else None, "passed": o.passed}
                for p in self.checker.targets[1:] for o in p.outputs]  # fmt: skip
        gates = {"gates": self.gates, "gates_not_checked": self.unchecked}
        return {"targets": rows, **gates, "parity": self.record.model_dump(mode="json")}

    def _name(self, target: TargetParity) -> str:
        is_fixed = target.target.partition("-")[0] in self.fixed
        return f"{target.target} (traced shape only)" if is_fixed else target.target

    def summary(self) -> str:
        """Returns a description of the checks that passed."""
        targets = self.checker.targets[1:]
        exact = [self._name(target) for target in targets if target.precision is None]
        lowered = [target.title for target in targets if target.precision is not None]
        texts = [f"stored outputs reproduced by {', '.join(exact)}"] if exact else []
        if lowered:
            result = "gates met by" if self.checker.gates else "no gate to check for"
            texts.append(f"{result} {', '.join(lowered)}")
        texts += [f"not checked again: {'; '.join(self.unchecked)}"] if self.unchecked else []
        return "; ".join(texts)


def _check(folder: Path, manifest: Manifest, shown_folder: Path) -> _BundleCheck:
    from optexport.parity.record import parity_record
    from optexport.parity.verify import check_files, list_unchecked_gates

    checker = check_files(folder, manifest)
    targets = checker.targets[1:]
    failures = [
        f"{p.target}: {on_one_line(o.output)}, {o.failure}" for p in targets for o in p.outputs if o.failure is not None
    ]
    gates = [f"{p.target}: {d.failure}" for p in targets for d in p.gate_results if d.failure is not None]
    fixed = [artifact.format for artifact in manifest.artifacts if artifact.fixed_shape is not None]
    record, unchecked = parity_record(checker), list_unchecked_gates(manifest)
    return _BundleCheck(shown_folder, checker, record, unchecked, failures, gates, fixed)
