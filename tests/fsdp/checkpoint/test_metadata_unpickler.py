"""The index of a checkpoint is a pickle: it may describe tensors and nothing else."""

from __future__ import annotations

import builtins
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mindspeed_mm.checkpoint.dcp_folder.metadata_unpickler import read_metadata
from mindspeed_mm.core.errors import CheckpointError
from tests.fsdp.checkpoint.small_run import saved_run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("run")
    saved_run(save, 1)
    return save / "iter_0000001"


class Calls:
    """Pickles into a call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize(
    ("function", "argument", "name"),
    [
        (os.system, "touch was-run", "posix.system"),
        (builtins.eval, "1", "builtins.eval"),
        (builtins.getattr, "x", "builtins.getattr"),
        (torch.load, "x", "torch.serialization.load"),
        (torch.save, "x", "torch.serialization.save"),
        (torch.hub.load, "x", "torch.hub.load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_no_metadata_is_refused_by_name(
    function: Callable[..., Any], argument: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = Metadata({}, storage_data={"x": Calls(function, argument)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(
        CheckpointError, match=rf"\.metadata +is refused: it asks for {name}, which no checkpoint needs"
    ):
        read_metadata(tmp_path)
    assert not (tmp_path / "was-run").exists()


def test_a_class_of_an_allowed_module_is_not_allowed_by_that(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cpathlib\nPath\n(Vx\ntR.")
    with pytest.raises(CheckpointError, match=r"asks for pathlib\.Path"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x08ops.load\x93.")
    with pytest.raises(CheckpointError, match=r"asks for torch\.ops\.load"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", "sub/file", ".."])
def test_data_outside_the_folder_is_refused(place: str, tmp_path: Path) -> None:
    metadata = Metadata({}, storage_data={MetadataIndex("model.x"): _StorageInfo(place, 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"points to '{place}', outside the checkpoint"):
        read_metadata(tmp_path)


def test_broken_bytes_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    """Cut anywhere, and damaged anywhere: never a traceback of another kind."""
    good = (checkpoint / ".metadata").read_bytes()
    place = random.Random(0)
    damaged = [good[: place.randrange(len(good))] for _ in range(40)]
    for _ in range(300):
        at = place.randrange(len(good))
        damaged.append(good[:at] + bytes([place.randrange(256)]) + good[at + 1 :])
    refused = 0
    for content in damaged:
        (tmp_path / ".metadata").write_bytes(content)
        try:
            read_metadata(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error).strip()
    assert refused > 100


def test_absent_or_alien(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.metadata: the save was interrupted"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1]))
    with pytest.raises(CheckpointError, match="holds a list, not the index"):
        read_metadata(tmp_path)


def test_our_own_index_is_readable(checkpoint: Path) -> None:
    assert "model.embed.weight" in read_metadata(checkpoint).state_dict_metadata
