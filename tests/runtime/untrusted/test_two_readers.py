"""Archives in which torch's reader finds other members than Python's: what is checked has to be what is opened."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexport.errors import SourceError
from optexport.runtime.untrusted import archives
from tests._helpers.archives import Plain, malice, refused, saved

_SAMPLE = "data/sample_inputs/model.pt"


class Archives:
    """Bytes of a file with the members of several archives, one after the other, and the directory of each."""

    def __init__(self) -> None:
        self.content = b""

    def members(self, members: Mapping[str, bytes], shown: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Adds members; returns how many, and their directory.

        Args:
            shown: Names that an extra field of the directory gives to members, which newer readers of Python's heed.
        """
        directory = b""
        for name, data in members.items():
            sums = struct.pack("<LLL", zlib.crc32(data), len(data), len(data))
            extra = b""
            if shown and name in shown:
                field = struct.pack("<BL", 1, zlib.crc32(name.encode())) + shown[name].encode()
                extra = struct.pack("<HH", 0x7075, len(field)) + field
            head = struct.pack("<HHHL", 0, 0, 0, 0x21)[:8] + sums
            sizes = struct.pack("<HH", len(name.encode()), len(extra))
            directory += b"PK\1\2" + struct.pack("<HH", 20, 20) + head + sizes + bytes(10)
            directory += struct.pack("<L", len(self.content)) + name.encode() + extra
            self.content += b"PK\3\4" + struct.pack("<H", 20) + head + struct.pack("<HH", len(name.encode()), 0)
            self.content += name.encode() + data
        return len(members), directory

    def wide_directory(self, count: int, directory: bytes) -> int:
        """Adds a directory with a record of its end for archives beyond 4 GB; returns where that record lies."""
        offset = len(self.content)
        self.content += directory
        end = len(self.content)
        self.content += struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), offset)
        return end


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def forged(path: Path, good: Mapping[str, bytes], evil: Mapping[str, bytes]) -> None:
    """Writes a file whose locator points at a directory that is not the last one, where Python's reader looks."""
    made = Archives()
    good_directory, evil_directory = made.members(good), made.members(evil)
    evil_end = made.wide_directory(*evil_directory)
    offset = len(made.content)
    made.wide_directory(*good_directory)
    made.content += struct.pack("<4sLQL", b"PK\6\7", 0, evil_end, 1)
    made.content += struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(good_directory[1]), offset, 0)
    path.write_bytes(made.content)


def as_torch_reads(path: Path, name: str) -> bytes:
    binding: Any = torch._C
    return bytes(binding.PyTorchFileReader(str(path)).get_record(name))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return saved(Plain().eval(), tmp_path / "model.pt2")


def test_a_locator_that_points_at_another_directory_does_not_get_past_the_check(archive: Path, tmp_path: Path) -> None:
    """The pickle that torch found there ran, in `verify` as well, and with --no-custom-code."""
    good = members_of(archive)
    (sample,) = (name for name in good if name.endswith(_SAMPLE))
    evil = good | {sample: malice(tmp_path / "ran")}
    forged(archive, good, evil)
    assert members_of(archive) == good
    assert as_torch_reads(archive, _SAMPLE) == evil[sample]
    refused(archive, tmp_path / "ran", "it holds more than one archive")


def test_torchscript_is_not_loaded_where_torch_finds_another_program(tmp_path: Path) -> None:
    """That wrote a file of its choosing as it was loaded, before its operators were looked at."""
    path = tmp_path / "model.pt"
    programs = []
    for model in (nn.Linear(4, 3), nn.Linear(4, 3, bias=False)):
        written = io.BytesIO()
        torch.jit.save(torch.jit.script(model), written)
        path.write_bytes(written.getvalue())
        programs.append({f"model/{name.partition('/')[2]}": data for name, data in members_of(path).items()})
    forged(path, *programs)
    with pytest.raises(SourceError, match="it holds more than one archive"):
        archives.load_torchscript(path)


def test_what_is_checked_is_what_torch_reads_whatever_names_an_extra_field_gives(archive: Path, tmp_path: Path) -> None:
    """Python's reader takes such a name from 3.12 on, and torch's does not: the member was taken for another one."""
    members = members_of(archive)
    (sample,) = (name for name in members if name.endswith(_SAMPLE))
    made = Archives()
    count, directory = made.members(members | {sample: malice(tmp_path / "ran")}, {sample: "model/extra/x"})
    end = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, count, count, len(directory), len(made.content), 0)
    archive.write_bytes(made.content + directory + end)
    assert as_torch_reads(archive, _SAMPLE) == malice(tmp_path / "ran")
    refused(archive, tmp_path / "ran")


def test_an_archive_that_is_made_anew_is_opened(archive: Path) -> None:
    """So that it is what they lie about that the others are refused for."""
    made = Archives()
    made.wide_directory(*made.members(members_of(archive)))
    end, size = len(made.content) - 56, len(made.content)
    made.content += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    count, length, offset = struct.unpack("<QQQ", made.content[end + 32 : size])
    assert count
    made.content += struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, length, offset, 0)
    archive.write_bytes(made.content)
    archives.load_pt2(archive)
