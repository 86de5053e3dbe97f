"""The door to pickled weights: tensors come in, nothing is run, and the message is ours."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.checkpoint.pt_files import find_unsafe_globals, load_weights
from mindspeed_mm.core.errors import CheckpointError


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.proof,)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_and_containers_come_in(tmp_path: Path, zipped: bool) -> None:
    content = {"a": torch.arange(6).view(2, 3), "list": [torch.ones(2).bfloat16(), None, 1.5, "text"]}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = load_weights(tmp_path / "a.pt")
    assert torch.equal(found["a"], content["a"])  # type: ignore[arg-type]
    assert torch.equal(found["list"][0], content["list"][0])
    assert found["list"][1:] == [None, 1.5, "text"]


def test_what_a_file_asks_for_is_named_and_not_run(tmp_path: Path) -> None:
    proof, path = tmp_path / "run", tmp_path / "a.pt"
    torch.save({"video": torch.ones(2), "more": Payload(proof)}, path)
    with pytest.raises(CheckpointError, match=r"a\.pt  is refused: it asks for posix\.mkdir") as caught:
        load_weights(path)
    assert "weights_only" not in str(caught.value)
    assert find_unsafe_globals(path) == ["posix.mkdir"]
    torch.save({"more": Payload(proof)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError):
        load_weights(path)
    path.write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(CheckpointError):
        load_weights(path)
    assert not proof.exists()


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(100)}, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("x", "y")
    for content in (b"", b"<html>", whole[: len(whole) // 2], (tmp_path / "other.zip").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.pt  is broken, or not a file that torch\.save wrote"):
            load_weights(path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_weights(tmp_path / "none.pt")
