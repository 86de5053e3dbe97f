"""The one door to media files: every file is opened here, every image checked and decoded (videos: `video.py`).

Nothing outside the media roots is opened, nothing is fetched, and no format is decoded that is not on the list.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mindspeed_mm.core.errors import ConfigError, DataError

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""What is decoded, by content and whatever the file is called. JPEG covers the camera's multi-picture files."""
MAX_PIXELS = 8192 * 8192
MAX_FILE_BYTES = 256 * 2**20

_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
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


class MediaLoader:
    """Opens the media of a data set.

    Args:
        dataset_dir: Relative paths are joined to it; it is the first media root.
        media_roots: Further folders from which absolute paths may come.
    """

    def __init__(self, dataset_dir: str | Path, media_roots: Sequence[str | Path] = ()) -> None:
        self.dataset_dir = os.path.realpath(dataset_dir)
        self.roots = (self.dataset_dir, *(os.path.realpath(root) for root in media_roots))
        self._real_folders: dict[str, str] = {}

    def load_image(self, item: Any) -> Image.Image:
        """One picture, upright, as RGB on white.

        Args:
            item: A path, bytes, or `{"path" | "bytes"}` (bytes as base64 text in JSON).

        Raises:
            DataError: The item is missing, outside the roots, of a format or size that is refused, or broken.
            ConfigError: The item is remote, which is not built yet.
        """
        data, name = self.read(item)
        return decode_image(data, name)

    def read(self, item: Any) -> tuple[bytes, str]:
        """The item's bytes and what to call it in messages."""
        if isinstance(item, Mapping):
            found = item.get("bytes") if item.get("bytes") is not None else item.get("path")
            if isinstance(item.get("bytes"), str):
                return _from_base64(item["bytes"]), "base64 data"
            item = found
        if isinstance(item, bytes):
            return item, "embedded bytes"
        if not isinstance(item, str) or not item or "\x00" in item:
            raise DataError(
                f"{item!r} is no media item", way_out="Give a path, bytes, or an object with 'path' or 'bytes'."
            )
        refuse_remote(item)
        return self._read_file(item), item

    def open(self, item: str | bytes, most_bytes: int | None = None) -> BinaryIO:
        """A medium, opened for reading: for what need not be held in memory as a whole.

        Args:
            item: A path, or the file's bytes.
            most_bytes: Refuse larger files.

        Raises:
            DataError: The file is missing, outside the roots, not a regular one, empty or too large.
        """
        if isinstance(item, bytes):
            return io.BytesIO(item)
        refuse_remote(item)
        return os.fdopen(self._descriptor(item, most_bytes), "rb")

    def _read_file(self, name: str) -> bytes:
        with os.fdopen(self._descriptor(name, MAX_FILE_BYTES), "rb", buffering=0) as file:
            return file.readall()

    def _descriptor(self, name: str, most_bytes: int | None) -> int:
        path = self._confine(name)
        try:
            descriptor = os.open(path, _OPEN_FLAGS)  # a FIFO does not block, a link swapped in is not followed
        except OSError as error:
            reason = "not found" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error.strerror})"
            raise DataError(
                f"'{name}' {reason}", way_out=f"Relative paths start at dataset_dir, '{self.dataset_dir}'."
            ) from error
        try:
            _check_regular(os.fstat(descriptor), name, most_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _confine(self, name: str) -> str:
        """The real path of a media file, inside one of the roots. Folders are resolved once each."""
        folder, base = os.path.split(os.path.join(self.dataset_dir, name))  # noqa: PTH118 (thousands a second)
        real_folder = self._real_folders.get(folder)
        if real_folder is None:
            real_folder = self._real_folders[folder] = os.path.realpath(folder)
        path = f"{real_folder}{os.sep}{base}"
        if base in ("", ".", "..") or os.path.islink(path):  # noqa: PTH114
            path = os.path.realpath(path)
        if not any(path.startswith(root.rstrip(os.sep) + os.sep) for root in self.roots):
            raise DataError(
                f"'{name}' lies outside the media roots",
                key="data.dataset_param.basic_parameters.media_roots",
                way_out="Put it under dataset_dir, or list its folder in media_roots.",
            )
        return path


def _check_regular(status: os.stat_result, name: str, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"'{name}' is not a regular file")
    if status.st_size == 0:
        raise DataError(f"'{name}' is empty (0 bytes)")
    if most_bytes is not None and status.st_size > most_bytes:
        raise DataError(f"'{name}' has {status.st_size} bytes, more than {most_bytes}")


def refuse_remote(item: str, where: str = "") -> None:
    """Raise `DataError`, with the row's place, when a media path is a URL of any kind."""
    head = item[:64].lstrip().lower()
    if head.startswith(("http://", "https://", "ftp://", "s3://", "file:", "data:")):
        raise DataError(
            f"'{item[:60]}' is a URL: only local files are opened",
            where=where,
            way_out="Store the media under dataset_dir and give its path.",
        )


def check_remote_media_off(allow_remote_media: bool) -> None:
    """Raise when remote media are asked for."""
    if allow_remote_media:
        raise ConfigError(
            "remote media are not built yet",
            key="data.dataset_param.basic_parameters.allow_remote_media",
            way_out="Download the media and give local paths.",
        )


def decode_image(data: bytes, name: str = "image") -> Image.Image:
    """Decode fully (a cut file is found), turn upright by EXIF, and convert to RGB with alpha on white.

    Args:
        data: The file's bytes.
        name: What to call it in messages.

    Raises:
        DataError: The data are no image of an allowed format, too large, or broken.
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
        raise DataError(f"'{name}' is too large: {error}") from error
    except _DECODE_ERRORS as error:
        file.seek(0)
        raise DataError(f"'{name}' {why_unreadable(file.read(64), error)}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(
            f"'{name}' is {width} × {height} = {width * height / 1e6:.0f} megapixels, more than {MAX_PIXELS / 1e6:.0f}",
            way_out="Scale it down.",
        )
    return image


def _decoded(image: Image.Image, name: str) -> Image.Image:
    try:
        return _to_upright_rgb(image)
    except _DECODE_ERRORS as error:
        raise DataError(f"'{name}' is broken: {error}", way_out="Replace the file or drop the row.") from error


def _to_upright_rgb(image: Image.Image) -> Image.Image:
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


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"'{text[:30]}…' is not base64: {error}") from error


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
