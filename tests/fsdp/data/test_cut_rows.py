"""Rows of which each takes some frames of a file, as MindSpeed-MM and Open-Sora Plan write them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.data.data_utils.decoding.video import FrameSpan
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.row import ColumnNames, parse_row
from mindspeed_mm.fsdp.models.diffusion.media_roles import CONTROL_VIDEO, FIRST_FRAME, SOUND
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters

CLIPS = MediaGeometry(spatial_ratio=2, temporal_ratio=4, patch=(1, 2, 2), latent_channels=4, is_video=True)
CUTS: tuple[dict[str, Any], ...] = ({"cut": [0, 9]}, {"cut": [7, 16]}, {"cut": [12], "num_frames": 9}, {"cut": 12})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A clip of 24 frames of which each is brighter than the one before, and no two cuts of nine look alike."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(24):
            picture = np.full((32, 32, 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return tmp_path


def source(folder: Path, rows: list[dict[str, Any]], **basic: Any) -> RawSource:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"path": "a.mp4", "cap": "a"} | row) + "\n" for row in rows))
    named = BasicParameters(dataset=str(folder / "rows.jsonl"), dataset_dir=str(folder), **basic)
    return RawSource(named, PreprocessParameters(height=32, width=32, num_frames=9), CLIPS)


def test_each_row_is_the_frames_that_it_names(folder: Path) -> None:
    """Beside PyAV alone; one file has many samples, and each of them features and a header of its own."""
    with av.open(str(folder / "a.mp4")) as container:
        every = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    cache = {"cache_dir": str(folder / "cache")}
    for found in (source(folder, list(CUTS), **cache), source(folder, list(CUTS), **cache)):  # then of kept headers
        assert [header.frames for header in found.headers] == [9, 9, 9, 12]
        for index, first in enumerate((0, 7, 12, 12)):
            expected = every[first : first + 9].transpose(3, 0, 1, 2)
            assert np.array_equal(found.item(index, 0)["pixels"].numpy(), expected)
        assert len({found.key(index) for index in range(4)}) == 4
        assert len({found.pixels_key(index) for index in range(4)}) == 4
        assert len({row.digest for row in found.rows}) == 4


def test_a_declaration_that_puts_a_row_among_samples_of_another_length_is_found(folder: Path) -> None:
    plane = {"resolution": {"height": 32, "width": 32}, "fps": 8}
    found = source(folder, [{"cut": [0, 9], **plane}, {"cut": [20, 29], **plane}])
    assert found.item(0, 0)["pixels"].shape[1] == 9
    with pytest.raises(DataError, match=r"rows.jsonl:2 .* has 24 frames, and not all of frames 20 … 28"):
        found.item(1, 0)
    with pytest.raises(DataError, match="of 2 rows cannot be used"):
        source(folder, [{"cut": [20, 29]}, {"cut": [0, 9]}])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cut": [3, 3]}, "no frames of a video"),
        ({"cut": [-1, 3]}, "no frames of a video"),
        ({"cut": [0.5, 3]}, "no frames of a video"),
        ({"cut": "0-9"}, "no frames of a video"),
        ({"cut": [0, 1, 2]}, "no frames of a video"),
        ({"cut": []}, "no frames of a video"),
        ({"cut": [0, 9], "num_frames": 8}, r"\[0, 9\] are 9 frames, and num_frames says 8"),
        ({"cut": [0, 9], "control": "b.mp4"}, "has a control of its own, of which cut does not say a part"),
        ({"cut": [0, 9], "audio": "b.wav"}, "has a sound of its own, of which cut does not say a part"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], words: str) -> None:
    row = {"path": "a.mp4", "cap": "a"} | said
    roles = [role for role in (CONTROL_VIDEO, SOUND) if not role.columns[0] or role.columns[0] in said]
    with pytest.raises(DataError, match=words):
        parse_row(row, RowLocation("rows.jsonl", 1), ColumnNames(), roles=roles)


def test_a_first_frame_may_stand_beside_a_cut() -> None:
    row = {"path": "a.mp4", "cap": "a", "cut": [0, 9], "first_frame": "a.png"}
    assert parse_row(row, RowLocation("rows.jsonl", 1), ColumnNames(), roles=[FIRST_FRAME]).cut == FrameSpan(0, 9)


def test_columns_that_other_tools_read_are_told(folder: Path) -> None:
    rows = [{"caption": "b", "start_time": 1.5, "aesthetic": 5}, {"crop": [0, 9, 0, 9]}]
    told = []
    for words in ({}, {"caption_column": "cap"}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            source(folder, rows, **words)
        told.append([str(each.message) for each in caught if "rows" in str(each.message)])
    assert [each.split(";")[0].split(", which")[0] for each in told[0]] == [
        "1 of 2 rows has a column caption, beside the one that captions are taken from",
        "1 of 2 rows has columns crop, start_time",
    ]
    assert told[1] == told[0][1:]  # a column that is chosen leaves no question
