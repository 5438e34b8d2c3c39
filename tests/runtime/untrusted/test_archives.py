"""Opening ``.pt2`` files: files of torch open; files with code do not, and the code never runs."""

from __future__ import annotations

import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._export.serde.schema import SCHEMA_VERSION

from optexport.errors import SourceError
from optexport.runtime.untrusted import archives
from tests._helpers.archives import BATCH, Plain, X, add, edit, malice, refused, replace, saved
from tests._helpers.exports import rezip
from tests._helpers.models import randomise
from tests.tiers import examples


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Strided(nn.Module):
    """Weights that are views of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(24.0).reshape(6, 4)
        self.weight = nn.Parameter(base[1::2].T, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Branching(nn.Module):
    """A graph inside a graph, and arithmetic with sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return y.repeat(2, 1)[: x.shape[0] + 1] * (x.shape[0] // 2)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")
@pytest.mark.parametrize("make", [Plain, Tied, Strided, Branching], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dynamic", [BATCH, None], ids=["dynamic", "static"])
def test_file_saved_by_torch_opens_and_computes_the_same(
    tmp_path: Path, make: Callable[[], nn.Module], dynamic: Any
) -> None:
    model = make().eval() if make is Strided else randomise(make())
    program = archives.load_pt2(saved(model, tmp_path / "model.pt2", dynamic))
    for size in (2, 3, 9) if dynamic else (3,):
        x = torch.randn(size, 4)
        assert torch.equal(program.module()(x=x), model(x=x))


def test_file_with_any_name_opens_without_a_warning(archive: Path, tmp_path: Path) -> None:
    renamed = archive.rename(tmp_path / "model.bin")
    assert torch.equal(archives.load_pt2(renamed).module()(x=X), archives.load_pt2(renamed).module()(x=X))


def test_pickle_with_code_is_refused_in_the_sample_inputs(archive: Path, tmp_path: Path) -> None:
    replace(archive, "sample_inputs/model.pt", malice(tmp_path / "ran"))
    refused(archive, tmp_path / "ran", "the member is a pickle that could run code")


@pytest.mark.parametrize(("kind", "part"), [("weights", "weight_0"), ("constants", "tensor_0")])
def test_pickle_with_code_is_refused_in_weights_and_constants(
    archive: Path, tmp_path: Path, kind: str, part: str
) -> None:
    replace(archive, f"data/{kind}/{part}", malice(tmp_path / "ran"))

    def change(config: dict[str, Any]) -> None:
        for payload in config["config"].values():
            if payload["path_name"] == part:
                payload["use_pickle"] = True

    edit(archive, f"model_{kind}_config.json", change)
    refused(archive, tmp_path / "ran", "pickle that could run code")


@pytest.mark.parametrize("kind", ["weights", "constants"])
def test_pickle_with_code_is_refused_in_the_older_weights_layout(archive: Path, tmp_path: Path, kind: str) -> None:
    add(archive, (f"model/data/{kind}/model.pt", malice(tmp_path / "ran")))
    refused(archive, tmp_path / "ran")


@pytest.mark.parametrize("prefix", ["opaque_obj_", "custom_obj_"])
def test_object_that_only_code_can_load_is_refused(archive: Path, tmp_path: Path, prefix: str) -> None:
    replace(archive, "data/constants/tensor_0", malice(tmp_path / "ran"))
    rezip(
        archive,
        lambda name, content: (
            content.replace(b'"tensor_0"', f'"{prefix}0"'.encode())
            if name.endswith("constants_config.json")
            else content
        ),
    )
    refused(archive, tmp_path / "ran", f"{prefix}0")


def test_compiled_code_is_refused(archive: Path, tmp_path: Path) -> None:
    add(archive, ("model/data/aotinductor/model/code.so", b"\x7fELF"))
    refused(archive, tmp_path / "ran", r"code\.so")


def test_name_in_another_case_is_checked_too(archive: Path, tmp_path: Path) -> None:
    """torch finds the parts of an archive regardless of the case of their names."""
    with zipfile.ZipFile(archive) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(archive, "w") as new:
        for name, content in members:
            sample = name.endswith("sample_inputs/model.pt")
            new.writestr(
                name.replace("inputs/model.pt", "inputs/model.PT"), malice(tmp_path / "ran") if sample else content
            )
    refused(archive, tmp_path / "ran")


@pytest.mark.parametrize("first", [True, False])
def test_duplicate_part_is_refused(archive: Path, tmp_path: Path, first: bool) -> None:
    """Readers of zip files differ in which of the two they return."""
    add(archive, ("model/data/sample_inputs/model.pt", malice(tmp_path / "ran")), first=first)
    refused(archive, tmp_path / "ran")


def test_second_folder_is_refused(archive: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(archive) as old:
        good = [(f"z/{info.filename.partition('/')[2]}", old.read(info)) for info in old.infolist()]
    replace(archive, "sample_inputs/model.pt", malice(tmp_path / "ran"))
    add(archive, *good)
    refused(archive, tmp_path / "ran")


@pytest.mark.parametrize("name", ["version.exe", "byteorder2", "models/model.json.exe", "data/weights/weight_0/x"])
def test_member_with_a_valid_name_and_a_tail_is_refused(archive: Path, tmp_path: Path, name: str) -> None:
    add(archive, (f"model/{name}", b"x"))
    refused(archive, tmp_path / "ran", f"{name}: the archive has a member that torch.export.save does not write")


def test_layout_of_older_releases_is_refused(archive: Path, tmp_path: Path) -> None:
    """torch falls back to it if the archive cannot be read as a new one."""
    with zipfile.ZipFile(archive) as old:
        graph = old.read("model/models/model.json")
    evil = malice(tmp_path / "ran")
    with zipfile.ZipFile(archive, "w") as new:
        new.writestr("model/archive_format", b"pt2")
        new.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
        new.writestr("serialized_exported_program.json", graph)
        for name in ("state_dict", "constants", "example_inputs"):
            new.writestr(f"serialized_{name}.pt", evil)
    refused(archive, tmp_path / "ran")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "target",
    [
        "torch.hub.load",
        "torch.load",
        "torch.ops.load_library",
        "torch.ops.import_module",
        "torch.ops.aten.linear.default.__class__",
        "torch.ops.load_library.__globals__.__getitem__",
        "torch.utils.cpp_extension.load_inline",
        "_operator.attrgetter",
        "_operator.methodcaller",
        "_operator.call",
        "math.__loader__.load_module",
        "os.system",
        "#name:op",
    ],
)
def test_graph_that_calls_anything_but_operators_is_refused(archive: Path, tmp_path: Path, target: str) -> None:
    def change(document: dict[str, Any]) -> None:
        node = document["graph_module"]["graph"]["nodes"][0]
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": {"as_string": "antigravity"}, "kind": 1}]

    edit(archive, "models/model.json", change)
    refused(archive, tmp_path / "ran")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("target", "passed"),
    [
        ("torch.ops.higher_order.with_effects", "torch.ops.aten.from_file.default"),
        ("torch.ops.higher_order.strict_mode", "torch.os.system"),
        ("torch.ops.higher_order.cond", "torch.ops.aten.relu.default.__class__"),
        ("torch.ops.higher_order.scan", "torch.ops.aten.relu"),
        ("torch.ops.higher_order.wrap", "torch.ops.aten.relu.default"),
        ("torch.ops.higher_order.print", "torch.ops.aten.relu.default"),
        ("torch.ops.higher_order.call_torchbind", "torch.ops.aten.relu.default"),
    ],
)
def test_callable_arguments_are_checked_like_calls(archive: Path, tmp_path: Path, target: str, passed: str) -> None:
    def change(document: dict[str, Any]) -> None:
        node = document["graph_module"]["graph"]["nodes"][0]
        node["target"] = target
        words = [{"as_operator": passed}, {"as_string": str(tmp_path / "ran")}, {"as_bool": True}, {"as_int": 4096}]
        node["inputs"] = [{"name": "", "arg": word, "kind": 1} for word in words]

    edit(archive, "models/model.json", change)
    refused(archive, tmp_path / "ran", "the graph calls torch")


def test_unknown_kind_of_argument_is_refused(archive: Path, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {"as_python": "1"}

    edit(archive, "models/model.json", change)
    refused(archive, tmp_path / "ran", "unknown kind of argument: as_python")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name",
    [
        "aten.from_file.default",
        "aten._print.default",
        "aten.manual_seed.default",
        "aten.seed.default",
        "aten.initial_seed.default",
        "mkldnn.data_ptr.default",
        "debug_mode_ops.annotate.default",
        "streams.fork.default",
        "image.write_file.default",
        "prim.Print.default",
        "aten._convert_indices_from_csr_to_coo.default",
        "aten._sobol_engine_draw.default",
        "aten._ctc_loss.default",
    ],
)
def test_operator_for_files_terminal_or_process_is_refused(archive: Path, name: str) -> None:
    def change(document: dict[str, Any]) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = f"torch.ops.{name}"

    edit(archive, "models/model.json", change)
    with pytest.raises(SourceError, match=f"{name}, which does more than compute"):
        archives.load_pt2(archive)


def _spelled(code: str) -> str:
    """Spells Python code without quotes or dots, which executes other Python code."""
    return f"exec({'+'.join(f'chr({ord(letter)})' for letter in code)})"


def test_name_that_contains_python_is_refused(archive: Path, tmp_path: Path) -> None:
    """torch writes the names of buffers and parameters into the code of its module."""
    code = _spelled(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    name = json.dumps(f'kept",None) or {code} or getattr(self,"kept')
    rezip(
        archive,
        lambda part, content: content.replace(b'"kept"', name.encode()) if part.endswith(".json") else content,
    )
    with pytest.raises(SourceError):
        archives.load_pt2(archive).module()(x=X)
    assert not (tmp_path / "ran").exists()


def test_guard_that_contains_python_is_not_run(archive: Path, tmp_path: Path) -> None:
    """torch compiles the guards in a file and runs them with the module."""
    code = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch() or True"
    edit(archive, "models/model.json", lambda document: document.update(guards_code=[code]))
    try:
        archives.load_pt2(archive).module()(x=X)
    except SourceError:
        pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("models/model.json", b"[]"),
        ("models/model.json", b"null"),
        ("models/model.json", b"[" * 100_000),
        ("models/model.json", b'{"graph_module": 3}'),
        ("weights_config.json", b"[]"),
        ("weights_config.json", b'{"config": []}'),
        ("weights_config.json", b'{"config": {"a": 1}}'),
        ("weights_config.json", b'{"config": {"a": {"path_name": 3}}}'),
        ("weights_config.json", b"\xff"),
        ("data/weights/weight_0", b""),
        ("data/weights/weight_0", b"short"),
        ("archive_version", b"99"),
        ("archive_format", b"zip"),
        ("sample_inputs/model.pt", b"no pickle"),
        ("sample_inputs/model.pt", b"\x80\x02."),
    ],
)
def test_invalid_part_is_one_kind_of_error(archive: Path, ending: str, content: bytes) -> None:
    replace(archive, ending, content)
    with pytest.raises(SourceError):
        archives.load_pt2(archive)


@pytest.mark.parametrize("ending", ["models/model.json", "weights_config.json", "archive_format", "weight_0"])
def test_missing_part_is_one_kind_of_error(archive: Path, ending: str) -> None:
    rezip(archive, lambda name, content: None if name.endswith(ending) else content)
    with pytest.raises(SourceError):
        archives.load_pt2(archive)


@pytest.mark.sample(4)
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"hello", bytes(1000)])
def test_file_that_is_not_an_archive_is_one_kind_of_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt2").write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.pt2"):
        archives.load_pt2(tmp_path / "model.pt2")


def test_missing_file_or_folder_is_one_kind_of_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing.pt2"):
        with pytest.raises(SourceError):
            archives.load_pt2(path)


@pytest.mark.filterwarnings("ignore")
def test_random_damage_is_one_kind_of_error_or_harmless(archive: Path) -> None:
    """Some bytes do not matter. Every other byte gives the one error that a caller expects."""
    content = archive.read_bytes()
    with zipfile.ZipFile(archive) as reader:  # the directory at the end, where most bytes matter
        directory = range(reader.start_dir, len(content))
    chance = random.Random(0)
    failed = 0
    attempts = examples(250)
    for attempt in range(attempts):
        damaged = bytearray(content)
        positions = directory if attempt % 2 else range(len(content))
        for _ in range(chance.choice([1, 1, 1, 8])):
            damaged[chance.choice(positions)] = chance.randrange(256)
        archive.write_bytes(damaged if attempt % 10 else damaged[: chance.randrange(len(damaged))])
        try:
            archives.load_pt2(archive)
        except SourceError:
            failed += 1
    assert failed > 0.4 * attempts


def test_weight_larger_than_its_bytes_is_an_error(archive: Path, caplog: pytest.LogCaptureFixture) -> None:
    def larger(document: dict[str, Any]) -> None:
        for payload in document["config"].values():
            payload["tensor_meta"]["sizes"][0]["as_int"] = 1000

    edit(archive, "weights_config.json", larger)
    with pytest.raises(SourceError, match="out of bounds for storage of size") as caught:
        archives.load_pt2(archive)
    assert caplog.records == []
    assert "\n" not in caught.value.message
