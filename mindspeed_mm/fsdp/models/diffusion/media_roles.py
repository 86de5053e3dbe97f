"""Media that a sample has beside the one that is learned: what a task is conditioned on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TARGET = "target"
"""The medium that is learned."""


@dataclass(frozen=True)
class MediaRole:
    """One medium of a sample, brought to the size of the target and cut as the target is."""

    name: str
    """As `DiffusionAdapter.encode_conditions` is given it."""
    columns: tuple[str, ...]
    """Where a row may name it, in this order."""
    frames: Literal["one", "all", "sound"]
    """A picture, as many frames as the target has, or the sound of these frames."""
    prompt: str
    """Field of a prompt, and option of `mm infer`, that names it for sampling."""
    argument: str
    """Argument of the pipeline."""
    frame_of_target: int | None = None
    """Which frame of the target stands in where a row names none; None: every row names one."""
    is_trained: bool = True
    """False: of sampling alone, as the video that v2v begins with."""

    @property
    def batch_key(self) -> str:
        """Of its pixels, (B, 3, T, H, W) uint8, or of its sound, (B, channels, samples) float32."""
        return self.name if self.frames == "sound" else f"pixels_{self.name}"


FIRST_FRAME = MediaRole("first_frame", ("first_frame", "first_image"), "one", "image", "image", frame_of_target=0)
LAST_FRAME = MediaRole("last_frame", ("last_frame", "last_image"), "one", "last_image", "last_image", -1)
_SOURCES = ("source", "source_image", "input_image", "edit_image")
SOURCE_PICTURE = MediaRole("source", _SOURCES, "one", "image", "image")
MASK_OF_PICTURE = MediaRole("mask", ("mask", "mask_image"), "one", "mask", "mask_image")
PICTURE_AROUND_MASK = MediaRole("source", _SOURCES, "one", "image", "image", frame_of_target=0)
SOURCE_VIDEO = MediaRole("source", ("source", "source_video"), "all", "video", "video", is_trained=False)
CONTROL_VIDEO = MediaRole("control", ("control", "control_video", "src_video", "source"), "all", "control", "video")
MASK_OF_VIDEO = MediaRole("mask", ("mask", "mask_video", "src_video_mask"), "all", "mask", "mask")
REJECTED = MediaRole("rejected", ("file_rejected", "rejected", "path_rejected"), "all", "", "")
"""The side of a preference pair that is thought less of; no family asks for it, and every one learns from it."""
REJECTED_LATENTS = "rejected_latents"
"""Where a batch has the latents of it."""
SOUND = MediaRole("sound", ("audio", "sound", "audio_path"), "sound", "sound", "sound", frame_of_target=0)
"""The target's own track, unless a row names a file of sound; never asked for in sampling."""
