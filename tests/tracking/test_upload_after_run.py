"""Tests the upload of a bundle after its run: complete, once, and without changes to it."""

from __future__ import annotations

import datetime
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pytest

import optexport
from optexport.bundle import digests as bundle_files
from optexport.bundle.digests import read_manifest_only
from optexport.bundle.measurements import read_measured
from optexport.bundle.signing.folder_signature import check, sign
from optexport.errors import BundleError, ConfigError, TrackingError
from optexport.pipeline import run as pipeline_run
from optexport.report.html import page
from optexport.tracking.upload import upload_bundle
from tests._helpers import exports, signed, stores
from tests.tracking.bundles import QUIET, Change, bundle, registering, runs, timed

pytestmark = QUIET


def digests(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def histories(uri: str, run_id: str, names: set[str]) -> dict[str, list[tuple[int, float]]]:
    client = mlflow.MlflowClient(uri)
    return {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in names}


def peak(size: int) -> Change:
    """Returns a change that records the peak memory of the ONNX file."""

    def change(document: dict[str, Any]) -> None:
        timed(1.0, 1.5)(document)
        document["bench"]["figures"][0]["peak_memory_bytes"] = size

    return change


def test_a_bundle_is_uploaded_completely_and_stays_unchanged(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path, measurements=timed(1.0, 1.5))
    before = digests(target)
    logged = upload_bundle(target, uri)
    assert digests(target) == before
    (run,) = runs(uri)
    assert (run.info.run_id, run.info.status, logged.already_uploaded) == (logged.run_id, "FINISHED", False)
    manifest, measured = read_manifest_only(target), read_measured(target)
    assert f"torch {manifest.versions['torch']}," in run.data.tags["optexport.versions"]
    date = datetime.datetime.fromisoformat(measured.date).astimezone()
    assert run.info.run_name == f"{exports.exported().output.name} {date:%Y-%m-%d %H:%M:%S}"
    assert run.data.params["export.formats"]
    assert run.data.metrics["latency/onnx_ms"] == 1.25
    downloaded = Path(mlflow.MlflowClient(uri).download_artifacts(logged.run_id, "bundle", str(tmp_path)))
    assert bundle_files.read_manifest(downloaded) == bundle_files.read_manifest(target)
    (output,) = run.outputs.model_outputs
    batch = {name: tensor.numpy() for name, tensor in exports.batch(3, 7).items()}
    assert mlflow.pyfunc.load_model(f"models:/{output.model_id}").predict(batch)["hidden"].shape == (3, 7, 8)


def test_a_signature_that_is_made_later_is_added(tmp_path: Path) -> None:
    """The upload said "already uploaded", and MLflow had no signature."""
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    first = upload_bundle(target, uri)
    private, public = signed.pair(tmp_path)
    sign(target, private)
    second = upload_bundle(target, uri)
    assert (second.run_id, second.already_uploaded) == (first.run_id, False)
    assert upload_bundle(target, uri).already_uploaded
    copy = mlflow.artifacts.download_artifacts(run_id=first.run_id, artifact_path="bundle", tracking_uri=uri)
    assert check(Path(copy), public)


@pytest.mark.slow
def test_a_signed_bundle_is_uploaded_with_its_signature(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    page.write(target)
    private, public = signed.pair(tmp_path)
    sign(target, private)
    logged = upload_bundle(target, uri)
    downloaded = Path(mlflow.MlflowClient(uri).download_artifacts(logged.run_id, "bundle", str(tmp_path)))
    check(downloaded, public)


def test_an_uploaded_bundle_is_not_uploaded_again(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path, manifest=registering())
    first, second = upload_bundle(target, uri), upload_bundle(target, uri)
    assert (first.run_id, first.already_uploaded, second.already_uploaded) == (second.run_id, False, True)
    assert first.registered == second.registered
    (run,) = runs(uri)
    assert len(run.outputs.model_outputs) == 1
    assert len(mlflow.MlflowClient(uri).search_model_versions("name = 'block'")) == 1


@pytest.mark.slow
def test_a_rewritten_report_does_not_create_another_run(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    first = upload_bundle(target, uri)
    before = (target / "measurements.json").read_bytes()
    (target / "report.html").write_text("an older one")
    page.write(target)
    assert (target / "measurements.json").read_bytes() != before
    again = upload_bundle(target, uri)
    assert (again.run_id, again.already_uploaded) == (first.run_id, True)


@pytest.mark.slow
def test_equal_files_of_two_runs_stay_two_runs(tmp_path: Path) -> None:
    """Their manifests are equal, but their measurements differ."""
    uri = stores.store(tmp_path)
    first, second = bundle(tmp_path), bundle(tmp_path)
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    assert upload_bundle(first, uri).run_id != upload_bundle(second, uri).run_id
    assert len({run.data.tags["optexport.bundle"] for run in runs(uri)}) == 1


def test_a_half_finished_run_is_completed_and_not_duplicated(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    config = stores.project(tmp_path, uri)
    config.write_text(f'{config.read_text()}[register]\nname = "block"\n')
    (tmp_path / "mlartifacts").write_text("a file where a folder should be")
    result = pipeline_run.run(config)
    assert result.tracking_failure is not None
    assert f"optexport upload {result.output} --config {config}" in str(result.tracking_failure)
    (half,) = runs(uri, "tracked")
    assert half.info.status == "FAILED"
    (tmp_path / "mlartifacts").unlink()
    before = digests(result.output)
    logged = upload_bundle(result.output, uri)
    assert (logged.run_id, logged.already_uploaded) == (result.run_id, False)
    assert digests(result.output) == before
    (run,) = runs(uri, "tracked")
    assert (run.info.run_id, run.info.status) == (result.run_id, "FINISHED")
    assert "optexport.failure" not in run.data.tags
    assert run.data.tags["mlflow.source.name"] == "optexport"
    client = mlflow.MlflowClient(uri)
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]
    assert model.status == "READY"
    (version,) = client.search_model_versions("name = 'block'")
    assert (version.run_id, version.source) == (run.info.run_id, f"models:/{model.model_id}")


@pytest.mark.slow
def test_a_run_stopped_at_its_end_gets_no_duplicates(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    target = bundle(tmp_path, measurements=timed(1.0, 1.5))
    run_id = upload_bundle(target, uri).run_id
    (first,) = runs(uri)
    names = set(first.data.metrics)
    before = histories(uri, run_id, names)
    client = mlflow.MlflowClient(uri)
    client.update_run(run_id, "RUNNING")  # everything was uploaded except its end
    again = upload_bundle(target, uri)
    assert (again.run_id, again.already_uploaded) == (run_id, False)
    assert histories(uri, run_id, names) == before
    (run,) = runs(uri)
    assert run.data.metrics == first.data.metrics
    assert run.outputs.model_outputs == first.outputs.model_outputs
    assert run.inputs.dataset_inputs == first.inputs.dataset_inputs
    for name in json.loads(run.data.tags["mlflow.loggedArtifacts"]):
        rows = len(client.load_table(run.info.experiment_id, name["path"], [run_id]))
        table = json.loads(Path(client.download_artifacts(run_id, name["path"], str(tmp_path))).read_text())
        assert rows == len(table["data"]) > 0


@pytest.mark.slow
def test_two_simultaneous_uploads_create_one_run(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        uploads = list(pool.map(upload_bundle, [target, target], [uri, uri]))
    assert sorted(logged.already_uploaded for logged in uploads) == [False, True]
    assert len(runs(uri)) == 1


@pytest.mark.slow
def test_a_deleted_run_is_not_continued(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    first = upload_bundle(target, uri)
    mlflow.MlflowClient(uri).delete_run(first.run_id)
    assert upload_bundle(target, uri).run_id != first.run_id


@pytest.mark.slow
def test_a_bundle_of_another_store_gets_its_own_run(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    target = bundle(
        tmp_path, measurements=lambda m: m.update(origin={"git": {"commit": "c0ffee"}, "mlflow_run": "0" * 32})
    )
    logged = upload_bundle(target, uri)
    (run,) = runs(uri)
    assert run.info.run_id == logged.run_id
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"


def test_a_changed_bundle_is_not_uploaded(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    (target / "graph_after.txt").write_text("another graph")
    with pytest.raises(BundleError, match=r"graph_after\.txt"):
        upload_bundle(target, uri)
    assert runs(uri) == []


@pytest.mark.slow
@pytest.mark.parametrize("status", ["FINISHED", "RUNNING"])
def test_an_unrelated_run_is_not_taken_for_the_bundles_run(tmp_path: Path, status: str) -> None:
    """A bundle may name any run, and the model of that run would be registered."""
    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    unrelated = client.create_run(client.create_experiment("theirs"))
    if status == "FINISHED":
        client.set_terminated(unrelated.info.run_id)
    earlier = upload_bundle(bundle(tmp_path), uri)
    for run_id in (unrelated.info.run_id, earlier.run_id):
        target = bundle(tmp_path, measurements=lambda m, run=run_id: m["origin"].update(mlflow_run=run))  # type: ignore[misc]
        logged = upload_bundle(target, uri)
        assert not logged.already_uploaded
        assert logged.run_id not in (unrelated.info.run_id, earlier.run_id)
    run = client.get_run(unrelated.info.run_id)
    assert (run.info.status, run.data.params, run.data.metrics) == (status, {}, {})


@pytest.mark.slow
def test_a_bundle_unfit_for_mlflow_fails_before_the_upload(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    target = bundle(tmp_path, manifest=lambda document: document["versions"].pop("onnx"))
    with pytest.raises(BundleError, match=r"cannot be converted for MLflow \(KeyError: 'onnx'\)"):
        upload_bundle(target, uri)
    assert runs(uri) == []


@pytest.mark.slow
def test_undrawable_figures_are_a_bundle_error(tmp_path: Path) -> None:
    """They failed in the middle of the upload, and so did every retry."""
    uri, target = stores.store(tmp_path), bundle(tmp_path, measurements=timed(1.0, 1.7e308))
    with pytest.raises(BundleError, match="cannot be converted for MLflow .*[Oo]verflow"):
        upload_bundle(target, uri)
    assert runs(uri) == []


@pytest.mark.slow
def test_an_invalid_onnx_file_is_a_bundle_error(tmp_path: Path) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    (target / "model.onnx").write_bytes(b"no model of ONNX's")
    exports.reseal(target, "model.onnx")
    with pytest.raises(BundleError, match=r"cannot be converted for MLflow \(DecodeError"):
        upload_bundle(target, uri)
    assert runs(uri) == []


def failing(document: dict[str, Any]) -> None:
    for output in document["parity"]["targets"][0]["outputs"]:
        output["cases"][0] |= {"failure": "wrong", "distance": 123.0}


@pytest.mark.slow
def test_a_bundle_with_recorded_failures_is_not_uploaded(tmp_path: Path) -> None:
    """The bundle got the alias, and no correct version could be compared with it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(BundleError, match="the figures contradict a passed check"):
        upload_bundle(bundle(tmp_path, manifest=failing), uri)
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_database_files_are_written_to_the_requested_folder(tmp_path: Path) -> None:
    """A relative URI refers to the config's folder, as in a run."""
    target, folder = bundle(tmp_path), tmp_path / "beside"
    folder.mkdir()
    upload_bundle(target, "sqlite:///mlflow.db", None, folder)
    assert (folder / "mlflow.db").exists()
    assert (folder / "mlartifacts").is_dir()


@pytest.mark.slow
def test_an_unreachable_store_is_one_error(tmp_path: Path) -> None:
    target = bundle(tmp_path)
    with pytest.raises(TrackingError, match="The bundle on disk is complete") as caught:
        upload_bundle(target, f"sqlite:///{tmp_path}/no such folder/mlflow.db")
    assert caught.value.exit_code == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"measurements": lambda m: m.update(date="yesterday")}, r"measurements\.json: the date is not valid"),
        ({"measurements": lambda m: m.update(date="0001-01-01T00:00:00")}, r"measurements\.json: the date is"),
        ({"measurements": lambda m: m.update(date="0001-01-01T00:00:00+14:00")}, r"measurements\.json: the date is"),
        ({"measurements": lambda m: m.update(date="1969-12-31T23:59:59+00:00")}, r"the date is before 1970"),
        ({"measurements": timed(1.0, 1.5, cpus=10**400)}, r"measurements\.json: .* cpus"),
        ({"measurements": peak(10**400)}, r"measurements\.json: .* bench\.figures\.0\.peak_memory_bytes"),
        ({"measurements": peak(-1)}, r"measurements\.json: .* bench\.figures\.0\.peak_memory_bytes"),
        ({"measurements": lambda m: m["seconds"].update(trace=10**400)}, r"measurements\.json: .* seconds\.trace"),
        ({"manifest": lambda m: m.update(nodes_before=10**400)}, r"manifest\.json: .* nodes_before"),
        ({"measurements": lambda m: m.update(seconds=["long"])}, r"measurements\.json: .* seconds"),
        ({"measurements": lambda m: m.update(origin={"git": 5})}, r"measurements\.json: .* origin\.git"),
        ({"manifest": lambda m: m["config"].pop("tracking")}, r"manifest\.json: .* tracking"),
        ({"manifest": lambda m: m["config"].update(register="x")}, r"manifest\.json: .* register"),
    ],
)
def test_malformed_documents_are_a_bundle_error(tmp_path: Path, changes: dict[str, Change], problem: str) -> None:
    """An edited document may have a matching digest."""
    uri, target = stores.store(tmp_path), bundle(tmp_path, **changes)
    with pytest.raises(BundleError, match=problem):
        upload_bundle(target, uri)
    assert runs(uri) == []


def test_python_uploads_like_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, target = stores.store(tmp_path), bundle(tmp_path)
    with pytest.raises(ConfigError, match="no MLflow store is set"):
        optexport.upload(target)
    with pytest.raises(ConfigError, match="uri"):
        optexport.upload(target, "ftp://host")
    for name in (3, ""):
        with pytest.raises(ConfigError, match="experiment: .* is not the name of an experiment"):
            optexport.upload(target, uri, experiment=name)  # type: ignore[arg-type]
    first = optexport.upload(target, uri, experiment="mine")
    assert not first.already_uploaded
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    again = optexport.upload(str(target), experiment="mine")
    assert (again.run_id, again.already_uploaded) == (first.run_id, True)
