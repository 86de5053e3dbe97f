"""Files that a conversion writes: torch and safetensors read them, and no more than one tensor is in memory."""

from __future__ import annotations

import weakref
import zipfile
from pathlib import Path

import pytest
import torch

from mindspeed_mm.checkpoint.conversion.files import OutputFile, PtFile, SafetensorsFile
from mindspeed_mm.checkpoint.dcp_folder.writing import DcpFolder
from mindspeed_mm.checkpoint.lazy_tensor import Computed, HeldTensor, LazyTensor

TENSORS = {
    "matrix": torch.randn(5, 7, dtype=torch.float64),
    "transposed": torch.arange(12, dtype=torch.int32).reshape(3, 4).T,
    "row": torch.randn(6, 4).bfloat16()[3],
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "flags": torch.tensor([True, False]),
    "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
}
FILES = {
    "safetensors": SafetensorsFile,
    "pt": lambda content: PtFile({"model": content}),
    "dcp": DcpFolder,
}


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_a_pt_file_bit_for_bit(tmp_path: Path, mapped: bool) -> None:
    path, shared = tmp_path / "model_optim_rng.pt", HeldTensor(TENSORS["matrix"])
    lazy: dict[str, LazyTensor] = {key: HeldTensor(tensor) for key, tensor in TENSORS.items()}
    sections = {"model": lazy, "": {"a": shared, "b": shared}}
    PtFile(sections, {"checkpoint_version": 3.0, "iteration": 2}).write(path, lambda *_: None)
    content = torch.load(path, weights_only=True, mmap=mapped)
    assert list(content) == ["checkpoint_version", "iteration", "model", "a", "b"]
    assert (content["checkpoint_version"], content["iteration"]) == (3.0, 2)
    for key, wanted in TENSORS.items():
        found = content["model"][key]
        assert (found.dtype, found.shape, found.is_contiguous()) == (wanted.dtype, wanted.shape, True)
        assert found.data_ptr() % 8 == 0
        assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8))
    assert torch.equal(content["a"], content["b"]) and content["a"].data_ptr() != content["b"].data_ptr()


def test_a_pt_file_is_a_sound_archive_with_aligned_storages(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    PtFile({"model": {key: HeldTensor(tensor) for key, tensor in TENSORS.items()}}).write(path, lambda *_: None)
    reader = torch._C.PyTorchFileReader(str(path))
    assert all(reader.get_record_offset(f"data/{number}") % 64 == 0 for number in range(len(TENSORS)))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("kind", FILES)
def test_one_tensor_at_a_time_is_in_memory(kind: str, tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def made(_: list[torch.Tensor]) -> torch.Tensor:
        tensor = torch.ones(1000)
        alive.add(tensor)
        return tensor

    def note(_: str, tensor: torch.Tensor) -> None:
        nonlocal most
        kept.add(tensor)
        most = max(most, len(kept))

    kept: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    content: dict[str, LazyTensor] = {f"t{i}": Computed([], made, (1000,), torch.float32) for i in range(6)}
    file: OutputFile = FILES[kind](content)
    file.write(tmp_path / "out", note)
    # The one before may still have a name when the next is read.
    assert most <= 2 and len(alive) == 0
