"""Clips for models that watch: which frames, when they are shown, and memory; as files, through the one door."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding import video_clip
from mindspeed_mm.fsdp.data.data_utils.decoding.video import VideoHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader, ClipRule, VideoClip
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, PixelBudget
from tests.fsdp.data.conftest import picture
from tests.helpers.open_files import open_below
from tests.helpers.tiny_media import picture_bytes, write_video

RAMP = [4 * i for i in range(60)]


def watched(path: Path, fps: float = 2.0, most: int = 128, **sizes: Any) -> VideoClip:
    return MediaLoader(path.parent, limits=MediaLimits(ClipRule(fps, most), **sizes)).load_video(path.name)


def shown(clip: VideoClip) -> list[int]:
    """Numbers of the frames of a ramp that a clip shows."""
    return [round(int(frame[-4, 4, 0]) / 4) for frame in clip.frames]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
@pytest.mark.parametrize(
    ("fps", "most", "expected"),
    [
        (2.0, 128, [0, 19, 39, 59]),
        (2.0, 3, [0, 29, 59]),
        (10.0, 4, [0, 19, 39, 59]),
        (0.1, 128, [0]),
        (300.0, 128, list(range(60))),
    ],
)
def test_frames_are_spread_from_the_first_to_the_last(
    tmp_path: Path, suffix: str, fps: float, most: int, expected: list[int]
) -> None:
    path = write_video(tmp_path / f"a.{suffix}", RAMP, fps=30)
    clip = watched(path, fps, most)
    assert shown(clip) == expected == list(clip.header.indices)
    assert clip.header.timestamps == pytest.approx([i / 30 for i in expected])
    assert clip.frames.shape == (len(expected), 32, 48, 3) and clip.frames.dtype == np.uint8
    loader = MediaLoader(tmp_path, limits=MediaLimits(ClipRule(fps, most)))
    assert loader.probe("video", path.name) == clip.header  # the size of a clip is known from the file's header


def test_a_varying_frame_rate_is_followed_by_timestamps(tmp_path: Path) -> None:
    """Pictures at 0, 1, 2 and 8 tenths of a second: what is on the screen in between is the third."""
    path = write_video(tmp_path / "a.mkv", [0, 40, 80, 120, 160, 200], fps=10, times=[0, 1, 2, 8, 9, 10])
    clip = watched(path, fps=20.0)
    assert clip.header.total_frames >= 6
    truth = [max(i for i, at in enumerate((0, 1, 2, 8, 9, 10)) if at / 10 <= t + 0.045) for t in clip.header.timestamps]
    assert [round(value / 10) for value in shown(clip)] == truth
    assert truth.count(2) >= 2


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_long_stretches_are_jumped_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Forty seconds, looked at three times: the frames are the same, and most are never decoded."""
    ramp = [round(i / 5) for i in range(1200)]
    path = write_video(tmp_path / f"a.{suffix}", ramp, fps=30, codec="mpeg4" if suffix == "avi" else "libx264")
    decoded = 0
    decode = video_clip.decode_frames

    def counted(*arguments: Any) -> Any:
        nonlocal decoded
        for frame in decode(*arguments):
            decoded += 1
            yield frame

    monkeypatch.setattr(video_clip, "decode_frames", counted)
    monkeypatch.setattr("mindspeed_mm.fsdp.data.data_utils.decoding.video.decode_frames", counted)
    jumped = watched(path, fps=1.0, most=3)
    few, decoded = decoded, 0
    monkeypatch.setattr(video_clip, "JUMP_S", 1e9)
    plain = watched(path, fps=1.0, most=3)
    assert np.array_equal(jumped.frames, plain.frames)
    assert decoded >= 1199 and few < 30


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_clips_stand_upright(tmp_path: Path, rotation: int) -> None:
    path = write_video(tmp_path / "a.mp4", [200] * 3, rotation=rotation)
    clip = watched(path, fps=16.0)
    turned = rotation % 180 != 0
    assert clip.frames.shape[1:3] == ((48, 32) if turned else (32, 48)) == (clip.header.height, clip.header.width)


def test_frames_are_kept_within_the_limits(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", RAMP, fps=30, height=64, width=96)
    assert watched(path).frames.shape[1:3] == (64, 96)
    small = watched(path, video_max_pixels=1536)
    assert small.frames.shape[1:3] == (32, 48)
    assert watched(path, video_min_pixels=4 * 64 * 96).frames.shape[1:3] == (128, 192)
    assert PixelBudget(100).size(1, 1, 10000) == (1, 1000)


def test_short_clips_are_filled_up_for_towers_that_take_pairs() -> None:
    clip = VideoClip(np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3), ClipHeader(2, 2, (0,), 8.0, 1))
    filled = clip.at_least(2)
    assert np.array_equal(filled.frames[0], filled.frames[1]) and filled.header.indices == (0, 0)
    assert clip.at_least(1).frames is clip.frames


class TestListsOfFrames:
    def test_all_are_shown_at_the_rate_that_is_asked_for(self, tmp_path: Path) -> None:
        for i in range(5):
            picture(20, 10, seed=i).save(tmp_path / f"{i}.png")
        loader = MediaLoader(tmp_path, limits=MediaLimits(ClipRule(4.0, 128)))
        clip = loader.load_video([f"{i}.png" for i in range(5)])
        assert [np.array_equal(clip.frames[i], np.asarray(picture(20, 10, seed=i))) for i in range(5)] == [True] * 5
        assert clip.header.timestamps == [0, 0.25, 0.5, 0.75, 1.0]
        assert loader.probe("video", [f"{i}.png" for i in range(5)]) == clip.header

    @pytest.mark.edge("BR20")
    def test_the_rate_is_told_unless_it_is_chosen(self, tmp_path: Path) -> None:
        from mindspeed_mm.fsdp.params.data_args import PreprocessParameters

        frames = [picture_bytes(picture(20, 10))] * 4
        default = MediaLoader(tmp_path, limits=MediaLimits.of(PreprocessParameters(), None))
        with pytest.warns(UserWarning, match=r"are taken at 2 pictures per second: .*video_fps sets another rate"):
            assert default.load_video(frames).header.timestamps == [0, 0.5, 1.0, 1.5]
        chosen = MediaLoader(tmp_path, limits=MediaLimits.of(PreprocessParameters(video_fps=4.0), None))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen.load_video(frames).header.timestamps == [0, 0.25, 0.5, 0.75]

    def test_too_many_are_thinned_out_and_all_get_the_size_of_the_first(self, tmp_path: Path) -> None:
        frames = [picture_bytes(picture(20 + i, 10, seed=i)) for i in range(7)]
        loader = MediaLoader(tmp_path, limits=MediaLimits(ClipRule(2.0, 3)))
        clip = loader.load_video([{"bytes": frame} for frame in frames])
        assert clip.header.indices == (0, 3, 6) and clip.frames.shape == (3, 10, 20, 3)

    def test_a_frame_that_is_missing_and_an_empty_list(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"'none.png' not found"):
            MediaLoader(tmp_path).load_video(["none.png"])
        for call in (MediaLoader(tmp_path).load_video, lambda item: MediaLoader(tmp_path).probe("video", item)):
            with pytest.raises(DataError, match="empty list of frames"):
                call([])


def test_absurd_lengths_are_bounded_by_sampling() -> None:
    """A million frames at one a second, and ten hours at 30: as many frames as are asked for."""
    for frames, fps in ((10**6, 1.0), (36000 * 30, 30.0)):
        header = ClipRule(2.0, 128).header(VideoHeader(4320, 7680, frames, fps))
        assert len(header.indices) == 128 and header.indices[-1] == frames - 1
    assert PixelBudget(65536).size(128, 4320, 7680) == (192, 341)


def test_files_are_closed(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", RAMP)
    (tmp_path / "cut.mp4").write_bytes(path.read_bytes()[:500])
    loader = MediaLoader(tmp_path)
    for _ in range(5):
        loader.load_video("a.mp4")
        loader.probe("video", "a.mp4")
        with pytest.raises(DataError):
            loader.load_video("cut.mp4")
    assert open_below(tmp_path) == []


def test_a_change_of_size_in_the_stream(tmp_path: Path) -> None:
    from tests.fsdp.data.test_video import _merge

    first, second = (
        write_video(tmp_path / f"{width}.avi", [90] * 3, codec="mjpeg", width=width, fps=4) for width in (32, 48)
    )
    _merge(first, second, tmp_path / "changing.avi")
    clip = watched(tmp_path / "changing.avi", fps=4.0)
    assert clip.frames.shape == (6, 32, 32, 3)


def test_pictures_are_resized_by_pillow() -> None:
    image = picture(40, 20)
    assert np.array_equal(
        PixelBudget(200).resize(image, 10, 20), np.asarray(image.resize((20, 10), Image.Resampling.BICUBIC))
    )
