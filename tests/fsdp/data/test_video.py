"""The door to video: which frames a clip has, and every broken file of the catalogue, refused with a reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding import shown_frames, video
from mindspeed_mm.fsdp.data.data_utils.decoding.video import ClipSampling, VideoHeader, probe_video, read_clip
from tests.helpers.tiny_media import brightness, picture_bytes, wav_bytes, write_sound_in_mp4, write_video

RAMP = [12 * i for i in range(20)]


def clip(path: Path, frames: int, **sampling: object) -> np.ndarray:
    with path.open("rb") as file:
        return read_clip(file, frames, ClipSampling(**sampling), np.asarray, path.name)  # type: ignore[arg-type]


def frames_of(path: Path, frames: int, **sampling: object) -> list[int]:
    """Numbers of the frames of a ramp that a clip shows."""
    return [round(value / 12) for value in brightness(clip(path, frames, **sampling))]


class TestSampling:
    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"frame_interval": 3}, [0, 3, 6, 9, 12]),
            ({"fps": 8.0}, [0, 2, 4, 6, 8]),
            ({"fps": 24.0}, [0, 1, 1, 2, 3]),
            ({"fps": 12.0}, [0, 1, 3, 4, 5]),
            ({"fps": 32.0}, [0, 0, 1, 1, 2]),  # half-way between two frames: the earlier one, whatever is rounded
            ({"fps": 6.4}, [0, 2, 5, 7, 10]),
            ({"position": "middle"}, [7, 8, 9, 10, 11]),
            ({"position": "middle", "frame_interval": 3}, [3, 6, 9, 12, 15]),
        ],
    )
    @pytest.mark.parametrize("suffix", ["mp4", "mkv"])
    def test_frames_by_time(
        self, tmp_path: Path, sampling: dict[str, object], expected: list[int], suffix: str
    ) -> None:
        path = write_video(tmp_path / f"a.{suffix}", RAMP)
        assert frames_of(path, 5, **sampling) == expected

    @pytest.mark.parametrize(("suffix", "codec"), [("avi", "mpeg4"), ("webm", "libvpx"), ("mov", "libx264")])
    def test_other_containers(self, tmp_path: Path, suffix: str, codec: str) -> None:
        path = write_video(tmp_path / f"a.{suffix}", RAMP, codec=codec)
        assert frames_of(path, 3, position="middle") == [8, 9, 10]
        with path.open("rb") as file:
            assert probe_video(file) == VideoHeader(32, 48, 20, 16.0)

    def test_a_varying_frame_rate_is_followed_by_timestamps(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "a.mkv", RAMP[:5], fps=10, times=[0, 1, 2, 8, 9])
        assert frames_of(path, 10, fps=10.0) == [0, 1, 2, 2, 2, 2, 3, 3, 3, 4]

    def test_how_many_frames_a_video_gives(self) -> None:
        assert ClipSampling().frames_of(20, 16) == 20
        assert ClipSampling(frame_interval=3).frames_of(20, 16) == 7
        assert ClipSampling(fps=8).frames_of(20, 16) == 10
        assert ClipSampling(fps=24).frames_of(17, 16) == 25
        assert ClipSampling(fps=12).numbers(VideoHeader(8, 8, 20, 16), 5) == [0, 1, 3, 4, 5]
        assert ClipSampling(fps=32).numbers(VideoHeader(8, 8, 2, 16), 5) == [0, 0, 1, 1, 1]

    def test_too_few_frames_are_refused_or_the_last_is_repeated(self, tmp_path: Path) -> None:
        path = write_video(tmp_path / "a.mp4", RAMP[:6])
        with pytest.raises(DataError, match=r"'a.mp4' has 6 frames .* fewer than the 9 asked for. .*short_clips"):
            clip(path, 9)
        assert frames_of(path, 9, repeats_short=True) == [0, 1, 2, 3, 4, 5, 5, 5, 5]

    def test_memory_is_that_of_the_clip_and_the_reach_is_bounded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, held = write_video(tmp_path / "a.mp4", RAMP * 4), []

        def shape(image: Image.Image) -> np.ndarray:
            held.append(image)
            return np.asarray(image)

        with path.open("rb") as file:
            read_clip(file, 3, ClipSampling(frame_interval=30), shape)
        assert len(held) == 3
        monkeypatch.setattr(video, "MOST_DECODED_FRAMES", 50)
        with pytest.raises(DataError, match="reaches over 60 of its frames, more than 50"):
            clip(path, 3, frame_interval=30)


class TestFrames:
    @pytest.mark.parametrize(("rotation", "bright"), [(0, "below"), (90, "right"), (180, "above"), (-90, "left")])
    def test_rotation_is_undone(self, tmp_path: Path, rotation: int, bright: str) -> None:
        path = write_video(tmp_path / "a.mp4", [200] * 3, rotation=rotation)
        picture_HW = clip(path, 1)[0, 0].astype(int)
        turned = rotation % 180 != 0
        assert picture_HW.shape == ((48, 32) if turned else (32, 48))
        halves = {"above": picture_HW[:8], "below": picture_HW[-8:], "left": picture_HW[:, :8]}
        halves["right"] = picture_HW[:, -8:]
        opposite = {"above": "below", "below": "above", "left": "right", "right": "left"}
        assert halves[bright].min() > halves[opposite[bright]].max()
        with path.open("rb") as file:
            header = probe_video(file)
        assert (header.height, header.width) == picture_HW.shape

    def test_sizes_that_are_odd_and_that_change(self, tmp_path: Path) -> None:
        odd = write_video(tmp_path / "odd.avi", RAMP[:4], codec="mpeg4", height=33, width=47)
        assert clip(odd, 4).shape == (3, 4, 33, 47)
        first, second = (write_video(tmp_path / f"{w}.avi", [90] * 3, codec="mjpeg", width=w) for w in (32, 48))
        # The frames of the second stand in the first's stream: what a camera that is turned while it films writes.
        merged = tmp_path / "changing.avi"
        _merge(first, second, merged)
        with merged.open("rb") as file:
            shaped = read_clip(file, 6, ClipSampling(), lambda image: np.asarray(image.resize((16, 16))))
        assert shaped.shape == (3, 6, 16, 16)


def _merge(first: Path, second: Path, into: Path) -> None:
    import av

    with av.open(str(into), "w") as out, av.open(str(first)) as a, av.open(str(second)) as b:
        stream = out.add_stream_from_template(a.streams.video[0])
        number = 0
        for source in (a, b):
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.pts = packet.dts = number
                    packet.stream = stream
                    out.mux(packet)
                    number += 1


def _cut(share: float, *, faststart: bool) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        # Frames of one size, so that the share of bytes is a share of frames.
        write_video(path, [0, 255] * 30, faststart=faststart, codec="mpeg4")
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return make


def _content(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def _without_frames(path: Path) -> None:
    """The header of a file whose frames never came."""
    write_video(path.with_suffix(".mkv"), [0] * 3)
    data = path.with_suffix(".mkv").read_bytes()
    path.with_suffix(".mkv").unlink()
    path.write_bytes(data[: data.index(b"\x1f\x43\xb6\x75")])  # up to the first cluster


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "62 moov missing": (_cut(0.5, faststart=False), r"broken or cut: its index \(moov\)"),
    "63 faststart cut in half": (_cut(0.5, faststart=True), r"is cut: \d+ of its 60 frames are there"),
    "63 faststart, 90 % there": (_cut(0.9, faststart=True), r"is cut: 5\d of its 60 frames are there"),
    "65 no video stream": (lambda path: write_sound_in_mp4(path) and None, "has no video stream"),
    "66 a picture": (_content(picture_bytes(Image.new("RGB", (32, 32)), "JPEG")), "not a video but a JPEG picture"),
    "66 a sound": (_content(wav_bytes()), r"not a video but sound \(WAV\)"),
    "67 list of files": (_content(b"ffconcat version 1.0\nfile good.mp4\n"), r"not a video \(starts with ffconcat"),
    "67 playlist": (_content(b"#EXTM3U\n#EXTINF:1,\ngood.mp4\n"), r"not a video \(starts with #EXTM3U"),
    "67 dash": (_content(b'<?xml version="1.0"?><MPD></MPD>'), r"not a video \(starts with <\?xml"),
    "68 no frames": (_without_frames, r"not a video of an allowed container \(End of file\)"),
    "pointer": (_content(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "random bytes": (_content(bytes(range(256)) * 8), "is not a video of an allowed container"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_catalogue_e(case: str, tmp_path: Path) -> None:
    write_video(tmp_path / "good.mp4", RAMP)
    make, reason = BROKEN[case]
    path = tmp_path / "bad.mp4"
    make(path)
    with path.open("rb") as file, pytest.raises(DataError, match=reason) as caught:
        probe_video(file, path.name)
    assert "'bad.mp4'" in str(caught.value)
    assert caught.value.problems[0].way_out


def test_both_white_lists_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: without the list of formats a text opens the file beside it."""
    write_video(tmp_path / "good.mp4", RAMP)
    text = tmp_path / "bad.mp4"
    text.write_bytes(b"ffconcat version 1.0\nfile good.mp4\n")
    monkeypatch.chdir(tmp_path)
    with text.open("rb") as file, pytest.raises(DataError):
        probe_video(file)
    monkeypatch.setattr(video, "OPEN_OPTIONS", {"protocol_whitelist": "file"})
    with text.open("rb") as file:
        assert probe_video(file).width == 48


def test_a_stream_that_ends_early_is_cut_where_no_index_says_so(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mkv", [0, 255] * 30, codec="mpeg4")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    for sampling in ({}, {"repeats_short": True}):
        with pytest.raises(DataError, match=r"is cut: it ends after 2.\d\d s of 3.75 s"):
            clip(path, 60, **sampling)
    with path.open("rb") as file, pytest.raises(DataError, match="is cut"):
        probe_video(file)


def test_no_frames_no_frame_rate_and_a_damaged_frame(tmp_path: Path) -> None:
    """What no writer here makes: headers and frames are stood in for."""
    path = write_video(tmp_path / "a.mp4", RAMP)

    class Stream:
        average_rate = guessed_rate = base_rate = None

    class Frame:
        height, width, rotation, is_corrupt, time = 32, 48, 0, False, 0.0

    class Container:
        def decode(self, stream: object) -> list[Frame]:
            return self.found

        frame = Frame()
        found: list[Frame] = []

    opened = video.OpenVideo(Container(), Stream(), np.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no frames that can be decoded"):
        video.read_start(opened, path.name)
    Container.found = [Container.frame]
    with pytest.raises(DataError, match="has no frame rate"):
        video.read_start(opened, path.name)
    Container.frame.is_corrupt = True
    with pytest.raises(DataError, match="a frame is damaged"):
        video.read_start(opened, path.name)
    Container.frame.is_corrupt, Container.frame.width = False, 10**8
    with pytest.raises(DataError, match="too large"):
        video.read_start(opened, path.name)


def test_timestamps_that_run_backwards_are_refused() -> None:
    def frame(time_ms: int) -> av.VideoFrame:
        picture = av.VideoFrame(4, 4, "rgb24")
        picture.pts, picture.time_base = time_ms, Fraction(1, 1000)
        return picture

    shown = shown_frames.ShownFrames(5, np.asarray)
    with pytest.raises(DataError, match="run backwards"):
        shown_frames.play(
            shown_frames.timed(iter(map(frame, (0, 100, 50))), 0.0, 0.1, "a.mp4"), np.arange(5) / 10, 0.1, shown
        )


def test_a_file_in_memory(tmp_path: Path) -> None:
    data = write_video(tmp_path / "a.mp4", RAMP).read_bytes()
    assert probe_video(io.BytesIO(data)).frames == 20
