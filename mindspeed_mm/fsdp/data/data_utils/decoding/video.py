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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

import numpy as np
from PIL import Image

from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import MAX_PIXELS, readable_start
from mindspeed_mm.fsdp.data.data_utils.decoding.shown_frames import (
    CLOCK_S,
    ShownFrames,
    is_nearer,
    play_nearest,
    quarter_turns,
    timed,
)
from mindspeed_mm.fsdp.utils.model_parts import setting_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

OPEN_OPTIONS = {"format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi", "protocol_whitelist": "file"}
"""Both are needed: a protocol list alone lets an ffconcat text open the files beside it."""
VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".3gp", ".3g2"})
"""Of files that are videos in these containers, in lower case."""
LEAST_COMPLETE = 0.95
"""Share of the declared frames that must be there."""
_LEAST_FPS, _MOST_FPS = 1 / 3600, 1000.0
"""Rates beyond are not rates but broken timestamps."""
MOST_DECODED_FRAMES = 100_000
"""Longest stretch that is decoded for one clip."""

REPLACE = "Replace the file or drop the row."
_SNIFFED_BYTES = 64
_SLACK_S = 0.1
"""Containers promise some hundredths of a second too many."""
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
    fps: float
    """Frames per second from the first frame to the last, on average."""
    begins_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """When each frame is shown, in seconds from the first; empty where frame i is shown at i / fps."""
    first_s: float = field(default=0.0, compare=False)
    """When the first frame is shown, by the file's clock: its sound may begin earlier or later."""

    def part(self, cut: FrameSpan, name: str) -> VideoHeader:
        """The header as if the file held some of its frames alone.

        Args:
            cut: Which.
            name: What to call the file in messages.

        Raises:
            DataError: The file has fewer frames.
        """
        end = self.frames if cut.end is None else cut.end
        if not cut.first < end <= self.frames:
            raise DataError(
                f"'{name}' has {self.frames} {by_count(self.frames, 'frame', 'frames')}, and not all of {cut}",
                key="cut",
                way_out="Name its first frame, from 0, and the one behind its last.",
            )
        begins_s = _begins_s(self)
        own_s = begins_s[cut.first : end] - begins_s[cut.first]
        fps = self.fps
        if self.begins_s and len(own_s) > 1:
            fps = _mean_fps(own_s)
        told_s = () if not self.begins_s or _is_steady(own_s, fps) else tuple(own_s.tolist())
        first_s = self.first_s + float(begins_s[cut.first])
        return replace(self, frames=len(own_s), fps=fps, begins_s=told_s, first_s=first_s)


@dataclass(frozen=True)
class FrameSpan:
    """Consecutive frames of a video."""

    first: int
    """Number of the first, from 0."""
    end: int | None = None
    """Number of the one behind the last; None: all that follow."""

    def __str__(self) -> str:
        if self.end is None:
            return f"frames {self.first} …"
        return f"frames {self.first} … {self.end - 1}"


@dataclass(frozen=True)
class ClipSampling:
    """Which frames of a video become a clip.

    With `fps`, the clip's frame k is the one nearest to start + k / fps, by the times at which the file's frames are
    shown: a video of another or a variable frame rate is resampled, not played faster. Of two that are equally near the
    earlier counts. Without it, the clip has every `frame_interval`-th frame, however long each is shown.

    `begins_s` below are these times, in seconds from the first frame; empty where frame i is shown at i / `fps`.
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
        if taken_fps is None:
            return self.frame_interval / source_fps
        return 1 / taken_fps

    def taken_fps(self, source_fps: float) -> float | None:
        """Frames taken a second of a video of this rate; None: every `frame_interval`-th."""
        if self.fps is not None or self.model_fps is None or source_fps <= 0:  # 0: a still picture
            return self.fps
        # A rate that is only written otherwise (24 and 23.976) would cost a clip of exact length its last frame.
        if is_near_rate(source_fps, self.model_fps):
            return None
        return self.model_fps

    def frames_of(self, frames: int, source_fps: float) -> int:
        """Frames that a whole video gives."""
        taken_fps = self.taken_fps(source_fps)
        if taken_fps is None:
            return (frames - 1) // self.frame_interval + 1
        return math.floor(((frames - 1) / source_fps + CLOCK_S) * taken_fps + 1e-6) + 1

    def start_s(self, video: FrameTimes, taken: int) -> float:
        """Where a clip of so many frames begins, in seconds from the first frame; on a frame of the file."""
        return float(_begins_s(video)[self._first(video, taken)])

    def wanted_s(self, video: FrameTimes, taken: int) -> np.ndarray:
        """When the frames of a clip are shown, in seconds from the video's first; beyond its end where it is too
        short."""
        begins_s, first = _begins_s(video), self._first(video, taken)
        taken_fps = self.taken_fps(video.fps)
        if taken_fps is not None:
            return begins_s[first] + np.arange(taken) / taken_fps
        numbers = first + self.frame_interval * np.arange(taken)
        beyond_s = begins_s[-1] + (numbers - video.frames + 1) / video.fps
        return np.where(numbers < video.frames, begins_s[np.minimum(numbers, video.frames - 1)], beyond_s)

    def numbers(self, video: FrameTimes, taken: int) -> list[int]:
        """Numbers of the frames of a clip in the file; those beyond the end are its last."""
        begins_s = _begins_s(video)
        numbers, wanted_s = list[int](), self.wanted_s(video, taken)
        for time_s in wanted_s:
            later = int(np.searchsorted(begins_s, time_s))
            if later in (0, video.frames):
                numbers.append(min(later, video.frames - 1))
            else:
                numbers.append(later - is_nearer(begins_s[later - 1], begins_s[later], time_s))
        return numbers

    def _first(self, video: FrameTimes, taken: int) -> int:
        """Number of the frame that a clip begins with."""
        if self.position == "start":
            return 0
        taken_fps = self.taken_fps(video.fps)
        if taken_fps is None:
            return max(0, video.frames - 1 - (taken - 1) * self.frame_interval) // 2
        begins_s = _begins_s(video)
        spare_s = max(0.0, begins_s[-1] - (taken - 1) / taken_fps)
        return int(np.searchsorted(begins_s, spare_s / 2 + 1e-6, side="right")) - 1


class FrameTimes(Protocol):
    """Says when the frames of a video or an animated picture are shown, see `VideoHeader`."""

    @property
    def frames(self) -> int:
        """Number of frames of the whole video."""

    @property
    def fps(self) -> float:
        """How many a second on average."""

    @property
    def begins_s(self) -> tuple[float, ...]:
        """When each frame is shown, in seconds from the first; empty where frame i is shown at i / `fps`."""


def _begins_s(video: FrameTimes) -> np.ndarray:
    if video.begins_s:
        return np.array(video.begins_s)
    return np.arange(video.frames) / video.fps


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
    with open_video(file, name) as video:
        return read_start(video, name)[0]


def read_clip(
    file: BinaryIO,
    frames: int,
    sampling: ClipSampling,
    shape: Callable[[Image.Image], np.ndarray],
    name: str = "video",
    cut: FrameSpan | None = None,
) -> np.ndarray:
    """Decode some frames of a video, upright, each shaped as soon as it is there.

    Args:
        file: Opened for reading.
        frames: How many, T.
        sampling: Which.
        shape: RGB picture → (H, W, 3) uint8.
        name: What to call it in messages.
        cut: The part of the video that is taken for the whole.

    Returns:
        (3, T, H, W) uint8.

    Raises:
        DataError: As `probe_video`; or it has too few frames, or is broken where the clip is.
    """
    with open_video(file, name) as video:
        whole, played = read_start(video, name)
        header = whole.part(cut, name) if cut else whole
        wanted_s = sampling.wanted_s(header, frames)
        _check_reach((wanted_s[-1] - wanted_s[0]) * header.fps, name)
        if header.first_s + wanted_s[0] > whole.first_s:
            assert video.stream.time_base is not None  # every stream of frames has one
            start = int((header.first_s + wanted_s[0]) / video.stream.time_base)
            # To the key frame before: decoding can only begin there; what comes before the clip is passed over.
            video.container.seek(start, stream=video.stream, backward=True)
            played = decode_frames(video.container, video.stream, name)
        shown = ShownFrames(frames, shape)
        timed_frames = timed(played, header.first_s, 1 / header.fps, name)
        if cut:  # what follows it in the file is not there
            last_s = _begins_s(header)[-1] + CLOCK_S
            timed_frames = itertools.takewhile(lambda frame: frame[0] <= last_s, timed_frames)
        end_s = play_nearest(timed_frames, wanted_s, shown)
    _check_complete(header, end_s, sampling, shown, name)
    return shown.clip()


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


@dataclass(frozen=True)
class OpenVideo:
    """A file opened for decoding."""

    container: InputContainer
    stream: VideoStream
    begins_s: np.ndarray
    """When each frame is shown, by the file's clock, rising; empty where the file does not tell."""


@contextmanager
def open_video(file: BinaryIO, name: str) -> Iterator[OpenVideo]:
    """The container and its first video stream, and when its frames are shown: from the index where that has all of
    them equally far apart, else from the headers of all packets, of which none is decoded.

    Raises:
        DataError: It cannot be read, is not a video, has no video stream, or is cut off.
    """
    with _container(file, name) as (container, stream):
        begins_s = _times_of_index(stream)
        if begins_s is not None:
            yield OpenVideo(container, stream, begins_s)
            return
        begins_s = _times_of_packets(container, stream, name)
    with _container(file, name) as (container, stream):  # not all containers can be wound back
        yield OpenVideo(container, stream, begins_s)


@contextmanager
def _container(file: BinaryIO, name: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    import av  # here and not above: importing a data set of language should not load FFmpeg

    file.seek(0)
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


def _times_of_index(stream: VideoStream) -> np.ndarray | None:
    """Of an index that has all frames; its times are those of decoding, which are other ones than those of showing
    unless all frames are equally far apart."""
    entries = list(stream.index_entries)
    if not stream.frames or len(entries) != stream.frames or stream.time_base is None:
        return None
    if any(entry.is_discard or not entry.size for entry in entries):
        return None
    since_first_s = np.array([entry.timestamp - entries[0].timestamp for entry in entries]) * float(stream.time_base)
    if len(entries) > 1 and not _is_steady(since_first_s, _mean_fps(since_first_s)):
        return None
    return since_first_s + float((stream.start_time or 0) * stream.time_base)


def _times_of_packets(container: InputContainer, stream: VideoStream, name: str) -> np.ndarray:
    """Raises `DataError` where the file ends earlier than it promises."""
    import av

    begins_s, packets, end_s = [], 0, 0.0
    try:
        for packet in container.demux():
            # AVI has times of decoding alone.
            time = packet.dts if packet.pts is None else packet.pts
            if time is None or not packet.size:  # the end of a stream, or a frame that repeats the last
                continue
            time_s = float(time * packet.time_base)
            end_s = max(end_s, time_s + float((packet.duration or 0) * packet.time_base))
            if packet.stream == stream:
                packets += 1
                if not packet.is_discard:
                    begins_s.append(time_s)
    except (av.FFmpegError, EOFError) as error:
        raise DataError(f"'{name}' is broken: {error}", way_out=REPLACE) from error
    promised_s = max(0, container.duration or 0) / 1e6
    if end_s < LEAST_COMPLETE * promised_s - _SLACK_S or packets < LEAST_COMPLETE * stream.frames:
        raise DataError(f"'{name}' is cut: it ends after {end_s:.2f} s of {promised_s:.2f} s", way_out=REPLACE)
    # Packets come in the order of decoding; frames that refer to later ones are shown earlier.
    return np.array(sorted(begins_s))


def _mean_fps(begins_s: np.ndarray) -> float:
    span_s = float(begins_s[-1] - begins_s[0])
    if span_s > 0:
        return (len(begins_s) - 1) / span_s
    return math.inf


def _is_steady(begins_s: np.ndarray, fps: float) -> bool:
    """Whether frame i is shown at i / fps, as far as the containers' clocks tell."""
    tolerance_s = min(CLOCK_S, 0.2 / fps)
    return math.isfinite(fps) and bool(np.all(np.abs(begins_s - np.arange(len(begins_s)) / fps) <= tolerance_s))


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


def read_start(video: OpenVideo, name: str) -> tuple[VideoHeader, Iterator[VideoFrame]]:
    """The header, and all frames from the first on.

    Raises:
        DataError: There is no frame that can be decoded, or no frame rate.
    """
    played = decode_frames(video.container, video.stream, name)
    first = next(played, None)
    if first is None:
        raise DataError(f"'{name}' has no frames that can be decoded", way_out=REPLACE)
    return _header(video, first, name), itertools.chain([first], played)


def _header(video: OpenVideo, first: VideoFrame, name: str) -> VideoHeader:
    height, width = first.height, first.width
    if quarter_turns(first) % 2:
        height, width = width, height
    begins_s = video.begins_s
    if first.time is not None:  # what comes before the first key frame is not shown
        begins_s = begins_s[begins_s > first.time - CLOCK_S]
    begins_s = begins_s - begins_s[:1]
    declared = [
        float(rate)
        for rate in (video.stream.average_rate, video.stream.guessed_rate, video.stream.base_rate)
        if rate and _LEAST_FPS <= rate <= _MOST_FPS
    ]
    count, first_s = max(1, len(begins_s)), first.time or 0.0
    # A single frame has no distance to another: its rate is what the file declares.
    rates = declared
    if count > 1:
        rates = [_mean_fps(begins_s)]
    if not rates or not _LEAST_FPS <= rates[0] <= _MOST_FPS:
        raise DataError(f"'{name}' has no frame rate", way_out="Convert it: ffmpeg -r RATE -i old new.")
    for fps in (*declared, *rates):
        if count == 1 or _is_steady(begins_s, fps):
            return VideoHeader(height, width, count, fps, first_s=first_s)
    return VideoHeader(height, width, count, rates[0], tuple(begins_s.tolist()), first_s)


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
        kind = "a WebP picture"
        if start[8:12] == b"WAVE":
            kind = "sound (WAV)"
        raise DataError(f"'{name}' is not a video but {kind}", way_out=REPLACE)


def _why_unreadable(start: bytes, error: Exception) -> str:
    if start[4:8] == b"ftyp":
        return "is broken or cut: its index (moov) cannot be read"
    words, reason = readable_start(start), setting_of(error, str, "strerror") or str(error)
    if words:
        return f"is not a video (starts with {words})"
    return f"is not a video of an allowed container ({reason})"
