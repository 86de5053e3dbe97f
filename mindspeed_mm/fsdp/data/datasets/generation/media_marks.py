"""Size and time of change of the media of a feature set, with what their headers said: what nobody has touched since
need not be looked into, nor hashed, again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.tar_members import split_member
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
