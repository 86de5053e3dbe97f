"""Names of files in archives, as `tar` writes them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.tar_members import members_of, split_member


def test_an_archive_of_a_folder_has_the_names_that_rows_write(tmp_path: Path) -> None:
    """`tar -C folder .` writes "./" before every name."""
    (tmp_path / "a.txt").write_text("abc")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "./img/a.txt")
    for written in ("x.tar/img/a.txt", "x.tar/./img/a.txt"):
        name, member = split_member(written)
        assert members_of(tmp_path / name)[member].size == 3


def two_members(path: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(path, "w") as archive:
        for name in ("a", "b"):
            member = tarfile.TarInfo(name)
            member.size = 700
            archive.addfile(member, io.BytesIO(bytes([7]) * 700))
    with tarfile.open(path) as archive:
        return archive.getmembers()


@pytest.mark.parametrize(
    ("beyond", "says"),
    [
        (-1, "beyond its member 'a'"),  # in the header
        (-512, "beyond its member 'a'"),  # between two members
        (0, "unexpected end of data"),
        (699, "unexpected end of data"),
        (1023, "unexpected end of data"),
        (1024, "beyond its member 'b'"),  # the mark of the end is missing
    ],
)
def test_an_archive_that_was_cut_is_refused(tmp_path: Path, beyond: int, says: str) -> None:
    """Wherever the cut is: the members in front of it would pass for all of them."""
    path = tmp_path / "x.tar"
    _, second = two_members(path)
    path.write_bytes(path.read_bytes()[: second.offset_data + beyond])
    with pytest.raises(DataError, match=says):
        members_of(path)


def test_a_broken_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    _, second = two_members(path)
    content = bytearray(path.read_bytes())
    assert len(members_of(path)) == 2
    content[second.offset] ^= 1
    path.write_bytes(content[:-512])  # another size: archives are remembered by it
    with pytest.raises(DataError, match="beyond its member 'a'"):
        members_of(path)
