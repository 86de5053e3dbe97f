"""Which frames of a video a row asks for, where it asks otherwise than the configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.video import VideoHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader, ClipRule
from mindspeed_mm.fsdp.data.data_utils.sample import ItemOptions

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
