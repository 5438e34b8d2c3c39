"""The command ``optexport verify``, which checks files, signature and outputs of a bundle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, junit_option, key_option, outcome, print_json
from optexport.cli._option_names import name_options
from optexport.errors import ConfigError, OptexportError

if TYPE_CHECKING:
    from optexport.parity.verified import Verified


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
    from optexport.parity.record import parity_record
    from optexport.parity.verify import check_files
    from optexport.report import github
    from optexport.report import junit as report_junit

    report_junit.start(junit, [bundle])
    checks: list[Verified] = []
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
            checks.append(check_files(folder, manifest, bundle / folder.name if has_parts else bundle))
            checks[-1].key = key
    except OptexportError as error:
        name_options(error)
        github.publish(bundle.name, None, error)
        report_junit.write(junit, None, error)
        raise
    for check in checks:
        record = parity_record(check)
        github.publish(check.folder.name, record, check.failure)
        report_junit.write(junit, record, check.failure)
    failure = next((check.failure for check in checks if check.failure is not None), None)
    if as_json:
        documents = {check.folder.name: _as_json(check) for check in checks}
        result = {"parts": documents} if has_parts else documents[bundle.name]
        print_json({**outcome(failure), "signature_checked": key is not None, **result})
    if failure is not None:
        raise failure
    if not as_json:
        for check in checks:
            echo(check.summary().rstrip("\n"))
        if key is None and (bundle / SIGNATURE).exists():
            echo("The signature was not checked. To check it: --key PUBLIC.pem")


def _as_json(check: Verified) -> dict[str, Any]:
    from optexport.parity.record import parity_record

    rows = [{"target": p.target, "output": o.output, "max_abs": o.max_abs,
             "limit": o.limit if math.isfinite(o.limit) else None, "passed": o.passed}
            for p in check.targets[1:] for o in p.outputs]  # fmt: skip
    gates = {"gates": check.gate_failures, "gates_not_checked": check.unchecked}
    return {"targets": rows, **gates, "parity": parity_record(check).model_dump(mode="json")}
