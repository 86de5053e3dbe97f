"""Names of files in archives, as `tar` writes them."""

from __future__ import annotations

import tarfile
from pathlib import Path

from mindspeed_mm.fsdp.data.data_utils.tar_members import members_of, split_member


def test_an_archive_of_a_folder_has_the_names_that_rows_write(tmp_path: Path) -> None:
    """`tar -C folder .` writes "./" before every name."""
    (tmp_path / "a.txt").write_text("abc")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "./img/a.txt")
    for written in ("x.tar/img/a.txt", "x.tar/./img/a.txt"):
        name, member = split_member(written)
        assert members_of(tmp_path / name)[member].size == 3
