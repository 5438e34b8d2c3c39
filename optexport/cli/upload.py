"""The command ``optexport upload``, which uploads a bundle to MLflow."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from optexport.cli._console import echo
from optexport.cli._group import Command, json_option, key_option, outcome, print_json
from optexport.cli._tracking_options import choose_store, config_option, read_config, uri_option


@click.command(cls=Command, examples=["optexport upload build/my-model --uri http://127.0.0.1:5000"])
@click.argument("bundle", type=click.Path(path_type=Path, file_okay=False))
@uri_option
@config_option
@click.option("--experiment", help="The MLflow experiment (default: from --config, or as in the bundle).")
@key_option
@json_option
def upload(
    bundle: Path, uri: str | None, config_path: Path | None, experiment: str | None, key: Path | None, as_json: bool
) -> None:
    """Upload BUNDLE to MLflow, unless it was uploaded before.

    Use this if a run ended with exit code 7, or to copy a bundle to another MLflow store. It completes the MLflow run
    whose upload failed, if that exists in the store. It also registers the model if the bundle's config has [register].

    The model is not checked again. Check a bundle of somebody else with --key or with optexport verify first.
    """
    config = read_config(config_path)
    store = choose_store(uri, config_path, config)
    from optexport.bundle.sign import check_signature

    check_signature(bundle, key)
    from optexport.tracking.upload import upload_bundle

    experiment = experiment or (None if config is None else config.tracking.experiment)
    uploaded = upload_bundle(bundle, store, experiment, Path() if config_path is None else config_path.parent)
    failure = None if uploaded.registered is None else uploaded.registered.failure
    if as_json:
        print_json({**outcome(failure), **asdict(uploaded)})
    else:
        state = "already uploaded" if uploaded.already_uploaded else "uploaded"
        registered = [] if uploaded.registered is None else [uploaded.registered.summary]
        echo(f"{bundle}: {state}, MLflow run {uploaded.run_id}")
        for line in [*uploaded.page.splitlines(), *registered]:
            echo(f"  {line}")
    if failure is not None:
        raise failure
