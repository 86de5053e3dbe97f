"""Size and time of change of media, with what their headers said: what nobody has touched since need not be looked
into, nor hashed, again. `MediaMarks` are kept with a feature set, the `HeaderCache` for training on raw media, so that
a large data set starts at once the next time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.tar_members import split_member
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import HEADERS_FILE
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader
from mindspeed_mm.fsdp.data.datasets.generation.rows import GenerationRow

Mark = tuple[int, int]
"""Bytes, and time of change in ns."""


class MediaMarks:
    """Name of a medium → its mark and its header.

    Args:
        entries: Name → size, time, and height, width, frames and fps.
    """

    def __init__(self, entries: Mapping[str, tuple[Mark, MediaHeader]] | None = None) -> None:
        self._entries = dict(entries or {})

    @classmethod
    def read(cls, path: Path) -> MediaMarks:
        """As `write` left them; none where they are missing or broken, for they can be made again."""
        try:
            entries: dict[str, tuple[Mark, MediaHeader]] = {}
            for name, (size, time, height, width, frames, fps) in parse_json(path.read_bytes()).items():
                header = MediaHeader(int(height), int(width), int(frames), float(fps))
                entries[name] = ((int(size), int(time)), header)
            return cls(entries)
        except (OSError, ValueError, TypeError, AttributeError):
            return cls()

    @classmethod
    def of(cls, rows: Iterable[GenerationRow], headers: Iterable[MediaHeader], media: MediaLoader) -> MediaMarks:
        """Of media as they are now; media that stand in their rows have none. What a row declares is no header."""
        entries = {}
        for row, header in zip(rows, headers, strict=True):
            mark = mark_of(row, media)
            if mark is not None:
                entries[row.name] = (mark, MediaHeader(0, 0) if row.declares else header)
        return cls(entries)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        lines = {}
        for name, (mark, header) in sorted(self._entries.items()):
            lines[name] = [*mark, header.height, header.width, header.frames, header.fps]
        atomic_write_text(path, json.dumps(lines, ensure_ascii=False) + "\n")

    def header(self, row: GenerationRow, media: MediaLoader) -> MediaHeader | None:
        """The header of a row's medium, when it is known and the file untouched."""
        known = self._entries.get(row.name)
        if known is None or not known[1].height or known[0] != mark_of(row, media):
            return None
        return known[1]

    def has_same(self, others: MediaMarks) -> bool:
        """Whether each medium that both know is untouched."""
        return all(others.mark(name) in (None, mark) for name, (mark, _) in self._entries.items())

    def with_new(self, others: MediaMarks) -> MediaMarks:
        """These, and the media that only the others know."""
        return MediaMarks({**others._entries, **self._entries})

    def mark(self, name: str) -> Mark | None:
        """The mark of a medium; None: it is not known."""
        mark, _ = self._entries.get(name, (None, None))
        return mark


def mark_of(row: GenerationRow, media: MediaLoader) -> Mark | None:
    """Of the file of a medium, or of the archive that it lies in, as it is now; of several media of a row the sums.
    None where there is none."""
    whole_size = whole_time = 0
    for each in (row.media, *row.roles.values()):
        mark = _of_file(each, media)
        if mark is None:
            return None
        size, time = mark
        whole_size += size
        whole_time += time
    return whole_size, whole_time


def _of_file(item: str | bytes, media: MediaLoader) -> Mark | None:
    if isinstance(item, bytes):
        return None
    path = os.path.join(media.dataset_dir, split_member(item)[0])  # noqa: PTH118 (of every row)
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


# --- headers of media that are trained on raw -------------------------------------------------------------------------


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
