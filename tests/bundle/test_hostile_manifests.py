"""Tampered manifests with valid digests: each is verified or refused, without a crash."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper
from onnx.external_data_helper import set_external_data
from safetensors.torch import load_file, save_file

from optexport.bench.artifact import find_bundle
from optexport.bundle import digest_json, digests
from optexport.bundle.layout import MANIFEST, MEASUREMENTS, REFERENCE
from optexport.diagnosis.bundle import diagnose_bundle
from optexport.errors import BundleError, OptexportError
from optexport.exporters.onnx.external_data import check_locations
from optexport.parity.verify import list_unchecked_gates, verify
from tests._helpers import exports
from tests.tiers import examples

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def every_place(value: Any, target: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each value inside a document."""
    if target:
        yield target
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        yield from every_place(entry, (*target, key))


def put(document: Any, target: tuple[Any, ...], value: Any) -> None:
    *parents, last = target
    for key in parents:
        document = document[key]
    document[last] = value


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a bundle that tests may change, if they restore it."""
    folder = tmp_path_factory.mktemp("small") / "bundle"
    return Path(shutil.copytree(exports.exported().output, folder))


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.data())
def test_changed_manifest_is_verified_or_refused(small: Path, data: st.DataObject) -> None:
    contents = {name: (small / name).read_bytes() for name in (MANIFEST, MEASUREMENTS)}
    document = json.loads(contents[MANIFEST])
    # Only these fields affect results; the others are text.
    guarded = [
        p for p in every_place(document) if p[0] in ("parity", "artifacts", "files", "inputs", "outputs", "dims")
    ]
    target = data.draw(st.sampled_from(guarded))
    value = data.draw(ANYTHING)
    try:
        exports.edit_json(small / MANIFEST, lambda manifest: put(manifest, target, value))
        verify(small)
        list_unchecked_gates(digests.read_manifest(small))
    except OptexportError:
        pass
    finally:
        for name, content in contents.items():
            (small / name).write_bytes(content)


def test_oversized_manifest_is_not_read(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(small, folder)
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(digest_json.LARGEST + 1)  # a sparse file takes no space on disk
    with pytest.raises(BundleError, match="the file is too large"):
        digests.read_manifest(folder)


def test_two_files_of_one_format_are_refused(small: Path, tmp_path: Path) -> None:
    """Only the last of two files was verified, but `log` uploaded the first and `blame` ran it."""
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))
    shutil.copyfile(bundle / "model.onnx", bundle / "good.onnx")

    def twice(document: dict[str, Any]) -> None:
        onnx = next(record for record in document["artifacts"] if record["format"] == "onnx")
        document["artifacts"].append(onnx | {"path": "good.onnx"})

    exports.edit_json(bundle / MANIFEST, twice)
    for command in (verify, diagnose_bundle):
        with pytest.raises(BundleError, match="two artifacts have the same format"):
            command(bundle)


def test_file_with_the_extension_of_another_format_is_refused(small: Path, tmp_path: Path) -> None:
    """ONNX Runtime reads an ONNX file with an appended archive, and torch reads the archive."""
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))

    def renamed(document: dict[str, Any]) -> None:
        document["artifacts"] = [
            record | {"path": "model.pt2"} for record in document["artifacts"] if record["format"] == "onnx"
        ]

    exports.edit_json(bundle / MANIFEST, renamed)
    for command in (verify, diagnose_bundle):
        with pytest.raises(BundleError, match=r"onnx must end with \.onnx \(found 'model\.pt2'\)"):
            command(bundle)


def test_model_file_without_a_manifest_entry_is_refused(small: Path, tmp_path: Path) -> None:
    """Such a file was in the bundle and unchanged, but verify did not run it."""
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))

    def left_out(document: dict[str, Any]) -> None:
        document["artifacts"] = [record for record in document["artifacts"] if record["format"] != "onnx"]

    exports.edit_json(bundle / MANIFEST, left_out)
    with pytest.raises(BundleError, match=r"model\.onnx: the manifest does not list this model file as an artifact"):
        verify(bundle)


def test_false_fixed_shape_claim_is_refused(small: Path, tmp_path: Path) -> None:
    """With one changed line in the manifest, a file was compared at the traced size only."""
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))

    def fixed(document: dict[str, Any]) -> None:
        document["artifacts"][0]["fixed_shape"] = "TorchScript was traced"

    exports.edit_json(bundle / MANIFEST, fixed)
    with pytest.raises(
        BundleError, match="torchscript is recorded with a fixed shape, but its parity record has the case "
    ):
        verify(bundle)


def _fewer_cases(document: dict[str, Any]) -> None:
    document["reference_cases"] = document["reference_cases"][:1]


def _no_place(document: dict[str, Any]) -> None:
    document["parity"]["targets"] = [p for p in document["parity"]["targets"] if p["target"] != "torchscript"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_fewer_cases, "the file has more cases than the manifest lists"),
        (_no_place, "the manifest has no parity record of torchscript"),
    ],
)
def test_manifest_that_omits_verified_results_is_refused(
    change: Callable[[dict[str, Any]], None], error: str, small: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))
    exports.edit_json(bundle / MANIFEST, change)
    with pytest.raises(BundleError, match=error):
        verify(bundle)


@pytest.mark.parametrize("name", ["reference.safetensors", "model.onnx", "measurements.json"])
def test_commands_refuse_pipes_and_links(small: Path, tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        bundle = Path(shutil.copytree(small, tmp_path / "bundle", dirs_exist_ok=True))
        (bundle / name).unlink()
        make(bundle / name)
        for command in (verify, diagnose_bundle):
            with pytest.raises(BundleError, match="a bundle may contain only regular files and folders, not links"):
                command(bundle)
        (bundle / name).unlink()


def test_pipe_named_manifest_json_is_not_a_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    assert find_bundle(tmp_path / "model.onnx") is None


def test_blame_reads_no_file_outside_the_bundle(small: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(small, tmp_path / "bundle"))
    outside = tmp_path / "private.onnx"
    shutil.copyfile(bundle / "model.onnx", outside)

    def elsewhere(document: dict[str, Any]) -> None:
        for record in document["artifacts"]:
            if record["format"] == "onnx":
                record["path"] = str(outside)

    exports.edit_json(bundle / MANIFEST, elsewhere)
    with pytest.raises(BundleError, match=r"private\.onnx', which is not a file of the bundle"):
        diagnose_bundle(bundle)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(data=st.data())
def test_changed_reference_tensors_are_compared_or_refused(small: Path, data: st.DataObject) -> None:
    path, manifest = small / REFERENCE, small / MANIFEST
    contents = {entry: entry.read_bytes() for entry in (path, manifest, small / MEASUREMENTS)}
    tensors = load_file(path)
    key = data.draw(st.sampled_from(sorted(tensors)))
    dtypes = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64]
    shape = data.draw(st.lists(st.integers(0, 3), max_size=5) | st.just([1] * 60))
    tensors[key] = torch.ones(shape, dtype=data.draw(st.sampled_from(dtypes)))
    save_file(tensors, path)
    exports.reseal(small, REFERENCE)
    try:
        for command in (verify, diagnose_bundle):
            with contextlib.suppress(OptexportError):
                command(small)
    finally:
        for entry, content in contents.items():
            entry.write_bytes(content)


def _tensor() -> onnx.TensorProto:
    return numpy_helper.from_array(np.ones(3, np.float32), "held")


def _in_a_branch(model: onnx.ModelProto) -> onnx.TensorProto:
    branch = onnx.GraphProto(name="empty", initializer=[_tensor()])
    node = onnx.helper.make_node("If", ["condition"], ["chosen"], then_branch=branch)
    model.graph.node.append(node)
    return model.graph.node[-1].attribute[0].g.initializer[0]


def _in_a_function(model: onnx.ModelProto) -> onnx.TensorProto:
    node = onnx.helper.make_node("Constant", [], ["held"], value=_tensor())
    model.functions.append(onnx.FunctionProto(name="holds", domain="mine", node=[node]))
    return model.functions[0].node[0].attribute[0].t


def _sparse(model: onnx.ModelProto) -> onnx.TensorProto:
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=_tensor(), dims=[3]))
    return model.graph.sparse_initializer[0].values


def _initializer(model: onnx.ModelProto) -> onnx.TensorProto:
    model.graph.initializer.append(_tensor())
    return model.graph.initializer[-1]


@pytest.mark.sample(10)
@pytest.mark.parametrize("put_in", [_initializer, _in_a_branch, _in_a_function, _sparse])
@pytest.mark.parametrize("location", ["provenance.json", "weights.bin", "report.html\0", "*/_ORT_MEM_ADDR_/*"])
def test_unexpected_location_of_external_weights_is_refused(
    put_in: Callable[[onnx.ModelProto], onnx.TensorProto], location: str, tmp_path: Path
) -> None:
    """Such files were verified without any digest, and diff reported two as equal when their results differed."""
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))
    model = onnx.load(bundle / "model.onnx")
    set_external_data(put_in(model), location)
    (bundle / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="weights are in another file"):
        digests.read_structure(bundle)
    for tensor in tensors(model):
        for entry in tensor.external_data:
            entry.value = "model.onnx.data"
    (bundle / "model.onnx").write_bytes(model.SerializeToString())
    check_locations(bundle / "model.onnx")


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    graphs = [model.graph, *(a.g for n in model.graph.node for a in n.attribute if a.name == "then_branch")]
    for graph in graphs:
        yield from graph.initializer
        yield from (sparse.values for sparse in graph.sparse_initializer)
    yield from (attribute.t for function in model.functions for n in function.node for attribute in n.attribute)


def test_manifest_without_a_dimension_is_refused(tmp_path: Path) -> None:
    """bench raised a KeyError, and verify accepted the manifest."""
    bundle = Path(shutil.copytree(exports.exported().output, tmp_path / "bundle"))

    def rename(document: dict[str, Any]) -> None:
        document["dims"] = {f"un{name}": dim for name, dim in document["dims"].items()}

    exports.edit_json(bundle / MANIFEST, rename)
    with pytest.raises(BundleError, match="does not match its schema: dims lacks the dimensions batch, sequence"):
        digests.read_manifest(bundle)
