"""Sizes of images and videos that a generator takes, and what becomes of them: latents and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindspeed_mm.core.errors import ConfigError

SideRange = tuple[int, int | None]
"""Smallest and largest side in pixels; None: no limit."""


@dataclass(frozen=True)
class MediaSize:
    """Frames, height and width in pixels; an image has one frame."""

    frames: int
    height: int
    width: int
    sound: int = 0
    """Positions of the latents of its sound, of models that learn it (`SoundGeometry`)."""
    pictures: int = 0
    """How many pictures the model is given beside the one or none that every sample of its task has."""
    lacks_video: bool = False
    """Whether it has none of the videos that samples of its task are given beside the target, but may lack."""

    def __str__(self) -> str:
        size = f"{self.height}×{self.width}"
        size = size if self.frames == 1 else f"{self.frames}×{size}"
        if self.lacks_video:
            size += " without a control video"
        beside = [f"{self.sound} positions of sound"] if self.sound else []
        if self.pictures:
            beside.append("a further picture" if self.pictures == 1 else f"{self.pictures} further pictures")
        if beside:
            return f"{size} with {' and '.join(beside)}"
        return size


@dataclass(frozen=True)
class MediaGeometry:
    """What a family's VAE and patches ask of sizes."""

    spatial_ratio: int
    """Pixels along one side of a latent position."""
    temporal_ratio: int
    """Frames of a latent frame; the first stands alone, so videos have `temporal_ratio × k + 1` frames."""
    patch: tuple[int, int, int]
    """Latent positions of a token: time, height, width."""
    latent_channels: int
    is_video: bool
    """Latents have a time axis, (C, T, H, W), even for a single frame."""
    spatial_step: int = 0
    """Height and width are multiples of it; 0: `spatial_ratio × patch`. Some pipelines ask for more."""
    leading_frames: int = 0
    """Latent frames that are put before those of a video, to fill a patch (CogVideoX 1.5)."""
    frame_multiple: int = 1
    """Frames of a video are a multiple of it, plus one: some VAEs decode other numbers to more frames (CogVideoX)."""
    heights: SideRange = (0, None)
    """Smallest and largest height that VAE and transformer take; None: no limit."""
    widths: SideRange = (0, None)
    most_frames: int | None = None
    """Most frames that the transformer has positions for."""
    frame_group: int = 0
    """Frames that the VAE encodes apart from others, each group's first alone: videos have a multiple of it, or are one
    frame (Step-Video). 0: a video is one group of any length."""

    @property
    def side_step(self) -> int:
        """Height and width are multiples of it."""
        return self.spatial_step or self.spatial_ratio * math.lcm(*self.patch[1:])

    @property
    def frame_step(self) -> int:
        """Frames are a multiple of it, plus one, unless they come in groups: then a multiple of it."""
        return self.frame_group or math.lcm(self.temporal_ratio * self.patch[0], self.frame_multiple)

    def check(self, size: MediaSize, where: str = "", key: str = "") -> None:
        """Raise `ConfigError` that names the nearest sizes when this one, which was asked for, cannot be encoded."""
        nearest = self.nearest(size)
        if size == nearest:
            return
        raise ConfigError(
            f"{size} cannot be encoded: {', '.join(self._broken_rules(size))}",
            where=where,
            key=key,
            way_out=f"Use {nearest}.",
        )

    def check_frames(self, frames: int, key: str = "") -> None:
        """As `check`, of a number of frames alone: an error of `key`, without sides that were not asked about."""
        nearest = self.nearest(MediaSize(frames, 1, 1))
        if nearest.frames != frames:
            rules = ", ".join(self._broken_rules(replace(nearest, frames=frames)))
            raise ConfigError(f"{frames} frames cannot be encoded: {rules}", key=key, way_out=f"Use {nearest.frames}.")

    def _broken_rules(self, size: MediaSize) -> list[str]:
        rules, step = [], self.side_step
        if size.height % step or size.width % step:
            rules.append(f"height and width must be multiples of {step}")
        for name, side, limits in (("height", size.height, self.heights), ("width", size.width, self.widths)):
            smallest, largest = self._side_limits(limits)
            if smallest == largest != side:
                rules.append(f"the {name} must be {smallest}")
            elif side < smallest:
                rules.append(f"the {name} must be at least {smallest}")
            elif largest is not None and side > largest:
                rules.append(f"the {name} must be at most {largest}")
        if not self.is_video:
            if size.frames == 1:
                return rules
            return [*rules, "images have one frame"]
        if self.frame_group:
            if size.frames != 1 and (size.frames % self.frame_group or size.frames < 1):
                rules.append(f"frames must be 1 or {self.frame_group}k")
        elif (size.frames - 1) % self.frame_step or size.frames < 1:
            rules.append(f"frames must be {self.frame_step}k+1")
        if self.most_frames is not None and size.frames > self.most_frames:
            rules.append(f"frames must be at most {self.most_frames}")
        return rules

    def takes(self, size: MediaSize) -> bool:
        """Whether a size can be encoded and gives back as many frames and pixels."""
        return size == self.nearest(size)

    def nearest(self, size: MediaSize) -> MediaSize:
        """The valid size next to one; of two equally near the smaller."""
        frames, step = 1, self.side_step
        if self.frame_group:
            frames = max(1, _nearest_multiple(size.frames, self.frame_group, least=0))
        elif self.is_video:
            most = None if self.most_frames is None else (self.most_frames - 1) // self.frame_step * self.frame_step
            frames = _nearest_multiple(size.frames - 1, self.frame_step, least=0, most=most) + 1
        height = _nearest_multiple(size.height, step, *self._side_limits(self.heights))
        return MediaSize(frames, height, _nearest_multiple(size.width, step, *self._side_limits(self.widths)))

    def _side_limits(self, limits: SideRange) -> SideRange:
        """The smallest and largest multiple of `side_step` inside limits."""
        step, (smallest, largest) = self.side_step, limits
        return max(step, math.ceil(smallest / step) * step), None if largest is None else largest // step * step

    def latent_shape(self, size: MediaSize) -> tuple[int, ...]:
        """(C, T, H, W) of a video model's latents, (C, H, W) of an image model's."""
        sides = (size.height // self.spatial_ratio, size.width // self.spatial_ratio)
        if not self.is_video:
            return (self.latent_channels, *sides)
        return (self.latent_channels, self._latent_frames(size.frames), *sides)

    def _latent_frames(self, frames: int) -> int:
        if self.frame_group and frames > 1:
            return frames // self.frame_group * self._group_latents
        return self.leading_frames + (frames - 1) // self.temporal_ratio + 1

    @property
    def _group_latents(self) -> int:
        """Latent frames of a group."""
        return (self.frame_group - 1) // self.temporal_ratio + 1

    def frames(self, latent_shape: tuple[int, ...]) -> int:
        """Frames of a video with latents of this shape, (C, T, H, W)."""
        if self.frame_group and latent_shape[-3] > 1:
            return latent_shape[-3] // self._group_latents * self.frame_group
        return (latent_shape[-3] - self.leading_frames - 1) * self.temporal_ratio + 1

    def grid(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Tokens of latents of this shape along time, height and width."""
        frames = latent_shape[-3] if self.is_video else self.patch[0]
        t, h, w = self.patch
        return frames // t, latent_shape[-2] // h, latent_shape[-1] // w

    def tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Number of tokens of latents of this shape."""
        return math.prod(self.grid(latent_shape))


@dataclass(frozen=True)
class SoundGeometry:
    """What a family makes of the sound of a clip."""

    sampling_rate: int
    channels: int
    """Of the wave."""
    samples_per_position: int
    """Of the wave, for a position of the latents in time."""
    latent_channels: int
    latent_bins: int

    def positions(self, frames: int, fps: float) -> int:
        """Positions of the sound of a clip, at least one."""
        return max(1, round(frames / fps * (self.sampling_rate / self.samples_per_position)))

    def latent_shape(self, positions: int) -> tuple[int, int, int]:
        """(C, L, M): channels, positions in time, and bins of frequency."""
        return (self.latent_channels, positions, self.latent_bins)


def _nearest_multiple(value: int, step: int, least: int, most: int | None = None) -> int:
    below = value // step * step
    nearest = max(least, below if value - below <= below + step - value else below + step)
    if most is None:
        return nearest
    return min(nearest, most)
