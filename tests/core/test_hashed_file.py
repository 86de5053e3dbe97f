"""Files that are hashed while they are written: the hash is that of what the disk holds, or there is none."""

from __future__ import annotations

import errno
import io
import os
import random
from pathlib import Path

import pytest
import xxhash

from mindspeed_mm.core.hashed_file import FileRecord, HashedFile, is_checksum, write_hashed


def test_the_hash_is_that_of_the_whole_file(tmp_path: Path) -> None:
    """Pieces below and above the buffer's size, as bytes, views and views of wider elements."""
    draw = random.Random(3)
    content = b""
    with HashedFile(tmp_path / "a") as file:
        for _ in range(60):
            piece = draw.randbytes(8 * draw.choice([0, 1, 7, 500, 3000, 40_000]))
            content += piece
            given = draw.choice([bytes, bytearray, memoryview, lambda raw: memoryview(raw).cast("d")])(piece)
            assert file.write(given) == len(piece)
        file.writelines([b"two", b"lines"])
        content += b"twolines"
        assert file.tell() == len(content)
    assert (tmp_path / "a").read_bytes() == content
    assert file.record == FileRecord(len(content), f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}")
    assert file.record.checksum_now(tmp_path / "a") == file.record.checksum


def test_the_whole_file_is_forced_to_the_disk_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the buffer too: nothing that is committed may be lost when the power is."""
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: forced.append(os.fstat(descriptor).st_size))
    with HashedFile(tmp_path / "a") as file:
        file.write(b"x" * 70_001)
        file.write(b"y")
    assert forced == [70_002]


def test_a_file_that_is_not_written_in_order_is_refused(tmp_path: Path) -> None:
    with HashedFile(tmp_path / "a") as file:
        file.write(b"abc")
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
        with pytest.raises(io.UnsupportedOperation):
            file.truncate(1)
    assert file.record.size == 3


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_full_disk_is_told(size: int) -> None:
    """A small write is refused when the file is closed, at the latest."""
    with pytest.raises(OSError) as caught:
        write_hashed(Path("/dev/full"), bytes(size))
    assert caught.value.errno == errno.ENOSPC


def test_a_known_file_has_a_known_checksum(tmp_path: Path) -> None:
    """That of XXH3's own test vectors for nothing, and of FIPS 180-4 for `abc`."""
    empty = write_hashed(tmp_path / "a", b"")
    assert empty == FileRecord(0, "xxh3_128:99aa06d3014798d86001c324468d497f")
    (tmp_path / "b").write_bytes(b"abc")
    older = FileRecord(3, "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert older.checksum_now(tmp_path / "b") == older.checksum


@pytest.mark.parametrize(
    ("value", "is_one"),
    [("sha256:0f", True), ("xxh3_128:0f", True), ("md5:0f", False), ("sha256:xy", False), ("0f", False), (None, False)],
)
def test_what_a_checksum_is(value: object, is_one: bool) -> None:
    assert is_checksum(value) == is_one
