"""Archives that torch and Python read differently: the checked members must be the opened ones."""

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
    """Bytes of a file with the members of several archives, each followed by its directory."""

    def __init__(self) -> None:
        self.content = b""

    def members(self, members: Mapping[str, bytes], shown: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Adds members; returns their number and their directory.

        Args:
            shown: Names that an extra field of the directory gives to members. Newer Python readers use them.
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
        """Adds a directory with an end record for archives beyond 4 GB; returns the offset of that record."""
        offset = len(self.content)
        self.content += directory
        end = len(self.content)
        self.content += struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), offset)
        return end


def members_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def forged(path: Path, good: Mapping[str, bytes], evil: Mapping[str, bytes]) -> None:
    """Writes a file whose locator points to another directory than the last one, which Python reads."""
    builder = Archives()
    good_directory, evil_directory = builder.members(good), builder.members(evil)
    evil_end = builder.wide_directory(*evil_directory)
    offset = len(builder.content)
    builder.wide_directory(*good_directory)
    builder.content += struct.pack("<4sLQL", b"PK\6\7", 0, evil_end, 1)
    builder.content += struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(good_directory[1]), offset, 0)
    path.write_bytes(builder.content)


def as_torch_reads(path: Path, name: str) -> bytes:
    binding: Any = torch._C
    return bytes(binding.PyTorchFileReader(str(path)).get_record(name))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return saved(Plain().eval(), tmp_path / "model.pt2")


def python_reads(path: Path) -> bool:
    """Returns True if Python opens the archive; Python 3.12.3 and later refuse some forgeries."""
    try:
        return bool(members_of(path))
    except zipfile.BadZipFile:
        return False


def test_locator_of_another_directory_is_refused(archive: Path, tmp_path: Path) -> None:
    """The pickle that torch found there ran, in `verify` as well, and with --no-custom-code."""
    good = members_of(archive)
    (sample,) = (name for name in good if name.endswith(_SAMPLE))
    evil = good | {sample: malice(tmp_path / "ran")}
    forged(archive, good, evil)
    assert as_torch_reads(archive, _SAMPLE) == evil[sample]
    is_readable = python_reads(archive)
    assert not is_readable or members_of(archive) == good
    refused(archive, tmp_path / "ran", "more than one archive" if is_readable else "end of central directory")


def test_torchscript_is_refused_if_torch_finds_another_program(tmp_path: Path) -> None:
    """The other program wrote a file during loading, before its operators were checked."""
    path = tmp_path / "model.pt"
    programs = []
    for model in (nn.Linear(4, 3), nn.Linear(4, 3, bias=False)):
        written = io.BytesIO()
        torch.jit.save(torch.jit.script(model), written)
        path.write_bytes(written.getvalue())
        programs.append({f"model/{name.partition('/')[2]}": data for name, data in members_of(path).items()})
    forged(path, *programs)
    problem = "the file contains more than one archive" if python_reads(path) else "damaged: "
    with pytest.raises(SourceError, match=problem):
        archives.load_torchscript(path)


def test_names_in_an_extra_field_do_not_hide_members(archive: Path, tmp_path: Path) -> None:
    """Python 3.12 and later read such a name, and torch does not, so the member was mistaken for another one."""
    members = members_of(archive)
    (sample,) = (name for name in members if name.endswith(_SAMPLE))
    builder = Archives()
    count, directory = builder.members(members | {sample: malice(tmp_path / "ran")}, {sample: "model/extra/x"})
    end = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, count, count, len(directory), len(builder.content), 0)
    archive.write_bytes(builder.content + directory + end)
    assert as_torch_reads(archive, _SAMPLE) == malice(tmp_path / "ran")
    refused(archive, tmp_path / "ran")


def test_rewritten_archive_is_opened(archive: Path) -> None:
    """This shows that the other archives are refused for their contradictions only."""
    builder = Archives()
    builder.wide_directory(*builder.members(members_of(archive)))
    end, size = len(builder.content) - 56, len(builder.content)
    builder.content += struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    count, length, offset = struct.unpack("<QQQ", builder.content[end + 32 : size])
    assert count
    builder.content += struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, length, offset, 0)
    archive.write_bytes(builder.content)
    archives.load_pt2(archive)
