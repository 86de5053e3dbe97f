"""A medium as a person looks at it: small pictures, a strip of frames, the shape of a sound."""

from __future__ import annotations

import base64
import io
import wave
from dataclasses import dataclass, field

import click
import numpy as np
from PIL import Image

from mindspeed_mm.core.errors import DataError, MMError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader, animation_frames
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem

PICTURE_PIXELS, FRAME_PIXELS = 320, 128
"""Longest sides shown."""
MOST_FRAMES = 12
MOST_SECONDS = 20.0
"""Longest audio that can be played from a page."""
WAVE_POINTS = 200
_THUMBNAIL = (32, 20)


@dataclass
class MediumView:
    """What is shown of a medium."""

    kind: str
    facts: str = ""
    images: list[Image.Image] = field(default_factory=list)
    """The picture, or frames of the video in order."""
    times_s: list[float] = field(default_factory=list)
    """Times of the frames in seconds."""
    sound: np.ndarray | None = None
    """Mono, -1 to 1."""
    rate: int = 0
    """Sampling rate of the audio in Hz."""
    trouble: str = ""


def view_medium(media: MediaLoader | None, item: MediaItem) -> MediumView:
    """Open a medium as training does; what is wrong with it is told in its place.

    Args:
        media: The data set's `MediaLoader`; None where it has none.
        item: The medium.
    """
    if media is None:
        return MediumView(item.kind, trouble="not shown: the data set does not say where its media are")
    try:
        return {"image": _image, "video": _video, "audio": _audio}[item.kind](media, item.source)
    except MMError as error:
        return MediumView(item.kind, trouble=error.problems[0].what)


def _image(media: MediaLoader, source: object) -> MediumView:
    image = media.load_image(source)
    return MediumView("image", f"{image.width} × {image.height}", [image])


def _video(media: MediaLoader, source: object) -> MediumView:
    if (found := _animation(media, source)) is not None:
        return found
    clip = media.load_video(source)
    header, frames = clip.header, len(clip.frames)
    times = header.timestamps
    whole_s = header.total_frames / header.fps
    facts = f"{header.width} × {header.height}, {whole_s:.1f} s, {frames} of {header.total_frames} frames taken"
    taken = _spread(frames)
    pictures = [Image.fromarray(clip.frames[n]) for n in taken]
    return MediumView("video", facts, pictures, [times[n] for n in taken])


def _animation(media: MediaLoader, source: object) -> MediumView | None:
    """An animated picture, which generators learn as a clip; None where it is none."""
    try:
        header = media.probe("image", source)
    except DataError:
        return None
    assert isinstance(header, ImageHeader)
    if header.frames == 1:
        return None
    taken = _spread(header.frames)
    times = header.begins_s or tuple(n / header.fps for n in range(header.frames))
    whole_s = header.frames / header.fps
    facts = f"{header.width} × {header.height}, {whole_s:.1f} s, an animation of {header.frames} frames"
    data, name = media.read(source)
    return MediumView("video", facts, list(animation_frames(data, taken, name)), [times[n] for n in taken])


def _spread(frames: int) -> list[int]:
    """The first frame, the last, and others evenly between them; of a short clip each once."""
    return sorted({round(n * (frames - 1) / (MOST_FRAMES - 1)) for n in range(MOST_FRAMES)})


def _audio(media: MediaLoader, source: object) -> MediumView:
    clip = media.load_audio(source)
    return MediumView("audio", f"{clip.seconds:.2f} s at {clip.rate:,} Hz", sound=clip.samples, rate=clip.rate)


# --- for a terminal --------------------------------------------------------------------------------------------------


def thumbnail(image: Image.Image) -> list[str]:
    """A picture as coloured half blocks, two pixels a character."""
    small = image.convert("RGB")
    small.thumbnail((_THUMBNAIL[0], 2 * _THUMBNAIL[1]))
    # (height, width, 3) with an even height: a character is two pixels high
    pixels = np.asarray(small.resize((small.width, small.height + small.height % 2)))
    lines = []
    for upper_row, lower_row in zip(pixels[::2], pixels[1::2], strict=True):
        pairs = zip(upper_row, lower_row, strict=True)
        lines.append("".join(click.style("▀", fg=_rgb(upper), bg=_rgb(lower)) for upper, lower in pairs))
    return lines


def _rgb(pixel: np.ndarray) -> tuple[int, int, int]:
    red, green, blue = pixel.tolist()
    return red, green, blue


# --- for a page ------------------------------------------------------------------------------------------------------


def picture_uri(image: Image.Image, longest: int = PICTURE_PIXELS) -> str:
    """A picture inside the page: small ones without loss."""
    small = image.copy()
    small.thumbnail((longest, longest))
    data = io.BytesIO()
    if max(image.size) <= FRAME_PIXELS:
        kind = "png"
        small.save(data, "PNG")
    else:
        kind = "jpeg"
        small.save(data, "JPEG", quality=80)
    return f"data:image/{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def sound_uri(samples: np.ndarray, rate: int) -> str:
    """The beginning of a sound inside the page, as 16-bit WAV."""
    taken = samples[: round(MOST_SECONDS * rate)]
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        # WAV is little-endian on every machine
        file.writeframes((np.clip(np.nan_to_num(taken), -1, 1) * 32767).astype("<i2").tobytes())
    return f"data:audio/wav;base64,{base64.b64encode(data.getvalue()).decode()}"


def wave_points(samples: np.ndarray, width: int = 300, height: int = 60) -> str:
    """The outline of a sound as the points of an SVG polygon: the loudest sample of each stretch, up and down."""
    parts = np.array_split(np.abs(np.nan_to_num(samples)), min(WAVE_POINTS, max(len(samples), 1)))
    heights = [float(part.max(initial=0)) for part in parts]
    loudest = max([*heights, 1e-9])
    step, middle = width / max(len(heights) - 1, 1), height / 2
    upper, lower = [], []
    for n, value in enumerate(heights):
        half = middle * value / loudest
        upper.append(f"{n * step:.1f},{middle - half:.1f}")
        lower.append(f"{n * step:.1f},{middle + half:.1f}")
    return " ".join([*upper, *reversed(lower)])  # along the top to the right, and back along the bottom
