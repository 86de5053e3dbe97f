"""Pictures: formats that are let in, headers, full decoding; upright, as RGB on white."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mindspeed_mm.core.errors import DataError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""What is decoded, by content and whatever the file is called. JPEG covers the camera's multi-picture files."""
MAX_PIXELS = 8192 * 8192

_DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error, zlib.error, MemoryError)
"""What Pillow's decoders raise on broken data."""
_ORIENTATION = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})
"""EXIF orientations that swap height and width."""
_EXIF_KEYS = frozenset({"exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"})
_KNOWN_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a Git LFS pointer: run `git lfs pull`"),
    (b"%!PS", "format EPS not allowed"),
    (b"\xc5\xd0\xd3\xc6", "format EPS not allowed"),
    (b"8BPS", "format PSD not allowed"),
    (b"II*\x00", "format TIFF not allowed"),
    (b"MM\x00*", "format TIFF not allowed"),
    (b"%PDF", "format PDF not allowed"),
    (b"<svg", "format SVG not allowed"),
    (b"<?xml", "format SVG not allowed"),
)


class TooManyPixelsError(DataError):
    """A picture promises more pixels than are ever decoded."""


def decode_image(data: bytes, name: str = "image") -> Image.Image:
    """Decode fully (a cut file is found), turn upright by EXIF, and convert to RGB with alpha on white.

    Args:
        data: The file's bytes.
        name: What to call it in messages.

    Raises:
        DataError: The data are not an image of an allowed format, too large, or broken.
    """
    image = _opened(io.BytesIO(data), name)
    if getattr(image, "is_animated", False):
        warnings.warn(f"'{name}' and perhaps others have several frames: the first is used", stacklevel=2)
    return _decoded(image, name)


@dataclass(frozen=True)
class ImageHeader:
    """What an image file says of itself, as it will stand upright."""

    height: int
    width: int
    frames: int
    """1 unless the image is animated."""
    fps: float
    """Frames a second of an animation; 0 when there is one frame."""


def probe_image(file: BinaryIO, name: str = "image") -> ImageHeader:
    """Read an image's header, and of an animation how long its frames are shown. Pixels of a still are not decoded.

    Raises:
        DataError: As `decode_image`, except that a cut file may go unnoticed.
    """
    image = _opened(file, name)
    width, height = image.size
    if not _EXIF_KEYS.isdisjoint(image.info) and image.getexif().get(_ORIENTATION, 1) in _SIDEWAYS:
        width, height = height, width
    frames = getattr(image, "n_frames", 1)
    return ImageHeader(height, width, frames, _frame_rate(image, frames, name) if frames > 1 else 0.0)


def animation_frames(data: bytes, indices: Sequence[int], name: str = "image") -> Iterator[Image.Image]:
    """Some frames of an animated GIF, WebP or PNG, upright, as RGB on white; one is held at a time.

    Args:
        data: The file's bytes.
        indices: Rising; the last frame stands for those beyond the end.
        name: What to call it in messages.

    Raises:
        DataError: As `decode_image`.
    """
    image = _opened(io.BytesIO(data), name)
    last = getattr(image, "n_frames", 1) - 1
    for index in indices:
        try:
            image.seek(min(index, last))
        except _DECODE_ERRORS as error:
            raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error
        yield _decoded(image.copy(), name)


def _frame_rate(image: Image.Image, frames: int, name: str) -> float:
    """Mean rate over all frames; browsers show frames without a time for 0.1 s, and so it is taken here."""
    shown_ms = 0.0
    try:
        for index in range(frames):
            image.seek(index)
            if image.format == "WEBP":  # tells a frame's time only when it is decoded
                image.load()
            shown_ms += image.info.get("duration") or 100
    except _DECODE_ERRORS as error:
        raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error
    return 1000 * frames / shown_ms


def _opened(file: BinaryIO, name: str) -> Image.Image:
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"'{name}' is too large: {error}") from error
    except _DECODE_ERRORS as error:
        file.seek(0)
        raise DataError(f"'{name}' {why_unreadable(file.read(64), error)}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise TooManyPixelsError(
            f"'{name}' is {width} × {height} = {width * height / 1e6:.0f} megapixels, more than {MAX_PIXELS / 1e6:.0f}",
            way_out="Scale it down.",
        )
    return image


def _decoded(image: Image.Image, name: str) -> Image.Image:
    try:
        return to_upright_rgb(image)
    except _DECODE_ERRORS as error:
        raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error


def to_upright_rgb(image: Image.Image) -> Image.Image:
    """The picture as a model is shown it: turned as its EXIF data say, in RGB."""
    image.load()
    if not _EXIF_KEYS.isdisjoint(image.info):
        image = ImageOps.exif_transpose(image)
    return image if image.mode == "RGB" and "transparency" not in image.info else _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB: alpha over white, 16-bit gray scaled to 8 bits (a plain convert drops the one and clips the other)."""
    if image.mode.startswith("I"):
        gray = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((gray * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def why_unreadable(start: bytes, error: BaseException) -> str:
    """What is wrong with a file that is not opened as an image, by its first bytes."""
    head = start.lstrip()
    for known, reason in _KNOWN_STARTS:
        if head.startswith(known):
            return reason
    if not isinstance(error, UnidentifiedImageError):
        return f"is broken: {error}"
    words = readable_start(head)
    return (
        f"is not an image (starts with {words})"
        if words
        else f"is not an image of an allowed format ({', '.join(IMAGE_FORMATS)})"
    )


def readable_start(head: bytes) -> str:
    """The first word or two of a file that is text; empty when it is not."""
    words = head.lstrip()[:20].decode("ascii", errors="replace").split("\n")[0]
    return words if words.isascii() and words.isprintable() else ""
