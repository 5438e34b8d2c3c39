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


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@key_option
@junit_option
@json_option
def verify(bundle: Path, key: Path | None, junit: Path | None, as_json: bool) -> None:
    """Check that BUNDLE is unchanged and gives its outputs.

    Its files are run on the stored inputs, and compared with the stored outputs. With --key it has to be signed: no
    file may be another than when it was, and the statement has to be of these files. Of a generative model the folder
    of all parts may be given.
    """
    from optexport.bundle.layout import SIGNATURE
    from optexport.bundle.parts import read_bundles
    from optexport.report import github
    from optexport.report import junit as report_junit

    report_junit.start(junit, [bundle])
    found: list[_Checked] = []
    try:
        if key is None:
            bundles = read_bundles(bundle)
        else:
            from optexport.bundle.signing import signature

            bundles = signature.check(bundle, key)
        if junit is not None and len(bundles) > 1:
            raise ConfigError("it is of one bundle", location="--junit", hint="Verify each part, or leave it out.")
        whole = bundle.resolve() in (target.resolve() for target in bundles)  # not a generative model
        for target, manifest in bundles.items():
            found.append(_check(target, manifest, bundle if whole else bundle / target.name))
    except OptexportError as error:
        github.publish(bundle.name, None, error)
        report_junit.write(junit, None, error)
        raise
    for each in found:
        github.publish(each.shown.name, each.record, each.failed)
        report_junit.write(junit, each.record, each.failed)
    failed = next((each.failed for each in found if each.failed is not None), None)
    if as_json:
        told = {each.shown.name: each.as_json() for each in found}
        print_json(
            {
                **outcome(failed),
                "signature_checked": key is not None,
                **(told[bundle.name] if whole else {"parts": told}),
            }
        )
    if failed is not None:
        raise failed
    if not as_json:
        signed = "" if key is None else f"signed by the key of {key}, "
        for each in found:
            echo(f"{each.shown}: {signed}unchanged, and {each.held()}.")
        if key is None and (bundle / SIGNATURE).exists():
            echo("It holds a signature, which was not looked at: --key PUBLIC.pem does that.")


@dataclass(frozen=True)
class _Checked:
    """Result of the checks of one bundle.

    Attributes:
        shown: Its folder, as the user wrote it.
        unchecked: Gates that were not checked.
        failures: Outputs that differ from the stored outputs.
        gates: Failed gates.
        fixed: Formats of files that work at the traced shape only.
    """

    shown: Path
    proof: ParityChecker
    record: ParityRecord
    unchecked: list[str]
    failures: list[str]
    gates: list[str]
    fixed: Sequence[str]

    @property
    def failed(self) -> OptexportError | None:
        told = "\n  ".join(self.failures + self.gates)
        if self.failures:
            return ParityError(f"the files no longer give the stored outputs\n  {told}", location=str(self.shown))
        if self.gates:
            return GateError(f"the files no longer decide as the stored outputs\n  {told}", location=str(self.shown))
        return None

    def as_json(self) -> dict[str, Any]:
        rows = [{"target": p.target, "output": o.output, "max_abs": o.max_abs,
                 "limit": o.limit if math.isfinite(o.limit) else None, "passed": o.passed}
                for p in self.proof.targets[1:] for o in p.outputs]  # fmt: skip
        held_to = {"gates": self.gates, "gates_not_checked": self.unchecked}
        return {"targets": rows, **held_to, "parity": self.record.model_dump(mode="json")}

    def _where(self, target: TargetParity) -> str:
        return " (at the traced shape alone)" if target.target.partition("-")[0] in self.fixed else ""

    def held(self) -> str:
        """Returns a description of the checks that passed."""
        targets = self.proof.targets[1:]
        near = [p.target + self._where(p) for p in targets if p.precision is None]
        lowered = [p.title for p in targets if p.precision is not None]
        held = [f"{', '.join(near)} give the stored outputs"] if near else []
        if lowered:
            gated = "decide as the gates demand"
            gated = gated if self.proof.gates else "give numbers, which no gate could be held against"
            held.append(f"{', '.join(lowered)} {gated}")
        held += [f"not checked again: {'; '.join(self.unchecked)}"] if self.unchecked else []
        return "; ".join(held)


def _check(folder: Path, manifest: Manifest, shown: Path) -> _Checked:
    from optexport.parity.record import parity_record
    from optexport.parity.verify import prove, unchecked_gates

    proof = prove(folder, manifest)
    targets = proof.targets[1:]
    failures = [
        f"{p.target}: {on_one_line(o.output)}, {o.failure}" for p in targets for o in p.outputs if o.failure is not None
    ]
    gates = [f"{p.target}: {d.failure}" for p in targets for d in p.decisions if d.failure is not None]
    fixed = [artifact.format for artifact in manifest.artifacts if artifact.fixed_shape is not None]
    return _Checked(shown, proof, parity_record(proof), unchecked_gates(manifest), failures, gates, fixed)
