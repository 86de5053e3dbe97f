"""Headers of media files that were looked into before, so that a large data set starts at once the next time."""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import HEADERS_FILE
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader
from mindspeed_mm.fsdp.data.datasets.generation.rows import GenerationRow

FILE = HEADERS_FILE


class HeaderCache:
    """Path, size and time of change of a file → its header.

    Args:
        folder: Where the cache is kept; None: nothing is.
        media_dir: What relative paths of rows start at.
    """

    def __init__(self, folder: str | None, media_dir: str) -> None:
        self._path = Path(folder) / FILE if folder else None
        self._media_dir = media_dir
        self._headers: dict[str, list[float]] = self._read()
        self._grown = False

    def get(self, row: GenerationRow) -> MediaHeader | None:
        """The header of a row's medium, if it is known and the file unchanged."""
        found = self._headers.get(self._key(row)) if self._path else None
        if found is None:
            return None
        height, width, frames, fps = found
        return MediaHeader(int(height), int(width), int(frames), fps)

    def put(self, row: GenerationRow, header: MediaHeader) -> None:
        """Remember the header of a row's medium. Nothing is kept without a folder, or where the medium is no file."""
        if self._path and (key := self._key(row)):
            self._headers[key] = list(astuple(header))
            self._grown = True

    def save(self) -> None:
        """Write what is new; of several ranks that do so, one wins, and none reads half a file."""
        if self._path is not None and self._grown:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(self._path, json.dumps(self._headers))

    def _key(self, row: GenerationRow) -> str:
        if isinstance(row.media, bytes):
            return ""
        path = os.path.join(self._media_dir, row.media)  # noqa: PTH118 (of every row)
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            return ""
        return f"{path}|{status.st_size}|{status.st_mtime_ns}"

    def _read(self) -> dict[str, list[float]]:
        if self._path is None or not self._path.is_file():
            return {}
        try:
            found = parse_json(self._path.read_bytes())
        except ValueError:
            return {}  # it can be made again
        entries = found.items() if isinstance(found, dict) else ()
        return {key: value for key, value in entries if isinstance(value, list) and len(value) == 4}
