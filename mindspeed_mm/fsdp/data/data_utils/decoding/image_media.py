"""Pictures: formats that are let in, headers, full decoding; upright, as RGB on white."""

from __future__ import annotations

import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mindspeed_mm.core.errors import DataError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM")
"""What is decoded, by content and whatever the file is called. JPEG covers the camera's multi-picture files."""
_SUFFIXES_OF_FORMATS = (
    ".png .apng .jpg .jpeg .jpe .jfif .mpo .webp .bmp .gif .tif .tiff .avif .avifs .jp2 .j2k .j2c .jpc .jpf .jpx "
    ".ppm .pgm .pbm .pnm"
)
IMAGE_SUFFIXES = frozenset(_SUFFIXES_OF_FORMATS.split())
"""Of files that are pictures of these formats, in lower case; as Pillow registers them."""
_ANIMATED = frozenset({"GIF", "WEBP", "PNG", "AVIF"})
"""Formats whose further pictures are frames, not pages or views."""
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
    (b"%PDF", "format PDF not allowed"),
    (b"<svg", "format SVG not allowed"),
    (b"<?xml", "format SVG not allowed"),
    (b"\xff\x0a", "format JPEG XL not allowed"),
    (b"\x00\x00\x00\x0cJXL ", "format JPEG XL not allowed"),
)
_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})
_HEIF = "format HEIF (HEIC) not allowed"
_WAY_OUT = "Convert or replace the file, or drop the row."
_PILLOW = r"PIL\."
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP"})
"""Chunks of a PNG that say something of it, and are no part of its pixels."""


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
    if _frames(image) > 1:
        warnings.warn(f"'{name}' and perhaps others have several frames: the first is used", stacklevel=2)
    elif image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
        warnings.warn(f"'{name}' and perhaps others have several pages: the first is used", stacklevel=2)
    try:
        return _decoded(image, name)
    except DataError as error:
        if not _is_long_text(error.__cause__):
            raise
        return _decoded(_opened(_without_texts(io.BytesIO(data)), name), name)


@dataclass(frozen=True)
class ImageHeader:
    """What an image file says of itself, as it will stand upright."""

    height: int
    width: int
    frames: int
    """1 unless the image is animated."""
    fps: float
    """Frames per second of an animation from its first frame to its last, on average; 0 when there is one frame."""
    begins_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    """When each frame of an animation is shown, in seconds from the first; empty where frame i is shown at i / fps."""


def probe_image(file: BinaryIO, name: str = "image") -> ImageHeader:
    """Read an image's header, and of an animation how long its frames are shown. Pixels of a still are not decoded.

    Raises:
        DataError: As `decode_image`, except that a cut file may go unnoticed.
    """
    image = _opened(file, name)
    width, height = image.size
    if not _EXIF_KEYS.isdisjoint(image.info) and image.getexif().get(_ORIENTATION, 1) in _SIDEWAYS:
        width, height = height, width
    frames = _frames(image)
    if frames == 1:
        return ImageHeader(height, width, 1, 0.0)
    begins_s = _begins_s(image, frames, name)
    fps = (frames - 1) / begins_s[-1]
    is_steady = all(math.isclose(time_s, number / fps, abs_tol=1e-6) for number, time_s in enumerate(begins_s))
    return ImageHeader(height, width, frames, fps, () if is_steady else tuple(begins_s))


def animation_frames(data: bytes, indices: Sequence[int], name: str = "image") -> Iterator[Image.Image]:
    """Some frames of an animated GIF, WebP or PNG, upright, as RGB on white; one is held at a time.

    Args:
        data: The file's bytes.
        indices: Rising; the last frame stands for those beyond the end.
        name: What to call it in messages.

    Raises:
        DataError: As `decode_image`.
    """
    file = io.BytesIO(data)
    image = _opened(_without_texts(file) if data.startswith(_PNG_START) else file, name)
    last = _frames(image) - 1
    for index in indices:
        try:
            image.seek(min(index, last))
        except _DECODE_ERRORS as error:
            raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error
        yield _decoded(image.copy(), name)


def _frames(image: Image.Image) -> int:
    """Frames of an animation; the pages of a TIFF and the views of a camera's multi-picture file are none."""
    if image.format in _ANIMATED:
        return int(getattr(image, "n_frames", 1))
    return 1


def _begins_s(image: Image.Image, frames: int, name: str) -> list[float]:
    """When each frame is shown; browsers show frames without a time for 0.1 s, and so it is taken here."""
    begins_s, shown_ms = [0.0], 0.0
    try:
        for index in range(frames - 1):
            image.seek(index)
            if image.format in ("WEBP", "AVIF"):  # tell a frame's time only when it is decoded
                image.load()
            shown_ms += image.info.get("duration") or 100
            begins_s.append(shown_ms / 1000)
    except _DECODE_ERRORS as error:
        raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error
    return begins_s


def _opened(file: BinaryIO, name: str) -> Image.Image:
    _silence_pillow()
    try:
        image = Image.open(file, formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        raise TooManyPixelsError(f"'{name}' is too large: {error}") from error
    except _DECODE_ERRORS as error:
        file.seek(0)
        if _is_long_text(error):
            return _opened(_without_texts(file), name)
        raise DataError(f"'{name}' {why_unreadable(file.read(64), error)}", way_out=_WAY_OUT) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise TooManyPixelsError(
            f"'{name}' is {width} × {height} = {width * height / 1e6:.0f} megapixels, more than {MAX_PIXELS / 1e6:.0f}",
            way_out="Scale it down.",
        )
    return image


def _silence_pillow() -> None:
    """Pillow warns without the file's name, of what is refused here (too many pixels) or is no fault of the pixels
    (EXIF data, palettes). A filter of the process, for those of a thread would reach other threads."""
    if not any(getattr(entry[3], "pattern", None) == _PILLOW for entry in warnings.filters):
        warnings.filterwarnings("ignore", category=UserWarning, module=_PILLOW)
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=_PILLOW)


def _is_long_text(error: BaseException | None) -> bool:
    """Whether Pillow refuses the texts in a PNG (prompts, whole workflows), which have no part in its pixels."""
    return isinstance(error, ValueError) and "MAX_TEXT_" in str(error)


def _without_texts(file: BinaryIO) -> BinaryIO:
    """A PNG without its text chunks; the data of other chunks as they are."""
    file.seek(0)
    kept = [file.read(len(_PNG_START))]
    while len(head := file.read(8)) == 8:  # length and type; then the data and a check sum
        length, kind = struct.unpack(">I4s", head)
        if kind in _PNG_TEXTS:
            file.seek(length + 4, io.SEEK_CUR)
        else:
            kept.append(head + file.read(length + 4))
    return io.BytesIO(b"".join(kept))


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
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB: alpha over white, 16-bit gray scaled to 8 bits (a plain convert drops the one and clips the other)."""
    if image.mode.startswith("I"):
        gray = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        return Image.fromarray(((gray * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, which have no known range")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def why_unreadable(start: bytes, error: BaseException) -> str:
    """What is wrong with a file that is not opened as an image, by its first bytes."""
    head = start.lstrip()
    for known, reason in _KNOWN_STARTS:
        if start.startswith(known) or head.startswith(known):
            return reason
    if is_still_in_container(start):
        if start[8:12] in _AVIF_BRANDS:
            return "is an AVIF picture that this Pillow cannot read"
        return _HEIF
    if not isinstance(error, UnidentifiedImageError):
        return f"is broken: {error}"
    words = readable_start(head)
    return (
        f"is not an image (starts with {words})"
        if words
        else f"is not an image of an allowed format ({', '.join(IMAGE_FORMATS)})"
    )


def is_still_in_container(start: bytes) -> bool:
    """Whether a file that begins as an MP4 does is a picture (AVIF, HEIF)."""
    return start[4:8] == b"ftyp" and start[8:12] in _HEIF_BRANDS | _AVIF_BRANDS


def readable_start(head: bytes) -> str:
    """The first word or two of a file that is text; empty when it is not."""
    words = head.lstrip()[:20].decode("ascii", errors="replace").split("\n")[0]
    if words.isascii() and words.isprintable():
        return words
    return ""
