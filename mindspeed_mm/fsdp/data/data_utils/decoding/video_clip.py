"""Videos for models that watch them: which frames are looked at, and when each is shown.

`video_fps` frames a second, at most `video_maxlen`, spread evenly from the first to the last; or those that the model's
processor picks, or those that the row asks for. All are functions of the file's header alone, so a clip's size is
known before it is decoded. Frame i is what is on the screen at i / (mean rate), by the file's timestamps; of a video of
varying rate too, therefore, times are right. Stretches between two frames that are far apart are jumped over.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip
from mindspeed_mm.fsdp.data.data_utils.decoding.shown_frames import ShownFrames, play, timed
from mindspeed_mm.fsdp.data.data_utils.decoding.video import (
    OpenVideo,
    VideoHeader,
    check_whole,
    decode_frames,
    open_video,
    probe_video,
    read_start,
)
from mindspeed_mm.fsdp.data.data_utils.sample import ItemOptions
from mindspeed_mm.fsdp.utils.model_parts import setting_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor


JUMP_S = 10.0
"""Frames so far apart are sought, not decoded through; above the distance of key frames in most files."""


class FrameSizes(Protocol):
    """How large frames are kept."""

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that the frames of a video are brought to. Raises `DataError` for those it refuses."""

    def resize(self, picture: Image.Image, height: int, width: int) -> np.ndarray:
        """An RGB picture → (height, width, 3) uint8."""


@dataclass(frozen=True, slots=True)
class ClipHeader:
    """A clip without its pixels. T frames."""

    height: int
    """Height of the file's frames in pixels, upright."""
    width: int
    indices: tuple[int, ...]
    """Numbers of the T frames in the file, at its mean rate."""
    fps: float
    """Mean rate of the file."""
    total_frames: int

    @property
    def timestamps(self) -> list[float]:
        """Seconds at which the frames are shown."""
        return [index / self.fps for index in self.indices]

    @property
    def sampled_fps(self) -> float:
        """Frames of the clip a second."""
        return len(self.indices) / self.total_frames * self.fps

    def at_least(self, frames: int) -> ClipHeader:
        """The last frame repeated until there are so many."""
        missing = max(0, frames - len(self.indices))
        return replace(self, indices=self.indices + self.indices[-1:] * missing)


@dataclass(frozen=True, slots=True)
class VideoClip:
    """Some frames of a video."""

    frames: np.ndarray
    """(T, H, W, 3) uint8, upright, RGB."""
    header: ClipHeader
    sound: AudioClip | None = None
    """The video's sound, where it is asked for."""

    def at_least(self, frames: int) -> VideoClip:
        """The last frame repeated until there are so many: towers take pairs of frames."""
        missing = max(0, frames - len(self.frames))
        padded = self.frames
        if missing:
            padded = np.concatenate([padded, np.repeat(padded[-1:], missing, axis=0)])
        return replace(self, frames=padded, header=self.header.at_least(frames))


class FramePicker:
    """Picks frames as a video processor of transformers does by its own settings.

    Args:
        processor: The video processor.
    """

    def __init__(self, processor: Processor) -> None:
        self._processor = processor

    def __call__(self, video: VideoHeader) -> tuple[int, ...]:
        """Numbers of the frames. Raises `DataError` for a video that the processor refuses."""
        from transformers.video_utils import VideoMetadata  # loaded with the processor

        names = set(self._processor.valid_kwargs.__annotations__) - _NO_SAMPLING
        settings = {name: getattr(self._processor, name, None) for name in names}
        duration = video.frames / video.fps
        metadata = VideoMetadata(video.frames, video.fps, video.width, video.height, duration)
        try:
            picked = self._processor.sample_frames(metadata=metadata, **settings)
        except ValueError as error:
            raise DataError(f"the processor refuses the video: {error}", way_out="Drop the row.") from error
        return tuple(map(int, picked))


_NO_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}
"""Settings of a video processor that its `preprocess` does not hand to `sample_frames`."""
DEFAULT_FPS, DEFAULT_FRAMES = 2.0, 128
"""Sampling of videos where neither the configuration nor the processor says: a processor that does not sample takes
all."""


@dataclass(frozen=True, slots=True)
class ClipRule:
    """How many frames of a video are looked at."""

    fps: float = DEFAULT_FPS
    most_frames: int = DEFAULT_FRAMES
    pick: Callable[[VideoHeader], tuple[int, ...]] | None = None
    """What picks frames: the model's processor, where nothing else is configured, or the data set."""
    is_chosen: bool = True
    """Whether `fps` is configured, and not a default."""

    @classmethod
    def of(cls, preprocess: Any, processor: Processor) -> ClipRule:
        """The rule of `preprocess_parameters`; what is not given there is the video processor's.

        Args:
            preprocess: The section.
            processor: The video processor; None where the model has none.
        """
        fps = preprocess.video_fps
        frames = preprocess.video_maxlen
        if not setting_of(processor, bool, "do_sample_frames"):
            return cls(fps or DEFAULT_FPS, frames or DEFAULT_FRAMES, None, fps is not None)
        picker = None
        if fps is None and frames is None:
            picker = FramePicker(processor)
        own_fps = setting_of(processor, float, "fps") or setting_of(processor, int, "fps")
        own_frames = setting_of(processor, int, "max_frames")
        return cls(fps or own_fps or DEFAULT_FPS, frames or own_frames or DEFAULT_FRAMES, picker, fps is not None)

    def header(self, video: VideoHeader) -> ClipHeader:
        """The clip that a video gives. Where no processor picks, frame numbers are those that LLaMA-Factory takes, the
        origin of the keys."""
        if self.pick is not None:
            return ClipHeader(video.height, video.width, self.pick(video), video.fps, video.frames)
        asked = int(video.frames / video.fps * self.fps + 1e-6)
        count = max(1, min(asked, self.most_frames, video.frames))
        indices = np.linspace(0, video.frames - 1, count).astype(int).tolist()
        return ClipHeader(video.height, video.width, tuple(indices), video.fps, video.frames)

    def header_of_frames(self, height: int, width: int, count: int) -> ClipHeader:
        """The clip of a list of pictures: taken at `fps`, and thinned out where there are too many."""
        if not self.is_chosen:
            warnings.warn(
                f"videos that are lists of pictures are taken at {self.fps:g} pictures per second: "
                "preprocess_parameters.video_fps sets another rate",
                stacklevel=2,
            )
        taken = min(count, self.most_frames)
        indices = np.linspace(0, count - 1, taken).astype(int).tolist()
        return ClipHeader(height, width, tuple(indices), self.fps, count)


def probe_clip(file: BinaryIO, rule: ClipRule, name: str = "video") -> ClipHeader:
    """The clip that a video will give. Raises `DataError` as `probe_video`."""
    return rule.header(probe_video(file, name))


def watch(file: BinaryIO, rule: ClipRule, sizes: FrameSizes, name: str = "video") -> VideoClip:
    """Decode the frames of a video that a model looks at.

    Frames of another size than the first, in a video that changes it, are brought to the same size as all.

    Args:
        file: Opened for reading.
        rule: Which frames.
        sizes: How large they are kept. Each is resized as soon as it is decoded: memory is that of the clip.
        name: What to call it in messages.

    Raises:
        DataError: As `probe_video`; or the video is cut, or broken where it is looked at.
    """
    with open_video(file, name) as opened:
        video, played = read_start(opened, name)
        header = rule.header(video)
        height, width = sizes.size(len(header.indices), header.height, header.width)
        shown = ShownFrames(len(header.indices), lambda picture: sizes.resize(picture, height, width))
        wanted_s = np.array(header.timestamps)
        first = next(played)
        start_s = first.time or 0.0
        # `wanted_s` counts from the first frame; seeking needs the file's own clock, hence `start_s`.
        frames = _jumping(opened, first, played, wanted_s + start_s, shown, name)
        end_s = play(timed(frames, start_s, 1 / header.fps, name), wanted_s, 1 / header.fps, shown)
    if shown.count < shown.asked:
        check_whole(video, end_s, name)
    return VideoClip(np.ascontiguousarray(shown.clip().transpose(1, 2, 3, 0)), header)


def watch_pictures(
    pictures: Iterable[Image.Image], header: ClipHeader, size: tuple[int, int], sizes: FrameSizes
) -> VideoClip:
    """A clip of pictures that are frames already, all brought to one size."""
    return VideoClip(np.stack([sizes.resize(picture, *size) for picture in pictures]), header)


def _jumping(
    video: OpenVideo, first: Any, rest: Iterator[object], wanted_s: np.ndarray, shown: ShownFrames, name: str
) -> Iterator[Any]:
    """All frames in order, except those that lie before a wanted one and far behind the last."""
    container, stream = video.container, video.stream
    assert stream.time_base is not None  # every stream of frames has one
    frame, played, sought = first, rest, -1
    while frame is not None:
        yield frame
        time_s = frame.time
        is_new = sought < shown.count < shown.asked  # a key frame far in front of the wanted one is sought only once
        if is_new and time_s is not None and wanted_s[shown.count] - time_s > JUMP_S:
            sought = shown.count
            container.seek(int(wanted_s[shown.count] / stream.time_base), stream=stream, backward=True)
            played = decode_frames(container, stream, name)
            frame = next((later for later in played if later.time is not None and later.time > time_s), None)
        else:
            frame = next(played, None)


# --- the part of a video that a row asks for --------------------------------------------------------------------------


_EVERY_FRAME_FPS = 1e6


@dataclass(frozen=True, slots=True)
class PartRule(ClipRule):
    """A rule for a part of a video. Frames keep their numbers in the file, so times are those of the whole video."""

    start_s: float = 0.0
    end_s: float = math.inf

    def header(self, video: VideoHeader) -> ClipHeader:
        """The clip that the part gives: frames from the first at or after its start to the last at or before its end,
        as qwen-vl-utils counts them.

        Raises:
            DataError: The video ends before.
        """
        first = math.ceil(self.start_s * video.fps - 1e-6)
        last = min(video.frames - 1, math.floor(min(self.end_s, video.frames / video.fps) * video.fps + 1e-6))
        if first > last:
            raise DataError(
                f"the part from {self.start_s:g} s holds no frame: the video has {video.frames / video.fps:.2f} s",
                way_out="Correct start and end of the video, or drop the row.",
            )
        # As if the part were a video of its own; its numbers are moved to where it lies in the file.
        whole = ClipRule(self.fps, self.most_frames, self.pick)
        found = whole.header(replace(video, frames=last - first + 1))
        return replace(found, indices=tuple(index + first for index in found.indices))


def rule_of(rule: ClipRule, options: ItemOptions) -> ClipRule:
    """The rule for one video.

    Args:
        rule: For all videos.
        options: What the row asks for of this one.
    """
    own = {field.name: getattr(rule, field.name) for field in fields(ClipRule)}
    if "frames" in options:
        own |= {"fps": _EVERY_FRAME_FPS, "most_frames": max(1, options["frames"]), "pick": None}
    elif "fps" in options or "max_frames" in options:
        own |= {
            "fps": options.get("fps") or rule.fps,
            "most_frames": max(1, options.get("max_frames", rule.most_frames)),
            "pick": None,
        }
    if "start" in options or "end" in options:
        return PartRule(**own, start_s=options.get("start", 0.0), end_s=options.get("end", math.inf))
    return ClipRule(**own)
