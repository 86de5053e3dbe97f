"""The one door to media: pictures, videos and sounds, from files, memory and, where it is allowed, the network.

Nothing outside the media roots is opened, nothing is fetched unless asked for, and no format is decoded that is not on
a list. Decoding stands in `image_media`, `video_clip` and `audio`. Relative paths start at the folder of their rows,
where the configuration does not say where media are.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import re
import stat
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioClip, AudioHeader, probe_audio, read_audio
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader, decode_image, probe_image
from mindspeed_mm.fsdp.data.data_utils.decoding.remote_media import fetch
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import (
    ClipHeader,
    ClipRule,
    FrameSizes,
    VideoClip,
    probe_clip,
    rule_of,
    watch,
    watch_pictures,
)
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind, Sample, options_of
from mindspeed_mm.fsdp.data.data_utils.tar_members import members_of, open_span, split_member
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.model_parts import setting_of

DEFAULT_SAMPLING_RATE = 16000
"""Sampling rate of audio in Hz, where neither the configuration nor the processor says."""
MAX_FILE_BYTES = 256 * 2**20
"""Maximum size of image and audio files, which are read as a whole."""

_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True)
class MediaLimits:
    """How much of a medium is taken; the keys of `preprocess_parameters` that are about files, not about a model."""

    clip: ClipRule = field(default_factory=ClipRule)
    video_max_pixels: int | None = None
    """Maximum area of a video frame, for models whose processor has no such limit; None: frames keep their size."""
    video_min_pixels: int = 0
    audio_sampling_rate: int = DEFAULT_SAMPLING_RATE
    allow_remote: bool = False
    """Fetch media from URLs."""

    @classmethod
    def of(cls, preprocess: PreprocessParameters, processor: object, *, allow_remote: bool = False) -> MediaLimits:
        """From `preprocess_parameters`, and from the model's processor what is not given there.

        Args:
            preprocess: The section.
            processor: Processor or tokenizer.
            allow_remote: `basic_parameters.allow_remote_media`.
        """
        heard = setting_of(setting_of(processor, object, "feature_extractor"), int, "sampling_rate")
        return cls(
            clip=ClipRule.of(preprocess, setting_of(processor, object, "video_processor")),
            video_max_pixels=preprocess.video_max_pixels,
            video_min_pixels=preprocess.video_min_pixels or 0,
            audio_sampling_rate=preprocess.audio_sampling_rate or heard or DEFAULT_SAMPLING_RATE,
            allow_remote=allow_remote,
        )


class MediaLoader:
    """Opens the media of a data set.

    An item is a path, bytes, base64 text, a `data:` URL, which holds the medium itself, or `{"path" | "bytes"}` (bytes
    as base64 text or a `data:` URL in JSON); a video is also a list of such pictures; where it is allowed, an address
    of the web (http, https).

    Args:
        dataset_dir: Relative paths are joined to it; it is the first media root.
        media_roots: Further folders from which absolute paths may come; beginnings of URLs on private hosts.
        limits: How much of a medium is taken.
        called: What messages call `dataset_dir`, where no section of a YAML names it.
    """

    def __init__(
        self,
        dataset_dir: str | Path,
        media_roots: Sequence[str | Path] = (),
        limits: MediaLimits | None = None,
        *,
        called: str | None = None,
    ) -> None:
        self.dataset_dir, self._called = os.path.realpath(dataset_dir), called
        self.limits = limits or MediaLimits()
        urls, folders = [], [self.dataset_dir]
        for root in map(str, media_roots):
            if root.lower().startswith(("http://", "https://")):
                urls.append(root)
            else:
                folders.append(os.path.realpath(root))
        self._url_roots, self.roots = tuple(urls), tuple(folders)
        # With the separator: /data must not let /database in.
        self._inside_roots = tuple(root.rstrip(os.sep) + os.sep for root in self.roots)
        """What real paths of media begin with."""
        self._real_folders: dict[str, str] = {}
        self.decoded = 0
        """Pictures, frames, clips and sounds that were decoded so far."""

    def load_image(self, item: object) -> Image.Image:
        """One picture, upright, as RGB on white.

        Raises:
            DataError: The item is missing, outside the roots, of a format or size that is refused, or broken.
        """
        data, name = self.read(item)
        self.decoded += 1
        return decode_image(data, name)

    def load_video(self, item: object, sizes: FrameSizes | None = None, *, with_sound: bool = False) -> VideoClip:
        """The frames of a video that a model looks at.

        Args:
            item: A video, or a list of pictures, taken to be frames at the rate that is asked for.
            sizes: How large frames are kept; not given: within the pixel limits.
            with_sound: Load its sound too.

        Raises:
            DataError: As `load_image`; or it is cut, or has no sound that is asked for.
        """
        sizes = sizes or PixelBudget(self.limits.video_max_pixels, self.limits.video_min_pixels)
        if isinstance(item, (list, tuple, np.ndarray)):
            return self._load_frames(list(item), sizes, with_sound)
        source, name = self._source(item)
        self.decoded += 1
        with self.open(source) as file:
            clip = watch(file, self._clip_rule(item), sizes, name)
        if not with_sound:
            return clip
        if not {"start", "end"}.isdisjoint(options_of(item)):
            raise DataError("the sound of a part of a video is not cut out", way_out="Cut the video itself.")
        with self.open(source) as file:
            return replace(clip, sound=read_audio(file, self.limits.audio_sampling_rate, name))

    def load_audio(self, item: object) -> AudioClip:
        """A sound, or the sound of a video, as one mono track. Raises `DataError` as `load_image`."""
        source, name = self._source(item)
        self.decoded += 1
        with self.open(source) as file:
            return read_audio(file, self.limits.audio_sampling_rate, name)

    def probe(self, kind: MediaKind, item: object) -> ImageHeader | ClipHeader | AudioHeader:
        """What a medium will be once it is loaded, from its header. Raises `DataError` where the header tells."""
        if kind == "video" and isinstance(item, (list, tuple, np.ndarray)):
            first = self.probe("image", _first_frame(item))
            assert isinstance(first, ImageHeader)
            return self.limits.clip.header_of_frames(first.height, first.width, len(item))
        source, name = self._source(item)
        with self.open(source) as file:
            if kind == "image":
                return probe_image(file, name)
            if kind == "video":
                return probe_clip(file, self._clip_rule(item), name)
            return probe_audio(file, self.limits.audio_sampling_rate, name)

    def _clip_rule(self, item: object) -> ClipRule:
        """Which frames are taken of a video."""
        options = options_of(item)
        if options:
            return rule_of(self.limits.clip, options)
        return self.limits.clip

    def _load_frames(self, items: Sequence[object], sizes: FrameSizes, with_sound: bool) -> VideoClip:
        if with_sound:
            raise DataError("a list of pictures has no sound", way_out="Set use_audio_in_video: false.")
        first = self.load_image(_first_frame(items))
        header = self.limits.clip.header_of_frames(first.height, first.width, len(items))
        size = sizes.size(len(header.indices), first.height, first.width)
        return watch_pictures((self.load_image(items[index]) for index in header.indices), header, size, sizes)

    def read(self, item: object) -> tuple[bytes, str]:
        """The item's bytes and what to call it in messages."""
        source, name = self._source(item)
        if isinstance(source, str):
            source = self._read_file(source)
        return source, name

    def _source(self, item: object) -> tuple[str | bytes, str]:
        """A path or the bytes of an item, and what to call it in messages."""
        if isinstance(item, Mapping):
            data = item.get("bytes")
            if isinstance(data, str):
                if is_data_url(data):
                    return decode_data_url(data)
                return (_from_base64(data), "base64 data")
            if data is None:
                data = item.get("path")
            item = data
        if isinstance(item, bytes):
            return item, "embedded bytes"
        if not isinstance(item, str) or not item or "\x00" in item:
            raise DataError(
                f"{item!r} is not a media item", way_out="Give a path, bytes, or an object with 'path' or 'bytes'."
            )
        if is_data_url(item):
            return decode_data_url(item)
        if _is_remote(item):
            return self._fetched(item), item[:100]
        if _BASE64.fullmatch(item):
            return _from_base64(item), "base64 data"
        return item, item

    def _fetched(self, url: str) -> bytes:
        if not self.limits.allow_remote:
            refuse_remote(url)
        return fetch(url.strip(), self._url_roots, MAX_FILE_BYTES)

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
        archive, member = split_member(item)
        if not member or os.path.isdir(os.path.join(self.dataset_dir, archive)):  # noqa: PTH112, PTH118 (of every row)
            return os.fdopen(self._descriptor(item, most_bytes), "rb")
        span = members_of(self._archive(archive)).get(member)
        if span is None:
            raise DataError(f"'{archive}' holds no '{member}'")
        _check_size(span.size, item, most_bytes)
        return open_span(os.fdopen(self._descriptor(archive, None), "rb"), span)

    def _read_file(self, name: str) -> bytes:
        with self.open(name, MAX_FILE_BYTES) as file:
            return file.read()

    def _descriptor(self, name: str, most_bytes: int | None) -> int:
        try:
            descriptor = self._opened(name)
        except OSError as error:
            reason = "not found" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error.strerror})"
            start = f"{self._called or 'dataset_dir'}, '{self.dataset_dir}'"
            raise DataError(
                f"'{name}' {reason}", way_out=f"Relative paths start at {start}, or else at the working directory."
            ) from error
        try:
            _check_regular(os.fstat(descriptor), name, most_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _opened(self, name: str) -> int:
        """A descriptor of a medium. Rows that older tools wrote have paths that start at the working directory, and lie
        inside the roots all the same."""
        path = self._confine(name)
        try:
            return os.open(path, _OPEN_FLAGS)  # a FIFO does not block, a link swapped in is not followed
        except FileNotFoundError:
            # From the working directory this time, under the same rule of roots.
            other = os.path.realpath(name)
            if path == other or not self._is_inside_roots(other):
                raise
            return os.open(self._confine(other), _OPEN_FLAGS)

    def _archive(self, name: str) -> str:
        """The real path of an archive, which may lie in the working directory as any medium may."""
        path = self._confine(name)
        if os.path.exists(path):  # noqa: PTH110 (of every medium)
            return path
        other = os.path.realpath(name)
        if self._is_inside_roots(other):
            return other
        return path

    def _confine(self, name: str) -> str:
        """The real path of a media file, inside one of the roots. Folders are resolved once each."""
        folder, base = os.path.split(os.path.join(self.dataset_dir, name))  # noqa: PTH118 (thousands a second)
        real_folder = self._real_folders.get(folder)
        if real_folder is None:
            real_folder = self._real_folders[folder] = os.path.realpath(folder)
        # The folder's real path has no `..` and no links; the last part is resolved below.
        path = f"{real_folder}{os.sep}{base}"
        if base in ("", ".", "..") or os.path.islink(path):  # noqa: PTH114
            path = os.path.realpath(path)
        if not self._is_inside_roots(path):
            if self._called is not None:
                raise DataError(f"'{name}' lies outside {self._called}, '{self.dataset_dir}'", way_out="Put it there.")
            raise DataError(
                f"'{name}' lies outside the media roots",
                key="data.dataset_param.basic_parameters.media_roots",
                way_out="Put it under dataset_dir, or list its folder in media_roots.",
            )
        return path

    def _is_inside_roots(self, path: str) -> bool:
        return path.startswith(self._inside_roots)


def _check_regular(status: os.stat_result, name: str, most_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"'{name}' is not a regular file")
    _check_size(status.st_size, name, most_bytes)


def _check_size(size_bytes: int, name: str, most_bytes: int | None) -> None:
    if size_bytes == 0:
        raise DataError(f"'{name}' is empty (0 bytes)")
    if most_bytes is not None and size_bytes > most_bytes:
        raise DataError(f"'{name}' has {size_bytes} bytes, more than {most_bytes}")


def _first_frame(items: Any) -> object:
    if not len(items):
        raise DataError("the video is an empty list of frames")
    return items[0]


@dataclass(frozen=True)
class PixelBudget:
    """Frames above or below a number of pixels are scaled to it, as LLaMA-Factory, the origin of the keys, does."""

    most: int | None = None
    least: int = 0

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of frames as they are kept."""
        del frames
        pixels = height * width
        limit = max(pixels, self.least)
        if self.most is not None and pixels > self.most:
            limit = self.most
        if limit == pixels:
            return height, width
        # Both sides by the root: the area becomes `limit`, the proportions stay.
        factor = math.sqrt(limit / pixels)
        return max(1, int(height * factor)), max(1, int(width * factor))

    def resize(self, picture: Image.Image, height: int, width: int) -> np.ndarray:
        """Scale a picture to these numbers of pixels, bicubically, and return it as (H, W, 3) uint8."""
        if picture.size != (width, height):
            picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        return np.asarray(picture)


_BASE64 = re.compile(r"[A-Za-z0-9+/]{64,}={0,2}")
"""Text that is not a path: names of media have a dot, which base64 has not."""
_REMOTE = ("http://", "https://", "ftp://", "s3://", "file:")


def _is_remote(item: str) -> bool:
    return item[:64].lstrip().lower().startswith(_REMOTE)


def is_data_url(item: str) -> bool:
    """Whether it holds a medium itself: `data:image/png;base64,…`."""
    return item[:64].lstrip()[:5].lower() == "data:"


def decode_data_url(item: str) -> tuple[bytes, str]:
    """The bytes that a `data:` URL (RFC 2397) holds, in base64 or percent-encoded, and what to call it in messages.

    Raises:
        DataError: It has no comma, is not base64 though it says so, or holds nothing or too much.
    """
    head, comma, text = item.strip().partition(",")
    name = f"{head[:60]},…"
    if not comma:
        raise DataError(
            f"'{item.strip()[:30]}…' is not a data: URL: it has no comma",
            way_out="Write data:image/png;base64, followed by the file's bytes in base64.",
        )
    if not head.lower().replace(" ", "").endswith(";base64"):
        data = urllib.parse.unquote_to_bytes(text)
    else:
        if "%" in text or not text.isalnum():
            text = "".join(urllib.parse.unquote(text).split())
        # Browsers drop the padding, and b64decode wants whole groups of four.
        data = _from_base64(text + "=" * (-len(text) % 4), name)
    _check_size(len(data), name, MAX_FILE_BYTES)
    return data, name


def names_file(item: str) -> bool:
    """Whether the text of a medium is a path, and neither a URL nor base64."""
    return "\x00" not in item and not _is_remote(item) and not _BASE64.fullmatch(item)


def refuse_remote(item: str, where: str = "") -> None:
    """Raise `DataError`, with the row's place, when a media path is a URL of any kind."""
    if _is_remote(item):
        raise DataError(
            f"'{item[:60]}' is a URL: only local files are opened",
            where=where,
            way_out="Store the media under dataset_dir and give its path, or set allow_remote_media: true.",
        )


def check_remote_media_off(allow_remote_media: bool) -> None:
    """Raise when remote media are asked for."""
    if allow_remote_media:
        raise ConfigError(
            "remote media are not built yet",
            key="data.dataset_param.basic_parameters.allow_remote_media",
            way_out="Download the media and give local paths.",
        )


def _from_base64(text: str, name: str = "") -> bytes:
    if (size_bytes := len(text) * 3 // 4) > MAX_FILE_BYTES + 3:  # padding
        raise DataError(f"'{name or 'base64 data'}' has {size_bytes} bytes, more than {MAX_FILE_BYTES}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"'{name or text[:30] + '…'}' is not base64: {error}", way_out="Encode the file again, or give its path."
        ) from error


# --- media beside their rows ------------------------------------------------------------------------------------------


def with_media_beside(sample: Sample, folder: str) -> Sample:
    """The sample with relative paths of media written out: those that exist in `folder`, else those that exist in the
    working directory, which rows of older tools start from; what is in neither is missing in `folder`."""
    media = [item._replace(source=located(item.source, folder)) for item in sample.media]
    rejected = sample.rejected and with_media_beside(sample.rejected, folder)
    return replace(sample, media=media, rejected=rejected)


def _is_there(path: str) -> bool:
    """Whether there is a file, or the archive that a path goes through."""
    return os.path.exists(path) or os.path.exists(split_member(path)[0])  # noqa: PTH110


def located(source: object, folder: str) -> object:
    """A source of a medium with its path, if it has a relative one, written out."""
    if isinstance(source, Mapping):
        has_bytes = source.get("bytes") is not None
        if has_bytes:
            return source
        return {**source, "path": located(source.get("path"), folder)}
    if isinstance(source, list | tuple | np.ndarray):
        return [located(frame, folder) for frame in source]
    if not isinstance(source, str) or os.path.isabs(source) or not names_file(source):  # noqa: PTH117 (thousands a second)
        return source
    path = os.path.join(folder, source)  # noqa: PTH118
    if _is_there(path) or not _is_there(source):
        return path
    return os.path.abspath(source)  # noqa: PTH100
