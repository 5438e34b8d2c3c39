"""TorchScript files with tensors beyond the file's data are refused: torch would read other memory."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from optexport.errors import SourceError
from optexport.runtime.untrusted import archives, script_storages
from tests._helpers.exports import rezip

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


class Held(nn.Module):
    """Tensors in every place that TorchScript has for them, one without elements, and a view of another's memory."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("kind", torch.zeros(64, dtype=torch.uint8).view(dtype))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("corner", torch.arange(12.0).view(3, 4).T[1:, 2:])
        self.lists = {"a": [torch.ones(3)]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.lists["a"][0] + self.corner.sum() + torch.tensor([1.0, 2.0, 3.0])
        return y


def saved(folder: Path, dtype: torch.dtype = torch.float32, *, frozen: bool = False) -> Path:
    path = folder / "model.pt"
    script = torch.jit.script(Held(dtype).eval())
    torch.jit.save(torch.jit.freeze(script) if frozen else script, path)
    return path


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["whole", "frozen"])
def test_file_saved_by_torch_opens(tmp_path: Path, dtype: torch.dtype, frozen: bool) -> None:
    module = archives.load_torchscript(saved(tmp_path, dtype, frozen=frozen))
    assert torch.isfinite(module(torch.ones(2, 4))).all()


@pytest.mark.parametrize("name", ["version.exe", "data/0x", "code/model.py.exe"])
def test_member_with_a_valid_name_and_a_tail_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"model/{name}", b"x")
    with pytest.raises(SourceError, match=f"{name}: the archive has a member that torch.jit.save does not write"):
        archives.load_torchscript(path)


@pytest.mark.parametrize("frozen", [False, True], ids=["data", "constants"])
def test_record_that_is_too_short_is_refused(tmp_path: Path, frozen: bool) -> None:
    """torch would use the memory after the record as weights, possibly secrets of other programs."""
    path = saved(tmp_path, frozen=frozen)
    folder = "constants/" if frozen else "data/"
    rezip(path, lambda name, content: content[:8] if f"/{folder}" in name else content)
    with pytest.raises(SourceError, match=r"record \d+: expected \d+ bytes, found 8") as caught:
        archives.load_torchscript(path)
    assert "model.pt" in str(caught.value)


def test_record_that_is_missing_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    rezip(path, lambda name, content: None if name.endswith("data/0") else content)
    with pytest.raises(SourceError, match=r"record 0: expected 64 bytes, found 0"):
        archives.load_torchscript(path)


class Forged:
    """Pickles as a tensor in record 0, which has 4 elements."""

    def __init__(self, *place: object) -> None:
        self.target = place

    def __reduce__(self) -> tuple[object, ...]:
        return torch._utils._rebuild_tensor_v2, (Record(), *self.target, False, {})


class Record:
    pass


class Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> object:
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if isinstance(value, Record) else None


def forged(path: Path, *place: object) -> bytes:
    with path.open("wb") as file:
        Pickler(file, 2).dump({"weight": Forged(*place)})
    return path.read_bytes()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("place", "fits"),
    [
        ((0, (4,), (1,)), True),
        ((0, (2, 2), (2, 1)), True),
        ((0, (1000,), (0,)), True),
        ((4, (0, 5), (5, 1)), True),
        ((1, (4,), (1,)), False),
        ((0, (5,), (1,)), False),
        ((0, (2, 2), (3, 1)), False),
        ((2, (2,), (-2,)), False),
        ((-1, (1,), (1,)), False),
        ((4, (), ()), False),
    ],
)
def test_tensor_beyond_its_storage_is_refused(tmp_path: Path, place: tuple[object, ...], fits: bool) -> None:
    content = forged(tmp_path / "data.pkl", *place)
    if fits:
        script_storages.check(content, {"0": 16})
    else:
        with pytest.raises(script_storages.OutOfBoundsError, match="reaches beyond record 0"):
            script_storages.check(content, {"0": 16})


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    class Malice:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    script_storages.check(pickle.dumps(Malice(), 2), {})
    assert not (tmp_path / "ran").exists()


def test_pickle_with_a_large_memo_is_refused() -> None:
    with pytest.raises(ValueError, match="a value at index 2000000000"):
        script_storages.check(b"\x80\x02Nr" + (2_000_000_000).to_bytes(4, "little") + b".", {})


@pytest.mark.sample(4)
@pytest.mark.parametrize("content", [b"", b".", b"no pickle", b"\x80\x02(", b"\x80\x02NQ.", b"\x80\x02]" + b"]a" * 9])
def test_pickle_not_written_by_torch_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        script_storages.check(content, {})


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize(
    "content", [b"K\x01" + b"\x85" * 3_000_000, b"(" * 3_000_000 + b"t" * 3_000_000], ids=["of one", "of any"]
)
def test_deeply_nested_pickle_is_refused_before_torch_reads_it(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path)
    rezip(path, lambda name, data: b"\x80\x02" + content + b"." if name.endswith("constants.pkl") else data)
    with pytest.raises(SourceError, match="are nested more than 2000 levels deep"):
        archives.load_torchscript(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02)" + b"\x85" * 300_000 + b".", "are nested more than 2000 levels deep"),
        (b"\x80\x02Nr" + (2**31).to_bytes(4, "little") + b".", "a value at index 2147483648"),
    ],
    ids=["deep", "large"],
)
def test_debug_pickles_are_checked_too(tmp_path: Path, content: bytes, message: str) -> None:
    """torch reads them if a call fails, and the process ended by SIGSEGV."""
    path = saved(tmp_path)
    rezip(path, lambda name, data: content if name.endswith(".debug_pkl") else data)
    with pytest.raises(SourceError, match=message):
        archives.load_torchscript(path)


@pytest.mark.parametrize(
    ("member", "old", "new"),
    [("data.pkl", b"training", b"train{ng"), ("/version", b"", b"9" * 40)],
    ids=["name", "version"],
)
def test_damaged_byte_is_not_reported_as_a_defect(tmp_path: Path, member: str, old: bytes, new: bytes) -> None:
    """torch raises IndexError."""
    path = saved(tmp_path)
    rezip(path, lambda name, data: (data.replace(old, new) if old else new) if name.endswith(member) else data)
    with pytest.raises(SourceError):
        archives.load_torchscript(path)
