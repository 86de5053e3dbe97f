"""An index that would let memory that nobody wrote pass for weights is refused, wherever the checkpoint is read."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from mindspeed_mm.checkpoint import layout
from mindspeed_mm.checkpoint.dcp_folder.index_check import checked_index, have_overlap
from mindspeed_mm.checkpoint.dcp_folder.reading import DcpReader, find_step
from mindspeed_mm.core.errors import CheckpointError

KEY = "model.w"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"model": {"w": torch.arange(24.0).reshape(6, 4), "n": torch.tensor(3)}}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def chunk(start: tuple[int, ...], size: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start), torch.Size(size))


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    path = folder / layout.METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def chunks(*found: ChunkStorageMetadata) -> Callable[[Metadata], None]:
    """The tensor has these chunks, each in the file."""

    def change(metadata: Metadata) -> None:
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == KEY)
        metadata.state_dict_metadata[KEY].chunks = list(found)
        for part in found:
            metadata.storage_data[MetadataIndex(KEY, part.offsets)] = place

    return change


UPPER, LOWER = chunk((0, 0), (4, 4)), chunk((4, 0), (2, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (chunks(), "its chunks hold 0 of them"),
        (chunks(UPPER), "24 numbers, and its chunks hold 16 of them"),
        (chunks(UPPER, LOWER, LOWER), "has chunks that overlap"),
        (chunks(UPPER, chunk((3, 0), (2, 4))), "has chunks that overlap"),
        (chunks(chunk((2, 0), (6, 4))), "outside its size"),
        (chunks(chunk((0,), (24,))), "outside its size"),
        (chunks(chunk((-6, 0), (6, 4))), "outside its size"),
        (lambda metadata: setattr(metadata.state_dict_metadata[KEY], "size", "ab"), "is entered with size ab"),
        (lambda metadata: setattr(metadata.state_dict_metadata[KEY].properties, "dtype", None), "and type None"),
        (lambda metadata: metadata.storage_data.clear(), "has a chunk that is in no file"),
        (lambda metadata: setattr(metadata, "storage_data", None), "a NoneType where its table of places"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", None), "a NoneType where its table of tensors"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", [1]), "a list where its table of tensors"),
        (lambda metadata: metadata.state_dict_metadata.update({KEY: 1}), "is entered as a int"),
    ],
)
def test_an_index_that_does_not_place_every_number_once_is_refused(
    change: Callable[[Metadata], Any], message: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        DcpReader(folder)


def test_chunks_of_ranks_that_tile_a_tensor_are_taken_and_empty_ones_too(folder: Path) -> None:
    edit(folder, chunks(UPPER, LOWER, chunk((6, 0), (0, 4))))
    edit(folder, lambda metadata: metadata.storage_data.pop(MetadataIndex(KEY, torch.Size((6, 0)))))
    DcpReader(folder)
    quarters = [chunk((row, column), (3, 2)) for row in (0, 3) for column in (0, 2)]
    edit(folder, chunks(*quarters))
    assert DcpReader(folder).lazy("model.n").read() == 3


def test_overlaps_are_found_as_by_comparing_each_with_each() -> None:
    torch.manual_seed(0)
    seen = set()
    for _ in range(300):
        starts, lengths = torch.randint(0, 6, (3, 2)).tolist(), torch.randint(1, 4, (3, 2)).tolist()
        boxes = [
            [(at, at + n) for at, n in zip(start, length, strict=True)]
            for start, length in zip(starts, lengths, strict=True)
        ]
        elements = [set(itertools.product(*(range(*interval) for interval in box))) for box in boxes]
        by_hand = any(one & other for one, other in itertools.combinations(elements, 2))
        assert have_overlap(boxes) == by_hand
        seen.add(by_hand)
    assert seen == {True, False}


def test_an_index_of_thousands_of_chunks_is_checked_at_once() -> None:
    ranks = 4096
    metadata = Metadata({}, storage_data={})
    boxes = [[(rank, rank + 1), (0, 8)] for rank in range(ranks)]
    assert not have_overlap(boxes)
    assert have_overlap([*boxes, boxes[ranks // 2]])
    assert checked_index(metadata, Path(".metadata")) is metadata


@pytest.mark.parametrize("said", ["../../x", "/etc", "9" * 5000, "²", "-3"])
def test_a_tracker_that_names_no_step_is_refused(said: str, folder: Path) -> None:
    (folder.parent / layout.TRACKER).write_text(said)
    folder.rename(folder.parent / "release")
    with pytest.raises(CheckpointError, match="which is not a step"):
        find_step(folder.parent)
