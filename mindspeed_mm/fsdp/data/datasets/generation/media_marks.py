"""Size and time of change of media, with what their headers said: what nobody has touched since need not be looked
into, nor hashed, again. `MediaMarks` are kept with a feature set, the `HeaderCache` for training on raw media, so that
a large data set starts at once the next time.

What is said at the start of media that become something else on the way to their samples, scaled, cut or resampled, is
read off the same headers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.core.counts import by_count
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.decoding.video import is_near_rate
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.tar_members import split_member
from mindspeed_mm.fsdp.data.datasets.generation.media_folders import HEADERS_FILE
from mindspeed_mm.fsdp.data.datasets.generation.pixels import MediaHeader
from mindspeed_mm.fsdp.data.datasets.generation.row import GenerationRow
from mindspeed_mm.fsdp.data.datasets.generation.sizes import MUCH_CUT, MUCH_ENLARGED, SizeChange

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

    def add(self, row: GenerationRow, header: MediaHeader, mark: Mark | None) -> None:
        """Note a row's medium as it is now; what a row declares is no header.

        Args:
            row: Names it.
            header: What is known of it.
            mark: As of `mark_of`; a medium that stands in its row has none, and is not noted.
        """
        if mark is not None:
            # Height 0 says that the file itself was not looked into: `header` passes over it.
            self._entries[row.name_of_part] = (mark, MediaHeader(0, 0) if row.declares else header)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        lines = {}
        for name, (mark, header) in sorted(self._entries.items()):
            lines[name] = [*mark, header.height, header.width, header.frames, header.fps]
        atomic_write_text(path, json.dumps(lines, ensure_ascii=False) + "\n")

    def header(self, row: GenerationRow, media: MediaLoader) -> MediaHeader | None:
        """The header of a row's medium, when it is known and the file untouched."""
        known = self._entries.get(row.name_of_part)
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
        self._path = None
        if folder:
            self._path = Path(folder) / FILE
        self._media_dir = media_dir
        self._headers: dict[str, list[float]] = self._read()
        self._grown = False

    def get(self, row: GenerationRow) -> MediaHeader | None:
        """The header of a row's medium, if it is known and the file unchanged."""
        if self._path is None:
            return None
        found = self._headers.get(self._key(row))
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
        part = f"|{row.cut}" if row.cut else ""
        return f"{path}|{status.st_size}|{status.st_mtime_ns}{part}"

    def _read(self) -> dict[str, list[float]]:
        if self._path is None or not self._path.is_file():
            return {}
        try:
            found = parse_json(self._path.read_bytes())
        except ValueError:
            return {}  # it can be made again
        if not isinstance(found, dict):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, list) and len(value) == 4}


_SAME_RATE = 0.01
"""Rates that differ by less are told as one."""


def scaling_notes(headers: Sequence[MediaHeader], sizes: Sequence[MediaSize], place: Callable[[int], Any]) -> list[str]:
    """What to say of media that are enlarged more than twice, or lose more than a third of their area."""
    enlarged: dict[int, float] = {}
    cut: dict[int, float] = {}
    for index, (header, size) in enumerate(zip(headers, sizes, strict=True)):
        change = SizeChange.of(header, size)
        if change.enlarged > MUCH_ENLARGED:
            enlarged[index] = change.enlarged
        if change.cut > MUCH_CUT:
            cut[index] = change.cut
    notes = []
    if enlarged:
        worst, verb = max(enlarged, key=enlarged.__getitem__), by_count(len(enlarged), "is", "are")
        notes.append(
            f"{len(enlarged)} of {len(sizes)} media {verb} enlarged more than {MUCH_ENLARGED:g} times along a side, "
            f"{place(worst)} most of all, {enlarged[worst]:.3g} times. preprocess_parameters.max_enlargement "
            "sets the limit"
        )
    if cut:
        worst, verb = max(cut, key=cut.__getitem__), by_count(len(cut), "loses", "lose")
        notes.append(
            f"{len(cut)} of {len(sizes)} media {verb} more than a third of the area, {place(worst)} most of all, "
            f"{cut[worst]:.0%}. preprocess_parameters.max_cut sets the limit"
        )
    return notes


def stills_note(is_still: Sequence[bool], asked: Sequence[int]) -> str:
    """What to say of pictures among clips; empty where there are none, or one frame is what is asked for.

    Args:
        is_still: Whether each medium is a picture.
        asked: Frames of the sizes that are configured.
    """
    if not any(is_still) or not asked or min(asked) == 1:
        return ""
    count = sum(is_still)
    frames = ", ".join(map(str, sorted(set(asked))))
    return (
        f"{count} of {len(is_still)} media {by_count(count, 'is a picture', 'are pictures')}, and clips of {frames} "
        "frames are asked for: trained as one frame"
    )


def rates_note(rates: Sequence[float], model_fps: float, *, is_resampled: bool) -> str:
    """What to say of clips that have another rate than the model makes; empty where none differs by a tenth.

    Args:
        rates: Frames a second of each clip: of its file where it is resampled, else as it is read.
        model_fps: What the model makes.
        is_resampled: Whether `model_fps` are taken of clips of another rate.
    """
    others = [rate for rate in rates if not is_near_rate(rate, model_fps)]
    if not others:
        return ""
    clips, found = f"{len(others)} of {len(rates)} clips", _range(others)
    if is_resampled:
        return (
            f"{clips} {by_count(len(others), 'has', 'have')} {found} frames a second, resampled to the "
            f"{model_fps:g} that the model makes. preprocess_parameters.frame_interval: 1 takes every frame"
        )
    return (
        f"{clips} {by_count(len(others), 'is', 'are')} read with {found} frames a second, and the model makes "
        f"{model_fps:g}: it would learn another speed. Without preprocess_parameters.fps and frame_interval they are "
        "resampled"
    )


def doubled_note(rates: Sequence[tuple[float, float]]) -> str:
    """What to say of clips of which more frames a second are taken than they have, so that some are taken twice or
    more; empty where there are none.

    Args:
        rates: Of each clip, frames a second of its file and those that are taken.
    """
    doubled = [(own, taken) for own, taken in rates if taken > own and not is_near_rate(own, taken)]
    if not doubled:
        return ""
    own, taken = (_range(each) for each in zip(*doubled, strict=True))
    verb = by_count(len(doubled), "has", "have")
    return (
        f"{len(doubled)} of {len(rates)} clips {verb} {own} frames a second, and {taken} are taken: frames are "
        "repeated, and motion stutters. Leave such clips out, or set preprocess_parameters.frame_interval: 1, which "
        "shows them faster"
    )


def _range(rates: Sequence[float]) -> str:
    least, most = min(rates), max(rates)
    if most - least < _SAME_RATE:
        return f"{least:.4g}"
    return f"{least:.4g} to {most:.4g}"
