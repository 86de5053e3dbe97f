"""The door to video files: every clip is probed, sampled and decoded here, by PyAV.

Two white lists stand on every file: containers that hold streams themselves (a playlist or a list of files named .mp4
would open its neighbours), and no protocol but local files. A file comes in opened, from `MediaLoader`, not as a
path. Memory is bounded by the clip that is asked for, whatever the file holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import MAX_PIXELS, readable_start
from mindspeed_mm.fsdp.utils.settings import setting_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

OPEN_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi", "protocol_whitelist": "file"}
"""Both are needed: a protocol list alone lets an ffconcat text open the files beside it."""
_NEAR = 0.45
"""Share of a frame's time by which it may begin later than asked; below a half, so that ties go to the earlier frame
whatever the container's clock rounds."""
LEAST_COMPLETE = 0.95
"""Share of the declared frames that must be there."""
_LEAST_FPS, _MOST_FPS = 1 / 3600, 1000.0
"""Rates beyond are not rates but broken timestamps."""
MOST_DECODED_FRAMES = 100_000
"""Longest stretch that is decoded for one clip."""

REPLACE = "Replace the file or drop the row."
_SNIFFED_BYTES = 64
_KNOWN_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull`"),
    (b"\xff\xd8\xff", "is not a video but a JPEG picture"),
    (b"\x89PNG", "is not a video but a PNG picture"),
    (b"GIF8", "is not a video but a GIF picture"),
)


@dataclass(frozen=True)
class VideoHeader:
    """What a video file says of itself, as it will stand upright."""

    height: int
    width: int
    frames: int
    """Declared, or from its duration."""
    fps: float
    """Mean frames a second."""


@dataclass(frozen=True)
class ClipSampling:
    """Which frames of a video become a clip.

    The clip's frame k is the one nearest to start + k × step, by the file's timestamps; so a video of another or a
    varying frame rate is resampled, not played faster.
    """

    fps: float | None = None
    """Frames taken a second; None: every `frame_interval`-th."""
    frame_interval: int = 1
    position: Literal["start", "middle"] = "start"
    """Which part of a longer video is taken."""
    repeats_short: bool = False
    """Repeat the last frame of a video that is too short, instead of refusing it."""
    model_fps: float | None = None
    """Frames a second that the model makes, where neither `fps` nor `frame_interval` is chosen: so many are taken of
    videos of another rate, and every frame of the others."""

    def step_s(self, source_fps: float) -> float:
        """Seconds between two frames of the clip."""
        taken_fps = self.taken_fps(source_fps)
        return self.frame_interval / source_fps if taken_fps is None else 1 / taken_fps

    def taken_fps(self, source_fps: float) -> float | None:
        """Frames taken a second of a video of this rate; None: every `frame_interval`-th."""
        if self.fps is not None or self.model_fps is None or source_fps <= 0:  # 0: a still picture
            return self.fps
        # A rate that is only written otherwise (24 and 23.976) would cost a clip of exact length its last frame.
        return None if is_near_rate(source_fps, self.model_fps) else self.model_fps

    def frames_of(self, frames: int, source_fps: float) -> int:
        """Frames that a whole video gives."""
        return math.floor((frames - 1) / source_fps / self.step_s(source_fps) + 1e-6) + 1

    def start_s(self, frames: int, source_fps: float, taken: int) -> float:
        """Where a clip of so many frames begins, in seconds from the first frame; on a frame of the file."""
        if self.position == "start":
            return 0.0
        spare_s = (frames - 1) / source_fps - (taken - 1) * self.step_s(source_fps)
        return math.floor(max(0.0, spare_s) / 2 * source_fps + 1e-6) / source_fps

    def indices(self, frames: int, source_fps: float, taken: int) -> list[int]:
        """Numbers of the frames of a clip, where all are shown equally long; those beyond the end are its last."""
        times_s = self.start_s(frames, source_fps, taken) + self.step_s(source_fps) * np.arange(taken)
        return np.minimum(np.floor(times_s * source_fps + _NEAR), frames - 1).clip(0).astype(int).tolist()


_NEAR_RATE = 0.1
"""Share by which two rates may differ and still be taken for one: motion looks the same."""


def is_near_rate(fps: float, other_fps: float) -> bool:
    """Whether clips of these rates may be played at either."""
    return abs(fps / other_fps - 1) <= _NEAR_RATE


def probe_video(file: BinaryIO, name: str = "video") -> VideoHeader:
    """Read a video's header and decode its first frame, which knows how the picture is turned.

    Args:
        file: Opened for reading.
        name: What to call it in messages.

    Raises:
        DataError: The file is not a video of an allowed container, is cut, has no frames, no frame rate, or frames that
            are too large.
    """
    with open_video(file, name) as (container, stream):
        return read_start(container, stream, name)[0]


def read_clip(
    file: BinaryIO, frames: int, sampling: ClipSampling, shape: Callable[[Image.Image], np.ndarray], name: str = "video"
) -> np.ndarray:
    """Decode some frames of a video, upright, each shaped as soon as it is there.

    Args:
        file: Opened for reading.
        frames: How many, T.
        sampling: Which.
        shape: RGB picture → (H, W, 3) uint8.
        name: What to call it in messages.

    Returns:
        (3, T, H, W) uint8.

    Raises:
        DataError: As `probe_video`; or it has too few frames, or is broken where the clip is.
    """
    with open_video(file, name) as (container, stream):
        header, played = read_start(container, stream, name)
        start_s, step_s = sampling.start_s(header.frames, header.fps, frames), sampling.step_s(header.fps)
        _check_reach(frames * step_s * header.fps, name)
        if start_s > 0:
            assert stream.time_base is not None  # every stream of frames has one
            container.seek(int((first_second(stream) + start_s) / stream.time_base), stream=stream, backward=True)
            played = decode_frames(container, stream, name)
        shown = ShownFrames(frames, shape)
        end_s = play(played, start_s + step_s * np.arange(frames), first_second(stream), 1 / header.fps, shown, name)
    _check_complete(header, end_s, sampling, shown, name)
    return shown.clip()


class ShownFrames:
    """The clip as far as it is known; a picture is shaped once, however often it is shown."""

    def __init__(self, frames: int, shape: Callable[[Image.Image], np.ndarray]) -> None:
        from av.video.reformatter import VideoReformatter  # here for the reason that `open_video` gives

        self.asked, self._shape = frames, shape
        self._reformatter = VideoReformatter()  # a frame of its own accord would set up a conversion anew each time
        self._clip_CTHW: np.ndarray | None = None
        self._last: tuple[VideoFrame, np.ndarray] | None = None
        self.count = 0

    def add(self, frame: VideoFrame) -> None:
        """Show a frame once more."""
        if self._last is None or self._last[0] is not frame:
            frame_rgb = self._reformatter.reformat(frame, format="rgb24")
            self._last = frame, self._shape(upright(frame_rgb, quarter_turns(frame))).transpose(2, 0, 1)
        picture_CHW = self._last[1]
        if self._clip_CTHW is None:
            channels, height, width = picture_CHW.shape
            self._clip_CTHW = np.empty((channels, self.asked, height, width), dtype=np.uint8)
        self._clip_CTHW[:, self.count] = picture_CHW
        self.count += 1

    def clip(self) -> np.ndarray:
        """The clip, its last frame repeated where frames are missing."""
        assert self._clip_CTHW is not None
        self._clip_CTHW[:, self.count :] = self._clip_CTHW[:, self.count - 1 : self.count]
        return self._clip_CTHW


def play(
    frames: Iterator[VideoFrame], wanted_s: np.ndarray, first_s: float, frame_s: float, shown: ShownFrames, name: str
) -> float:
    """Show, for each time, the last frame that begins before it or hardly after; returns where the last one begins.

    Raises:
        DataError: The timestamps run backwards.
    """
    before, time_s = None, -math.inf
    for number, frame in enumerate(frames):
        earlier_s = time_s
        time_s = frame.time - first_s if frame.time is not None else number * frame_s
        if time_s < earlier_s:
            raise DataError(f"'{name}' has timestamps that run backwards", way_out="Convert it: ffmpeg -i old new.")
        while before is not None and shown.count < shown.asked and wanted_s[shown.count] + _NEAR * frame_s < time_s:
            shown.add(before)
        if shown.count == shown.asked:
            return time_s
        before = frame
    # The last frame is shown as long as the others.
    while before is not None and shown.count < shown.asked and wanted_s[shown.count] < time_s + frame_s:
        shown.add(before)
    return time_s


def _check_reach(frames: float, name: str) -> None:
    if frames > MOST_DECODED_FRAMES:
        raise DataError(
            f"'{name}': the clip asked for reaches over {frames:.0f} of its frames, more than {MOST_DECODED_FRAMES}",
            key="data.dataset_param.preprocess_parameters.frame_interval",
            way_out="Lower it, or raise fps.",
        )


def _check_complete(header: VideoHeader, end_s: float, sampling: ClipSampling, shown: ShownFrames, name: str) -> None:
    if shown.count == shown.asked:
        return
    check_whole(header, end_s, name)
    if shown.count == 0 or not sampling.repeats_short:
        raise too_short(name, shown.count, shown.asked)


def check_whole(header: VideoHeader, end_s: float, name: str) -> None:
    """Raise when the frames of a video end earlier than its header says."""
    whole_s = (header.frames - 1) / header.fps
    if end_s < LEAST_COMPLETE * whole_s - 1 / header.fps:
        raise DataError(
            f"'{name}' is cut: its frames end after {max(end_s, 0):.2f} s of {whole_s:.2f} s", way_out=REPLACE
        )


def too_short(name: str, found: int, asked: int) -> DataError:
    """The error of a video with fewer frames than asked for."""
    return DataError(
        f"'{name}' has {found} {by_count(found, 'frame', 'frames')} at the rate of the clips, fewer than the {asked} "
        "asked for",
        key="data.dataset_param.preprocess_parameters.num_frames",
        way_out="Lower it, or set short_clips: repeat.",
    )


# --- opening ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_video(file: BinaryIO, name: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its first video stream.

    Raises:
        DataError: It cannot be read, is not a video, has no video stream, or is cut off.
    """
    import av  # here and not above: importing a data set of language should not load FFmpeg

    start = file.read(_SNIFFED_BYTES)
    size = file.seek(0, 2)
    file.seek(0)
    _refuse_other_kinds(start, name)
    try:
        container = av.open(file, options=OPEN_OPTIONS, metadata_errors="ignore")
    except (av.FFmpegError, EOFError) as error:
        raise DataError(f"'{name}' {_why_unreadable(start, error)}", way_out=REPLACE) from error
    with container:
        attached = getattr(getattr(av.stream, "Disposition", None), "attached_pic", 0)  # the cover of a piece of music
        streams = [stream for stream in container.streams.video if not stream.disposition & attached]
        if not streams:
            raise DataError(f"'{name}' has no video stream", way_out=REPLACE)
        _check_not_cut(streams[0], size, name)
        streams[0].codec_context.thread_count = 1  # whole clips are decoded side by side, by threads or by workers
        yield container, streams[0]


def decode_frames(container: InputContainer, stream: VideoStream, name: str) -> Iterator[VideoFrame]:
    """All frames from where the container stands. Raises `DataError` where one is damaged or too large."""
    import av

    try:
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise DataError(f"'{name}' is broken: a frame is damaged", way_out=REPLACE)
            if frame.width * frame.height > MAX_PIXELS:
                raise DataError(f"'{name}' is {frame.width} × {frame.height}: too large", way_out="Scale it down.")
            yield frame
    except (av.FFmpegError, EOFError) as error:
        raise DataError(f"'{name}' is broken: {error}", way_out=REPLACE) from error


def read_start(container: InputContainer, stream: VideoStream, name: str) -> tuple[VideoHeader, Iterator[VideoFrame]]:
    """The header, and all frames from the first on.

    Raises:
        DataError: There is no frame that can be decoded, or no frame rate.
    """
    played = decode_frames(container, stream, name)
    first = next(played, None)
    if first is None:
        raise DataError(f"'{name}' has no frames that can be decoded", way_out=REPLACE)
    return _header(container, stream, first, name), itertools.chain([first], played)


def first_second(stream: VideoStream) -> float:
    """When the first frame is shown, by the file's clock."""
    return float((stream.start_time or 0) * (stream.time_base or 0))


def _header(container: InputContainer, stream: VideoStream, first: VideoFrame, name: str) -> VideoHeader:
    height, width = first.height, first.width
    if quarter_turns(first) % 2:
        height, width = width, height
    fps = _frame_rate(stream)
    duration_s = _duration_s(container, stream)
    if fps is None and stream.frames > 1 and duration_s:
        fps = stream.frames / duration_s
    if fps is None:
        raise DataError(f"'{name}' has no frame rate", way_out="Convert it: ffmpeg -r RATE -i old new.")
    frames = stream.frames or (round(duration_s * fps) if duration_s else 1)
    return VideoHeader(height, width, max(1, frames), fps)


def _frame_rate(stream: VideoStream) -> float | None:
    for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate):
        if rate is not None and _LEAST_FPS <= rate <= _MOST_FPS:
            return float(rate)
    return None


def _duration_s(container: InputContainer, stream: VideoStream) -> float:
    if stream.duration is not None and stream.duration > 0 and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    return max(0, container.duration or 0) / 1e6


def _check_not_cut(stream: VideoStream, size_bytes: int, name: str) -> None:
    """A file whose index stands at its start opens although its end is missing; the index says where frames lie."""
    entries = list(getattr(stream, "index_entries", ()))
    if not stream.frames or len(entries) < stream.frames:
        return
    whole = sum(entry.pos + entry.size <= size_bytes for entry in entries)
    if whole < LEAST_COMPLETE * len(entries):
        raise DataError(f"'{name}' is cut: {whole} of its {len(entries)} frames are there", way_out=REPLACE)


def _refuse_other_kinds(start: bytes, name: str) -> None:
    for known, reason in _KNOWN_STARTS:
        if start.startswith(known):
            raise DataError(f"'{name}' {reason}", way_out=REPLACE)
    if start.startswith(b"RIFF") and start[8:12] in (b"WAVE", b"WEBP"):
        kind = "sound (WAV)" if start[8:12] == b"WAVE" else "a WebP picture"
        raise DataError(f"'{name}' is not a video but {kind}", way_out=REPLACE)


def _why_unreadable(start: bytes, error: Exception) -> str:
    if start[4:8] == b"ftyp":
        return "is broken or cut: its index (moov) cannot be read"
    words, reason = readable_start(start), setting_of(error, str, "strerror") or str(error)
    return f"is not a video (starts with {words})" if words else f"is not a video of an allowed container ({reason})"


# --- frames ----------------------------------------------------------------------------------------------------------


def quarter_turns(frame: VideoFrame) -> int:
    """Turns by 90° against the clock that make a frame upright. Mirrored display matrices are not undone."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def upright(frame_rgb: Any, turns_by_90: int) -> Image.Image:
    """A decoded frame as a picture, turned against the clock."""
    image: Image.Image = frame_rgb.to_image()
    turns = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
    turn = turns[turns_by_90]
    return image if turn is None else image.transpose(turn)
