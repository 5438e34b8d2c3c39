"""A bundle that could not be sent is sent later: whole, once, and left as it was."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlflow
import pytest

from optexport.bundle import digests as bundle_files
from optexport.bundle.signing.signature import check, sign
from optexport.errors import BundleError, TrackingError
from optexport.pipeline import run as pipeline_run
from optexport.report.html import page
from optexport.tracking.resume import log_bundle
from tests._helpers import exports, signed, stores
from tests.tracking.bundles import QUIET, Change, bundle, registering, runs, timed

pytestmark = QUIET


def digests(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


def histories(uri: str, run_id: str, names: set[str]) -> dict[str, list[tuple[int, float]]]:
    client = mlflow.MlflowClient(uri)
    return {name: [(m.step, m.value) for m in client.get_metric_history(run_id, name)] for name in names}


def peak(size: int) -> Change:
    """Has the measurements say how much memory the ONNX file took."""

    def change(document: dict[str, Any]) -> None:
        timed(1.0, 1.5)(document)
        document["bench"]["figures"][0]["peak_memory_bytes"] = size

    return change


def test_a_bundle_is_sent_whole_and_stays_as_it_is(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path, measurements=timed(1.0, 1.5))
    before = digests(place)
    logged = log_bundle(place, uri)
    assert digests(place) == before
    (run,) = runs(uri)
    assert (run.info.run_id, run.info.status, logged.before) == (logged.run_id, "FINISHED", False)
    assert run.data.tags["torch"] == exports.exported().manifest.versions["torch"]
    assert run.info.run_name == exports.exported().output.name
    assert run.data.params["export.formats"]
    assert run.data.metrics["bench.onnx.batch_1.p50_ms"] == 1.25
    downloaded = Path(mlflow.MlflowClient(uri).download_artifacts(logged.run_id, "bundle", str(tmp_path)))
    assert bundle_files.read_manifest(downloaded) == bundle_files.read_manifest(place)
    (output,) = run.outputs.model_outputs
    batch = {name: tensor.numpy() for name, tensor in exports.batch(3, 7).items()}
    assert mlflow.pyfunc.load_model(f"models:/{output.model_id}").predict(batch)["hidden"].shape == (3, 7, 8)


@pytest.mark.slow
def test_a_signed_bundle_is_sent_with_its_signature(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    page.write(place)
    private, public = signed.pair(tmp_path)
    sign(place, private)
    logged = log_bundle(place, uri)
    downloaded = Path(mlflow.MlflowClient(uri).download_artifacts(logged.run_id, "bundle", str(tmp_path)))
    check(downloaded, public)


def test_what_is_there_is_not_sent_again(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path, manifest=registering())
    first, second = log_bundle(place, uri), log_bundle(place, uri)
    assert (first.run_id, first.before, second.before) == (second.run_id, False, True)
    assert first.registered == second.registered
    (run,) = runs(uri)
    assert len(run.outputs.model_outputs) == 1
    assert len(mlflow.MlflowClient(uri).search_model_versions("name = 'block'")) == 1


@pytest.mark.slow
def test_a_report_that_was_written_again_makes_no_other_run_of_it(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    first = log_bundle(place, uri)
    before = (place / "measurements.json").read_bytes()
    (place / "report.html").write_text("an older one")
    page.write(place)
    assert (place / "measurements.json").read_bytes() != before
    again = log_bundle(place, uri)
    assert (again.run_id, again.before) == (first.run_id, True)


@pytest.mark.slow
def test_two_runs_of_equal_files_are_two_runs(tmp_path: Path) -> None:
    """Their manifests are the same to the byte; what was measured tells them apart."""
    uri = stores.store(tmp_path)
    one, other = bundle(tmp_path), bundle(tmp_path)
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()
    assert log_bundle(one, uri).run_id != log_bundle(other, uri).run_id
    assert len({run.data.tags["optexport.bundle"] for run in runs(uri)}) == 1


def test_a_run_that_stopped_half_way_is_completed_and_not_doubled(tmp_path: Path) -> None:
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
    logged = log_bundle(result.output, uri)
    assert (logged.run_id, logged.before) == (result.run_id, False)
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
def test_a_run_that_stopped_at_its_very_end_gets_nothing_twice(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    place = bundle(tmp_path, measurements=timed(1.0, 1.5))
    run_id = log_bundle(place, uri).run_id
    (first,) = runs(uri)
    names = set(first.data.metrics)
    before = histories(uri, run_id, names)
    client = mlflow.MlflowClient(uri)
    client.update_run(run_id, "RUNNING")  # all was sent but for its end
    again = log_bundle(place, uri)
    assert (again.run_id, again.before) == (run_id, False)
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
def test_of_two_that_send_it_at_once_one_finds_it_there(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(log_bundle, [place, place], [uri, uri]))
    assert sorted(each.before for each in done) == [False, True]
    assert len(runs(uri)) == 1


@pytest.mark.slow
def test_a_run_that_someone_deleted_is_not_continued(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    first = log_bundle(place, uri)
    mlflow.MlflowClient(uri).delete_run(first.run_id)
    assert log_bundle(place, uri).run_id != first.run_id


@pytest.mark.slow
def test_a_bundle_of_another_store_gets_a_run_of_its_own(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    place = bundle(
        tmp_path, measurements=lambda m: m.update(origin={"git": {"commit": "c0ffee"}, "mlflow_run": "0" * 32})
    )
    logged = log_bundle(place, uri)
    (run,) = runs(uri)
    assert run.info.run_id == logged.run_id
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"


def test_a_bundle_that_was_changed_is_not_sent(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    (place / "graph_after.txt").write_text("another graph")
    with pytest.raises(BundleError, match=r"graph_after\.txt"):
        log_bundle(place, uri)
    assert runs(uri) == []


@pytest.mark.slow
@pytest.mark.parametrize("status", ["FINISHED", "RUNNING"])
def test_a_run_that_holds_something_else_is_not_taken_for_the_bundles(tmp_path: Path, status: str) -> None:
    """Whoever writes a bundle may name any run, whose model would be registered as the bundle's."""
    uri = stores.store(tmp_path)
    client = mlflow.MlflowClient(uri)
    other = client.create_run(client.create_experiment("theirs"))
    if status == "FINISHED":
        client.set_terminated(other.info.run_id)
    earlier = log_bundle(bundle(tmp_path), uri)
    for known in (other.info.run_id, earlier.run_id):
        place = bundle(tmp_path, measurements=lambda m, run=known: m["origin"].update(mlflow_run=run))  # type: ignore[misc]
        logged = log_bundle(place, uri)
        assert not logged.before
        assert logged.run_id not in (other.info.run_id, earlier.run_id)
    found = client.get_run(other.info.run_id)
    assert (found.info.status, found.data.params, found.data.metrics) == (status, {}, {})


@pytest.mark.slow
def test_what_mlflow_cannot_be_told_is_the_bundles_fault_before_anything_is_sent(tmp_path: Path) -> None:
    uri = stores.store(tmp_path)
    place = bundle(tmp_path, manifest=lambda document: document["versions"].pop("onnx"))
    with pytest.raises(BundleError, match="MLflow cannot be told of it: KeyError: 'onnx'"):
        log_bundle(place, uri)
    assert runs(uri) == []


@pytest.mark.slow
def test_figures_that_cannot_be_drawn_are_the_bundles_fault_and_not_the_stores(tmp_path: Path) -> None:
    """They were drawn only when half was sent, and the store was to be asked again for ever."""
    uri, place = stores.store(tmp_path), bundle(tmp_path, measurements=timed(1.0, 1.7e308))
    with pytest.raises(BundleError, match="MLflow cannot be told of it: .*[Oo]verflow"):
        log_bundle(place, uri)
    assert runs(uri) == []


@pytest.mark.slow
def test_a_bundle_whose_onnx_file_is_none_is_at_fault_and_not_the_store(tmp_path: Path) -> None:
    uri, place = stores.store(tmp_path), bundle(tmp_path)
    (place / "model.onnx").write_bytes(b"no model of ONNX's")
    exports.reseal(place, "model.onnx")
    with pytest.raises(BundleError, match="MLflow cannot be told of it: DecodeError"):
        log_bundle(place, uri)
    assert runs(uri) == []


def failing(document: dict[str, Any]) -> None:
    for output in document["parity"]["targets"][0]["outputs"]:
        output["cases"][0] |= {"failure": "wrong", "distance": 123.0}


@pytest.mark.slow
def test_a_bundle_that_says_of_itself_that_it_failed_is_not_sent(tmp_path: Path) -> None:
    """It got the alias, and no honest version could be compared with it afterwards."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(BundleError, match="no bundle that passed says so"):
        log_bundle(bundle(tmp_path, manifest=failing), uri)
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_files_of_a_database_go_where_they_are_told_to(tmp_path: Path) -> None:
    """Beside the config that names it, as those of a run; a URI that names a file has its own place."""
    place, beside = bundle(tmp_path), tmp_path / "beside"
    beside.mkdir()
    log_bundle(place, "sqlite:///mlflow.db", None, beside)
    assert (beside / "mlflow.db").exists()
    assert (beside / "mlartifacts").is_dir()


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_one_error(tmp_path: Path) -> None:
    place = bundle(tmp_path)
    with pytest.raises(TrackingError, match="The bundle is whole on disk") as caught:
        log_bundle(place, f"sqlite:///{tmp_path}/no such folder/mlflow.db")
    assert caught.value.exit_code == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"measurements": lambda m: m.update(date="yesterday")}, r"measurements\.json: its date is none"),
        ({"measurements": lambda m: m.update(date="0001-01-01T00:00:00")}, r"measurements\.json: its date is"),
        ({"measurements": lambda m: m.update(date="0001-01-01T00:00:00+14:00")}, r"measurements\.json: its date is"),
        ({"measurements": lambda m: m.update(date="1969-12-31T23:59:59+00:00")}, r"its date is before 1970"),
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
def test_a_bundle_of_another_form_is_to_blame_and_not_the_store(
    tmp_path: Path, changes: dict[str, Change], told: str
) -> None:
    """Whoever changed a document may have made its digest fit."""
    uri, place = stores.store(tmp_path), bundle(tmp_path, **changes)
    with pytest.raises(BundleError, match=told):
        log_bundle(place, uri)
    assert runs(uri) == []
