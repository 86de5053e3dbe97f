"""From a row to pixels: pictures and clips, upright, scaled to cover a size and cropped; and what there is to tell of a
sample before it is decoded.

One road for training on raw media and for extraction, so that both see the same pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import (
    ImageHeader,
    animation_frames,
    decode_image,
    is_still_in_container,
    probe_image,
)
from mindspeed_mm.fsdp.data.data_utils.decoding.video import (
    VIDEO_SUFFIXES,
    ClipSampling,
    VideoHeader,
    probe_video,
    read_clip,
    too_short,
)
from mindspeed_mm.fsdp.data.data_utils.media import MAX_FILE_BYTES, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow

_VIDEO_STARTS = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI "))
"""(offset, bytes) by which a video in memory, without a name, is told."""


@dataclass(frozen=True)
class MediaHeader:
    """Size of a medium before anything is done to it, upright."""

    height: int
    width: int
    frames: int = 1
    fps: float = 0.0
    """0 of a still picture."""


@dataclass(frozen=True)
class View:
    """What is seen of a medium: the middle, as it is, unless told otherwise."""

    across: float = 0.5
    """Where the cut lies, from 0 (left) to 1 (right)."""
    down: float = 0.5
    """The same from top to bottom."""
    is_flipped: bool = False
    """Left and right change places."""


MIDDLE = View()


def is_video(row: GenerationRow) -> bool:
    """By its name, or by the first bytes where there is no name; animated pictures are told by their header alone."""
    if isinstance(row.media, str):
        return PurePath(row.media).suffix.lower() in VIDEO_SUFFIXES
    if is_still_in_container(row.media):
        return False
    return any(row.media[at : at + len(start)] == start for at, start in _VIDEO_STARTS)


def probe_media(row: GenerationRow, media: MediaLoader) -> MediaHeader:
    """Size of a row's medium, by its header.

    Raises:
        DataError: The file is missing, refused or no medium.
    """
    found = probe_times(row, media)
    return MediaHeader(found.height, found.width, found.frames, found.fps)


def probe_times(row: GenerationRow, media: MediaLoader) -> VideoHeader | ImageHeader:
    """The same with the times of all frames. Raises `DataError` as `probe_media`."""
    if is_video(row):
        with media.open(row.media) as file:
            header = probe_video(file, row.name)
        return header.part(row.cut, row.name) if row.cut else header
    _check_not_cut(row)
    # Pictures are read as a whole, so their size is limited; videos are read frame by frame.
    with media.open(row.media, MAX_FILE_BYTES) as file:
        return probe_image(file, row.name)


def media_pixels(
    row: GenerationRow,
    size: MediaSize,
    media: MediaLoader,
    sampling: ClipSampling | None = None,
    view: View = MIDDLE,
    *,
    is_whole: bool = False,
    repeats_still: bool = False,
) -> torch.Tensor:
    """A row's pixels, (3, T, H, W) uint8; T is 1 for pictures.

    Args:
        row: Names the medium.
        size: Frames, height and width to make of it. With one frame, an animated picture gives its first.
        media: The door to files.
        sampling: Which frames of a video or an animated picture.
        view: Where it is cut.
        is_whole: Nothing is cut off: what the medium does not cover is white.
        repeats_still: A still picture is shown in all frames, instead of being too short.

    Raises:
        DataError: The file is missing, refused, broken or too short.
    """
    sampling = sampling or ClipSampling()

    def shape(image: Image.Image) -> np.ndarray:
        if is_whole:
            return inside(image, size.height, size.width, view)
        return cover(image, size.height, size.width, view)

    if is_video(row):
        with media.open(row.media) as file:
            return torch.from_numpy(read_clip(file, size.frames, sampling, shape, row.name, row.cut))
    _check_not_cut(row)
    data, name = media.read(row.media)
    if size.frames == 1:
        pictures = [shape(decode_image(data, name))]
    elif repeats_still and probe_image(io.BytesIO(data), name).frames == 1:
        pictures = [shape(decode_image(data, name))] * size.frames
    else:
        pictures = [shape(frame) for frame in _animation(data, size.frames, sampling, name)]
    # (T, H, W, 3) → (3, T, H, W)
    return torch.from_numpy(np.ascontiguousarray(np.stack(pictures).transpose(3, 0, 1, 2)))


def _check_not_cut(row: GenerationRow) -> None:
    if row.cut:
        raise DataError(f"'{row.name}' is a picture, of which no frames are cut", key="cut", way_out="Leave cut out.")


def _animation(data: bytes, frames: int, sampling: ClipSampling, name: str) -> Iterator[Image.Image]:
    header = probe_image(io.BytesIO(data), name)
    found = 1
    if header.frames > 1:
        found = sampling.frames_of(header.frames, header.fps)
    if found < frames and not sampling.repeats_short:
        raise too_short(name, found, frames)
    numbers = [0] * frames
    if header.frames > 1:
        numbers = sampling.numbers(header, frames)
    return animation_frames(data, numbers, name)


def cover(image: Image.Image, height: int, width: int, view: View = MIDDLE) -> np.ndarray:
    """Scale (bicubic, antialiased) so that a size is covered, and cut to it: (height, width, 3) uint8."""
    scale = max(width / image.width, height / image.height)
    # The part of the picture that is seen, in its own pixels; `box` lets Pillow cut between pixels.
    cut_width, cut_height = width / scale, height / scale
    left, top = max(0.0, image.width - cut_width) * view.across, max(0.0, image.height - cut_height) * view.down
    box = (left, top, min(left + cut_width, image.width), min(top + cut_height, image.height))
    pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC, box=box))
    if view.is_flipped:
        return np.ascontiguousarray(pixels[:, ::-1])
    return pixels


def inside(image: Image.Image, height: int, width: int, view: View = MIDDLE) -> np.ndarray:
    """Scale (bicubic, antialiased) into the middle of a white picture of a size: (height, width, 3) uint8."""
    scale = min(width / image.width, height / image.height)
    inner_height, inner_width = max(1, int(image.height * scale)), max(1, int(image.width * scale))
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    pixels = np.full((height, width, 3), 255, dtype=np.uint8)
    scaled = image.resize((inner_width, inner_height), Image.Resampling.BICUBIC)
    pixels[top : top + inner_height, left : left + inner_width] = np.asarray(scaled)
    if view.is_flipped:
        return np.ascontiguousarray(pixels[:, ::-1])
    return pixels


@dataclass(frozen=True)
class SampleDescription:
    """Medium, captions and size of a sample."""

    source: str | bytes
    """Path of the medium, or its bytes."""
    captions: tuple[str, ...]
    drawn: int
    """Number of the caption that the first epoch takes."""
    size: MediaSize
    """That it is trained in: its bucket."""
    header: MediaHeader | None = None
    """Header of the medium as stored; None of features that do not note it."""
    is_video: bool = False
    further: tuple[tuple[str, MediaKind, str | bytes], ...] = ()
    """Other media that the row names: role, kind, and path or bytes."""
    contradiction: str = ""
    """What the row declares falsely of its medium, where that does not change its size."""
    beside: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """What features note of the further media instead: role → kind, height, width, frames and frames a second."""
