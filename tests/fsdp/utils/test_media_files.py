"""Pictures and clips: what is read back is what was written, in the same bytes each time, and never half a file."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, probe_video, read_clip
from mindspeed_mm.fsdp.utils.media_files import write_image, write_media, write_video

MOST_ERROR = 8
"""Levels by which a byte of a small clip may differ."""


def grey_noise(*shape: int, seed: int = 0) -> np.ndarray:
    """(…, 3) black and white: the hardest there is, but without colour, which 4:2:0 halves."""
    bits = np.random.default_rng(seed).integers(0, 2, shape, dtype=np.uint8) * 255
    return np.repeat(bits[..., None], 3, axis=-1)


def read(path: Path, frames: int) -> np.ndarray:
    with path.open("rb") as file:
        return read_clip(file, frames, ClipSampling(), np.asarray).transpose(1, 2, 3, 0)


def test_a_picture_comes_back_as_it_was(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    write_image(tmp_path / "a.png", array)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), array)


@pytest.mark.parametrize(("frames", "height", "width"), [(9, 16, 16), (5, 2, 2), (1, 16, 16), (3, 16, 20), (3, 64, 48)])
def test_a_small_clip_comes_back_nearly_as_it_was(tmp_path: Path, frames: int, height: int, width: int) -> None:
    clip = grey_noise(frames, height, width)
    write_video(tmp_path / "a.mp4", clip, fps=8)
    errors = np.abs(read(tmp_path / "a.mp4", frames).astype(int) - clip)
    assert errors.max() <= MOST_ERROR
    assert errors.mean() < 1
    write_video(tmp_path / "b.mp4", clip, fps=8, crf=40)
    assert np.abs(read(tmp_path / "b.mp4", frames).astype(int) - clip).mean() > 1  # the comparison sees a coarse one


def test_colours_are_kept(tmp_path: Path) -> None:
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [30, 90, 200]], dtype=np.uint8)
    clip = np.broadcast_to(colours[:, None, None], (5, 32, 32, 3)).copy()
    write_video(tmp_path / "a.mp4", clip, fps=8)
    assert np.abs(read(tmp_path / "a.mp4", 5).astype(int) - clip).max() <= 5


def test_odd_sides_repeat_their_last_row_and_column(tmp_path: Path) -> None:
    clip = grey_noise(3, 15, 17)
    write_video(tmp_path / "a.mp4", clip, fps=12.5)
    with (tmp_path / "a.mp4").open("rb") as file:
        header = probe_video(file)
    assert (header.frames, header.height, header.width, header.fps) == (3, 16, 18, 12.5)
    found = read(tmp_path / "a.mp4", 3).astype(int)
    assert np.abs(found[:, :15, :17] - clip).max() <= MOST_ERROR
    assert np.abs(found[:, 15, :17] - clip[:, 14]).max() <= MOST_ERROR


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    clip = grey_noise(9, 240, 416)
    found = set()
    for number in range(3):
        _ = [np.full(200_000 + 1000 * number, number, dtype=np.uint8) for _ in range(9)]  # other memory each time
        write_video(tmp_path / "a.mp4", clip, fps=8)
        found.add((tmp_path / "a.mp4").read_bytes())
    assert len(found) == 1


def test_one_frame_is_a_picture_and_several_are_a_clip(tmp_path: Path) -> None:
    assert write_media(tmp_path / "000_00_v1.5", grey_noise(1, 4, 4), 8) == tmp_path / "000_00_v1.5.png"
    assert write_media(tmp_path / "000_00_v1.5", grey_noise(2, 4, 4), 8) == tmp_path / "000_00_v1.5.mp4"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", grey_noise(4, 4))
    before = (tmp_path / "a.png").read_bytes()
    with mock.patch("os.fsync", side_effect=OSError(28, "no space")), pytest.raises(OSError, match="no space"):
        write_image(tmp_path / "a.png", grey_noise(4, 4, seed=1))
    assert (tmp_path / "a.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3)), np.zeros((4, 4), np.uint8), np.zeros((0, 4, 3), np.uint8)])
def test_what_is_no_picture_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        write_image(tmp_path / "a.png", array)
    assert not list(tmp_path.iterdir())
