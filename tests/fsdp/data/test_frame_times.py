"""Frames are chosen by the times at which they are shown, which PyAV tells of every decoded frame."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import read_stretch
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import probe_image
from mindspeed_mm.fsdp.data.data_utils.decoding.video import (
    ClipSampling,
    FrameSpan,
    VideoHeader,
    probe_video,
    read_clip,
)
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipRule
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.datasets.generation.pixels import media_pixels
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from tests.helpers.tiny_media import picture_bytes

BURSTS = [0, 1, 2, 8, 9, 30, 31, 32, 33, 60, 61, 90, 91, 92, 93, 95, 120, 121, 122, 150]
"""Hundredths of a second at which the frames of a clip are shown."""
CODECS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx", "mov": "mpeg4"}


def write(path: Path, times: Sequence[int], *, clock: int = 100, sound_s: float = 0, rate: int = 30) -> Path:
    """A clip whose frame k has brightness 12 k and is shown at `times[k]`, in ticks of the clock."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix[1:]], rate=rate)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, clock)
        sound = container.add_stream("libopus" if path.suffix == ".webm" else "aac", rate=48000) if sound_s else None
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 12 * number, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, clock)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if sound is not None:
            for start in range(0, int(sound_s * 48000), 960):
                wave = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.float32), format="fltp", layout="mono")
                wave.sample_rate, wave.pts, wave.time_base = 48000, start, Fraction(1, 48000)
                container.mux(sound.encode(wave))
            container.mux(sound.encode())
    return path


def decoded(path: Path) -> list[tuple[float, np.ndarray]]:
    """Every frame with its time, by PyAV alone."""
    with av.open(str(path)) as container:
        return [(frame.time, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def clip(path: Path, frames: int, cut: FrameSpan | None = None, **sampling: Any) -> np.ndarray:
    with path.open("rb") as file:
        return read_clip(file, frames, ClipSampling(**sampling), np.asarray, path.name, cut)


def numbers(pixels: np.ndarray) -> list[int]:
    return [round(int(value) / 12) for value in pixels[0, :, 4, 4]]


@pytest.mark.edge("BN4")
class TestChosenByTheirOwnTimes:
    @pytest.mark.parametrize("suffix", CODECS)
    def test_an_interval_of_one_is_every_frame(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"a.{suffix}", BURSTS)
        every = np.stack([pixels for _, pixels in decoded(path)]).transpose(3, 0, 1, 2)
        assert np.array_equal(clip(path, 20), every)
        assert np.array_equal(clip(path, 7, frame_interval=3), every[:, ::3])
        assert np.array_equal(clip(path, 5, position="middle"), every[:, 7:12])
        with pytest.raises(DataError, match=r"has 20 frames .* fewer than the 21 asked for"):
            clip(path, 21)

    @pytest.mark.parametrize("fps", [3.0, 7.0, 16.0, 25.0, 90.0])
    @pytest.mark.parametrize("position", ["start", "middle"])
    def test_a_rate_takes_the_nearest(self, tmp_path: Path, fps: float, position: str) -> None:
        path = write(tmp_path / "a.mkv", BURSTS)
        times = np.array([time for time, _ in decoded(path)])
        whole = int(np.floor(times[-1] * fps + 1e-6)) + 1
        count = whole if position == "start" else max(2, whole // 2)
        start = 0.0
        if position == "middle":  # the last frame that leaves at least as much behind the clip as before it
            start = max(time for time in times if time <= (times[-1] - (count - 1) / fps) / 2 + 1e-6)
        expected = []
        for wanted in start + np.arange(count) / fps:
            far = np.abs(times - wanted)
            near = np.flatnonzero(far <= far.min() + 2e-3)
            expected.append(int(near[0]))  # of two equally near ones the earlier
        assert numbers(clip(path, count, fps=fps, position=position)) == expected
        assert ClipSampling(fps=fps).frames_of(*header(path)) == whole

    @pytest.mark.parametrize("suffix", CODECS)
    def test_some_frames_of_a_file_are_a_clip_of_their_own(self, tmp_path: Path, suffix: str) -> None:
        """As if a file held them alone: as many, as fast, and nothing of what is before and behind them."""
        path, part = write(tmp_path / f"a.{suffix}", BURSTS), FrameSpan(5, 16)
        every = np.stack([pixels for _, pixels in decoded(path)]).transpose(3, 0, 1, 2)
        assert np.array_equal(clip(path, 11, cut=part), every[:, 5:16])
        assert np.array_equal(clip(path, 15, cut=FrameSpan(5)), every[:, 5:])
        assert np.array_equal(clip(path, 3, position="middle", cut=part), every[:, 9:12])
        assert numbers(clip(path, 13, repeats_short=True, cut=part)) == [*range(5, 16), 15, 15]
        alone = write(tmp_path / f"b.{suffix}", [time - BURSTS[5] for time in BURSTS[5:16]])
        for sampling in ({"fps": 7.0}, {"fps": 16.0, "position": "middle"}, {"frame_interval": 3}):
            taken = ClipSampling(**sampling).frames_of(*header(alone))
            assert numbers(clip(path, taken, cut=part, **sampling)) == [
                5 + number for number in numbers(clip(alone, taken, **sampling))
            ]
        with path.open("rb") as file:
            whole = probe_video(file)
        found = whole.part(part, "a")
        assert (found.frames, found.fps) == pytest.approx(header(alone), rel=1e-2)
        assert found.first_s == pytest.approx(whole.first_s + BURSTS[5] / 100, abs=2e-3)
        with pytest.raises(DataError, match=r"has 11 frames .* fewer than the 12 asked for"):
            clip(path, 12, cut=part)
        for beyond in (FrameSpan(5, 21), FrameSpan(20)):
            with pytest.raises(DataError, match="has 20 frames, and not all of frames"):
                clip(path, 2, cut=beyond)

    @pytest.mark.parametrize(
        "sampling", [{}, {"frame_interval": 2}, {"fps": 20.0}, {"fps": 16.0, "position": "middle"}]
    )
    def test_the_container_makes_no_difference(self, tmp_path: Path, sampling: dict[str, Any]) -> None:
        found = [numbers(clip(write(tmp_path / f"a.{suffix}", BURSTS), 9, **sampling)) for suffix in CODECS]
        assert found[0] == found[1] == found[2] == found[3]

    def test_a_clock_of_milliseconds_costs_no_frame(self, tmp_path: Path) -> None:
        """7/3 s are 2.333 in Matroska, where the eighth frame of three per second is at 2.3333."""
        for suffix in ("mp4", "mkv"):
            path = write(tmp_path / f"a.{suffix}", [0, 1, 2, 12, 13, 35], clock=15)
            assert ClipSampling(fps=3.0).frames_of(*header(path)) == 8
            assert numbers(clip(path, 8, fps=3.0))[-1] == 5

    @pytest.mark.parametrize("suffix", CODECS)
    def test_headers_count_frames_and_their_mean_rate(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"a.{suffix}", BURSTS)
        frames, fps = header(path)
        assert frames == len(decoded(path)) == 20
        assert fps == pytest.approx(19 / 1.5, rel=1e-3)

    @pytest.mark.parametrize("suffix", CODECS)
    def test_a_constant_rate_stays_exactly_what_is_declared(self, tmp_path: Path, suffix: str) -> None:
        path = write(tmp_path / f"a.{suffix}", [1001 * number for number in range(20)], clock=30000, rate=30000)
        with path.open("rb") as file:
            video = probe_video(file)
        assert (video.frames, video.begins_s) == (20, ())
        assert video.fps == pytest.approx(30000 / 1001, rel=1e-3)

    def test_a_clip_for_a_model_that_watches(self, tmp_path: Path) -> None:
        """Not '9 of 4601 frames': the header of this file promises 30 frames a second."""
        path = write(tmp_path / "a.webm", BURSTS)
        found = MediaLoader(tmp_path, limits=MediaLimits(ClipRule(2.0, 128))).probe("video", path.name)
        assert found.total_frames == 20
        assert found.timestamps == pytest.approx([0, 0.75, 1.5], abs=0.08)

    @pytest.mark.parametrize("kind", ["gif", "webp", "avif", "png"])
    def test_animations_have_times_too(self, kind: str) -> None:
        shown_ms = [100, 100, 600, 100, 100]
        pictures = [Image.new("RGB", (16, 16), (40 * number,) * 3) for number in range(5)]
        data = picture_bytes(pictures[0], kind, save_all=True, append_images=pictures[1:], duration=shown_ms)
        assert probe_image(io.BytesIO(data)).frames == 5
        row = GenerationRow(RowLocation("rows.jsonl", 1), data, ("a",))
        pixels = media_pixels(row, MediaSize(10, 16, 16), MediaLoader("."), ClipSampling(fps=10.0))
        # Shown from 0, 0.1, 0.2, 0.8 and 0.9 s; 0.5 s is as near to 0.2 as to 0.8.
        assert [round(int(value) / 40) for value in pixels[0, :, 4, 4]] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 4]
        every = media_pixels(row, MediaSize(5, 16, 16), MediaLoader("."), ClipSampling())
        assert [round(int(value) / 40) for value in every[0, :, 4, 4]] == [0, 1, 2, 3, 4]


def header(path: Path) -> tuple[int, float]:
    with path.open("rb") as file:
        video = probe_video(file, path.name)
    return video.frames, video.fps


@pytest.mark.edge("BR14")
class TestSoundClips:
    @pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
    @pytest.mark.parametrize("sound_s", [0, 7.0])
    def test_the_first_frame_comes_late(self, tmp_path: Path, suffix: str, sound_s: float) -> None:
        path = write(tmp_path / f"a.{suffix}", [500 + time for time in BURSTS], sound_s=sound_s)
        assert decoded(path)[0][0] == pytest.approx(5.0, abs=0.05)
        every = np.stack([pixels for _, pixels in decoded(path)]).transpose(3, 0, 1, 2)
        assert header(path)[0] == 20
        assert np.array_equal(clip(path, 20), every)
        assert numbers(clip(path, 16, fps=10.0))[-1] == 19
        watched = MediaLoader(tmp_path, limits=MediaLimits(ClipRule(4.0, 128))).load_video(path.name)
        assert np.array_equal(watched.frames[[0, -1]], every.transpose(1, 2, 3, 0)[[0, -1]])

    @pytest.mark.parametrize(("first", "begins"), [(50, 0.5), (0, 0.0)])
    def test_its_sound_is_that_of_its_frames(self, tmp_path: Path, first: int, begins: float) -> None:
        """A sound that rises by one a second, from the clip's clock of 0 on."""
        path = tmp_path / "a.mkv"
        with av.open(str(path), "w") as container:
            stream, sound = container.add_stream("libx264", rate=10), container.add_stream("pcm_f32le", rate=8000)
            stream.width, stream.height, stream.pix_fmt, sound.layout = 48, 32, "yuv420p", "mono"
            stream.time_base = stream.codec_context.time_base = Fraction(1, 100)
            for number in range(10):
                frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 9, np.uint8), format="rgb24")
                frame.pts, frame.time_base = first + 10 * number, Fraction(1, 100)
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
            rising = (np.arange(16000, dtype=np.float32) / 8000)[None]
            wave = av.AudioFrame.from_ndarray(rising, format="flt", layout="mono")
            wave.sample_rate, wave.pts, wave.time_base = 8000, 0, Fraction(1, 8000)
            container.mux(sound.encode(wave))
            container.mux(sound.encode())
        with path.open("rb") as file:
            video = probe_video(file)
        assert video.first_s == begins
        for start_s in (0.0, 0.3):
            with path.open("rb") as file:
                heard = read_stretch(file, 8000, 1, start_s, 800, clock_s=video.first_s)
            assert heard[0, 0] == pytest.approx(begins + start_s, abs=1e-3)
        with path.open("rb") as file:  # pictures that begin before the sound: it has not begun yet
            heard = read_stretch(file, 8000, 1, 0.0, 800, clock_s=-0.05)
        assert not heard[0, :400].any() and heard[0, 401] == pytest.approx(1 / 8000)

    def test_a_sound_that_is_longer_than_the_pictures(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.mkv", BURSTS, sound_s=4.0)
        assert numbers(clip(path, 20)) == list(range(20))
        MediaLoader(tmp_path, limits=MediaLimits(ClipRule(30.0, 128))).load_video(path.name)

    def test_fragments_without_an_index_and_cut_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "a.mp4"
        with av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov"}) as container:
            stream = container.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 48, 32, "yuv420p", 4
            for number in range(20):
                frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 12 * number, np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        assert header(path) == (20, 10.0)
        assert numbers(clip(path, 20)) == list(range(20))


def test_where_a_clip_begins_is_a_frame_of_its_own_time() -> None:
    video = VideoHeader(8, 8, 4, 3 / 1.0, (0.0, 0.1, 0.7, 1.0))
    assert ClipSampling(position="middle").start_s(video, 2) == 0.1
    assert ClipSampling(position="middle", fps=10.0).start_s(video, 2) == 0.1
    assert ClipSampling(fps=4.0).numbers(video, 5) == [0, 1, 2, 2, 3]
