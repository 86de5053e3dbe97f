"""Frames of a video as they are decoded, one by one, become the clip that is asked for: each upright, in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mindspeed_mm.core.errors import DataError

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_NEAR = 0.45
"""Share of the time between two frames by which the later may begin after the time asked for, where what is on the
screen is looked for."""
CLOCK_S = 0.002
"""Times that differ by less are equal: most containers round to milliseconds."""


def is_nearer(earlier_s: float, later_s: float, time_s: float) -> bool:
    """Whether the earlier of two frames is at least as near to a time as the later."""
    tie_s = min(CLOCK_S, 0.2 * (later_s - earlier_s))
    return time_s - earlier_s <= later_s - time_s + tie_s


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


def timed(
    frames: Iterator[VideoFrame], first_s: float, frame_s: float, name: str
) -> Iterator[tuple[float, VideoFrame]]:
    """Frames with the seconds since the first.

    Raises:
        DataError: The timestamps run backwards.
    """
    before_s = -math.inf
    for number, frame in enumerate(frames):
        time_s = number * frame_s
        if frame.time is not None:
            time_s = frame.time - first_s
        if time_s < before_s:
            raise DataError(f"'{name}' has timestamps that run backwards", way_out="Convert it: ffmpeg -i old new.")
        yield time_s, frame
        before_s = time_s


def play(frames: Iterator[tuple[float, VideoFrame]], wanted_s: np.ndarray, frame_s: float, shown: ShownFrames) -> float:
    """Show, for each time, the last frame that begins before it or hardly after; returns where the last one begins.
    Raises as `timed`."""
    before, before_s = None, -math.inf
    for time_s, frame in frames:
        near_s = _NEAR * min(frame_s, time_s - before_s)
        while before is not None and shown.count < shown.asked and wanted_s[shown.count] + near_s < time_s:
            shown.add(before)
        if shown.count == shown.asked:
            return time_s
        before, before_s = frame, time_s
    # The last frame is shown as long as the others.
    while before is not None and shown.count < shown.asked and wanted_s[shown.count] < before_s + frame_s:
        shown.add(before)
    return before_s


def play_nearest(frames: Iterator[tuple[float, VideoFrame]], wanted_s: np.ndarray, shown: ShownFrames) -> float:
    """Show, for each time, the frame nearest to it; returns where the last one begins. Raises as `timed`."""
    before, before_s = None, -math.inf
    for time_s, frame in frames:
        while before is not None and shown.count < shown.asked and is_nearer(before_s, time_s, wanted_s[shown.count]):
            shown.add(before)
        if shown.count == shown.asked:
            return time_s
        before, before_s = frame, time_s
    while before is not None and shown.count < shown.asked and wanted_s[shown.count] <= before_s + CLOCK_S:
        shown.add(before)
    return before_s


def quarter_turns(frame: VideoFrame) -> int:
    """Turns by 90° against the clock that make a frame upright. Mirrored display matrices are not undone."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def upright(frame_rgb: Any, turns_by_90: int) -> Image.Image:
    """A decoded frame as a picture, turned against the clock."""
    image: Image.Image = frame_rgb.to_image()
    turns = (None, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270)
    turn = turns[turns_by_90]
    if turn is None:
        return image
    return image.transpose(turn)
