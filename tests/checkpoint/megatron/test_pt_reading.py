"""Files of `torch.save` that say something false of their tensors: refused, by name, before a number is read."""

from __future__ import annotations

import pickletools
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.megatron.pt_reading import read_pt_files
from mindspeed_mm.core.errors import CheckpointError

WORD = "model.weight"


def saved(path: Path, **tensors: torch.Tensor) -> Path:
    torch.save({"model": tensors}, path)
    return path


def rewritten(path: Path, change: Callable[[str, bytes], bytes], more: dict[str, bytes] | None = None) -> Path:
    """The archive with changed members; `more` stands behind them, under full names."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a name that stands there twice
        for name, content in [*((name, change(name, content)) for name, content in members), *(more or {}).items()]:
            archive.writestr(name, content)
    return path


def replaced_in_pickle(path: Path, old: bytes, new: bytes) -> Path:
    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        assert content.count(old) == 1, pickletools.dis(content)
        return content.replace(old, new)

    return rewritten(path, change)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn])
def test_tensors_of_all_kinds_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = torch.arange(12).view(3, 4).to(dtype)
    (content,) = read_pt_files([saved(tmp_path / "a.pt", a=whole, b=whole[1:, 1:].T)])
    assert torch.equal(content.tensors["model"]["a"].read().double(), whole.double())
    assert torch.equal(content.tensors["model"]["b"].read().double(), whole[1:, 1:].T.double())


def test_a_file_of_an_older_torch_is_told_from_a_broken_one(tmp_path: Path) -> None:
    """To copy it again would help nothing."""
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch before 1\.6.*weights_only=True"):
        read_pt_files([tmp_path / "a.pt"])
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"is broken.*Copy the file again"):
        read_pt_files([tmp_path / "a.pt"])


def test_a_tensor_that_reaches_into_its_neighbour_is_refused(tmp_path: Path) -> None:
    """Both lie in the file; 200 elements are of the other tensor."""
    path = saved(tmp_path / "a.pt", a=torch.zeros(200), b=torch.ones(77))
    # of 200 elements from 0, (K\x00 K\xc8 \x85), these are from 100
    replaced_in_pickle(path, b"K\x00K\xc8\x85", b"KdK\xc8\x85")
    with pytest.raises(CheckpointError, match=r"a\.pt  a  lies outside its storage"):
        read_pt_files([path])


def test_a_storage_that_is_shorter_than_its_tensor_says_is_refused(tmp_path: Path) -> None:
    path = rewritten(
        saved(tmp_path / "a.pt", a=torch.ones(8)), lambda name, old: old[:16] if name.endswith("data/0") else old
    )
    with pytest.raises(CheckpointError, match="a names 32 bytes, and data/0 holds 16"):
        read_pt_files([path])


def test_what_torch_would_negate_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", a=torch.ones(3, dtype=torch.complex64).conj().imag)
    with pytest.raises(CheckpointError, match="a is stored as a view that is not read"):
        read_pt_files([path])


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", a=torch.ones(8))
    rewritten(path, lambda name, old: b"big" if name.endswith("byteorder") else old)
    with pytest.raises(CheckpointError, match="not little-endian"):
        read_pt_files([path])


def test_a_shape_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", a=torch.ones(200))
    replaced_in_pickle(path, b"K\x00K\xc8\x85", b"K\x00G@i\x00\x00\x00\x00\x00\x00\x85")  # 200.0
    with pytest.raises(CheckpointError, match="not a whole number"):
        read_pt_files([path])


def test_a_member_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", a=torch.ones(2))
    rewritten(path, lambda name, old: old, {"a/data/0": b"\x3f" * 8})
    with pytest.raises(CheckpointError, match="two members called a/data/0"):
        read_pt_files([path])


def test_tables_of_tables_that_multiply_are_refused_soon(tmp_path: Path) -> None:
    """Forty levels, each of them twice the one below: 2⁴⁰ entries out of a kilobyte."""
    levels = b"".join(b"}q%c(U\x01ah%cU\x01bh%cu" % (n + 1, n, n) for n in range(40))
    path = saved(tmp_path / "a.pt", a=torch.ones(2))
    rewritten(path, lambda name, old: b"\x80\x02}q\x00" + levels + b"." if name.endswith("data.pkl") else old)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="more than 2,000,000 entries"):
        read_pt_files([path])
    assert time.monotonic() - start < 60
