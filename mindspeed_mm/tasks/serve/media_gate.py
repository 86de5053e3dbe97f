"""Media of requests: what a stranger names is looked at before anything decodes it.

A source is a data URI, base64 text, a file below the folder that is allowed, or an address on a host that is allowed.
What passes is handed on as bytes or as the path of a checked file; nothing else reaches the model's processor.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.decoding.audio import AudioHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader, TooManyPixelsError
from mindspeed_mm.fsdp.data.data_utils.decoding.remote_media import fetch
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, MediaKind, options_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError

_MIB = 2**20
_NO_FOLDER = Path(os.devnull)
"""Nothing lies below it."""


class MediaGate:
    """Checks media.

    Args:
        limits: Of the server.
        taken: How much of a medium the model takes.
        folder: Files below it may be named; None: none.
        hosts: Addresses on these may be fetched, `name` or `name:port`.
    """

    def __init__(
        self, limits: Limits, taken: MediaLimits, folder: Path | None = None, hosts: Collection[str] = ()
    ) -> None:
        self._limits, self._folder = limits, folder
        self._hosts = frozenset(host.lower() for host in hosts)
        self.loader = MediaLoader(folder or _NO_FOLDER, (), replace(taken, allow_remote=False))
        """Opens what has passed."""

    def admit(self, media: Collection[MediaItem]) -> list[MediaItem]:
        """Media whose sources are bytes or files that may be opened, none larger than it may be.

        Raises:
            RefusedError: Naming the limit, or what may not be opened.
            DataError: One is of no known format, or broken.
        """
        self._limits.check("max_media", len(media), f"the request has {len(media)} pictures, videos and sounds")
        return [MediaItem(item.kind, self._admit(item.kind, item.source)) for item in media]

    def _admit(self, kind: MediaKind, source: object) -> Any:
        if options := options_of(source):
            message = f"{', '.join(options)} of a single medium cannot be asked for."
            raise RefusedError(400, message, code="unsupported_value")
        if isinstance(source, list):
            self._limits.check("max_frames", len(source), f"a video of pictures has {len(source)} frames")
            return [self._admit("image", frame) for frame in source]
        opened = self._opened(source)
        self._check_size(kind, opened)
        return opened

    def _opened(self, source: object) -> bytes | str:
        """A source as bytes, or as the path of a file that may be opened."""
        if isinstance(source, dict):  # data by its field's name, however short
            source = source.get("bytes")
            if isinstance(source, str):
                return self._decoded(source.partition(";base64,")[2] if source.startswith("data:") else source)
        if isinstance(source, bytes):
            return source
        if not isinstance(source, str):
            raise RefusedError(400, "a picture, video or sound has no source.", code="invalid_value")
        scheme = source[:8].lower().partition(":")[0] if ":" in source[:8] else ""
        if scheme == "data":
            return self._decoded(source.partition(";base64,")[2])
        if scheme in ("http", "https"):
            return self._fetched(source)
        if scheme == "file":
            return self._file(unquote(urlsplit(source).path))
        is_data = len(source) > _LONGEST_PATH
        if is_data or self._folder is None:
            return self._decoded(source)
        return self._file(source)

    def _decoded(self, text: str) -> bytes:
        self._limits.check("max_media_mib", len(text) * 3 / 4 / _MIB, f"a medium has {len(text) * 3 // 4:,} bytes")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if not data:
            message = "a medium is no data URI in base64 (data:image/png;base64,…), nor a file that may be opened."
            raise RefusedError(400, message, code="invalid_media")
        return data

    def _fetched(self, url: str) -> bytes:
        if not self._hosts:
            message = "remote addresses are not fetched: send the medium as a data URI."
            raise RefusedError(400, message, param="--allow-remote-media", code="remote_media")
        # A host that is named is meant even if its address is private.
        roots: list[str] = []
        for host in self._hosts:
            roots += [f"http://{host}", f"https://{host}"]
        return fetch(url, tuple(roots), int(self._limits.max_media_mib * _MIB), hosts=self._hosts)

    def _file(self, name: str) -> str:
        if self._folder is None:
            message = "files of the server's machine are not opened: send the medium as a data URI."
            raise RefusedError(400, message, param="--media-folder", code="local_media")
        if "\0" in name:
            raise RefusedError(400, "the name of a file holds a NUL byte.", code="invalid_media")
        with self.loader.open(name) as file:
            size = os.fstat(file.fileno()).st_size
        self._limits.check("max_media_mib", size / _MIB, f"'{name}' has {size:,} bytes")
        return name

    def _check_size(self, kind: MediaKind, source: bytes | str) -> None:
        """Look at the header, before a decoder takes memory for what it promises."""
        if isinstance(source, bytes):
            self._limits.check("max_media_mib", len(source) / _MIB, f"a medium has {len(source):,} bytes")
        try:
            header = self.loader.probe(kind, source)
        except TooManyPixelsError as error:
            raise self._limits.reached("max_pixels", "the picture has more pixels than are decoded", 413) from error
        except DataError as error:
            raise RefusedError(400, error.problems[0].what.rstrip(".") + ".", code="invalid_media") from error
        if isinstance(header, AudioHeader):
            seconds, pixels = header.seconds, 0
        elif isinstance(header, ImageHeader):
            seconds, pixels = 0.0, header.height * header.width
        else:
            seconds, pixels = header.total_frames / header.fps, header.height * header.width
        what = {"image": "the picture", "video": "the video", "audio": "the sound"}[kind]
        self._limits.check("max_pixels", pixels, f"{what} has {pixels:,} pixels")
        self._limits.check("max_media_seconds", seconds, f"{what} is {seconds:,.0f} seconds long")


_LONGEST_PATH = 1000
"""Longer texts are base64."""
