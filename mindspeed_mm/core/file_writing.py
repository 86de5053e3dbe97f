"""The door for single files that a person names: a report, a page, results, answers. Only what one of us wrote there
before is replaced, and nothing is put into a checkpoint or a model folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.core.folder_kinds import kind_above
from mindspeed_mm.core.folder_writing import resolve_output
from mindspeed_mm.core.json_file import JsonObject, parse_json

PAGE_MARK = '<meta name="generator" content="mindspeed-mm">'
"""In the head of every page of ours."""
_HEAD_BYTES = 1 << 24

IsOurs = Callable[[bytes], bool]
"""From the beginning of a file to whether one of us wrote it."""
MediumKind = Literal["WAV", "PNG"]
_MEDIA: dict[MediumKind, tuple[str, IsOurs]] = {
    "WAV": (".wav", lambda head: (head[:4], head[8:12]) == (b"RIFF", b"WAVE")),
    "PNG": (".png", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n")),
}
"""Kind → the ending of its files, and how they begin."""


def check_output_file(path: Path, is_ours: IsOurs, key: str = "") -> Path:
    """The file that may be written under this name. Changes nothing.

    Args:
        path: As a person named it.
        is_ours: Asked where something stands there already.
        key: The option or key that named it.

    Returns:
        It, absolute and without links.

    Raises:
        UsageError: It is a folder, or somebody else's file; it lies in a checkpoint or a model folder; or the name
            cannot be used.
    """
    target = resolve_output(path)
    if target.is_dir():
        raise UsageError("is a folder, not a file", where=str(target), key=key, way_out="Name a file in it.")
    check_output_place(target, key)
    if target.exists():
        with target.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head and not is_ours(head):
            raise UsageError(
                "holds something that this command did not write",
                where=str(target),
                key=key,
                way_out="Name another file, or move this one away first.",
            )
    return target


def check_medium_file(path: Path, kind: MediumKind, sources: Collection[Path], key: str = "") -> Path:
    """The file that a sound or a picture may be written to under this name. Changes nothing.

    Args:
        path: As a person named it.
        kind: What is written, which an older file of this kind makes room for.
        sources: Files that it is made of, which stay.
        key: The option that named it.

    Returns:
        It, absolute and without links.

    Raises:
        UsageError: Its ending says another kind, it is one of the sources, or see `check_output_file`.
    """
    ending, is_of_kind = _MEDIA[kind]
    if path.suffix.lower() not in ("", ending):
        what, way_out = f"ends in '{path.suffix}', and what is written is {kind}", f"Let it end in '{ending}'."
        raise UsageError(what, where=str(path), key=key, way_out=way_out)
    target = check_output_file(path, is_of_kind, key)
    if any(target == source.resolve() for source in sources):
        raise UsageError("is a file that the model is shown", where=str(path), key=key, way_out="Name another file.")
    return target


def check_output_place(target: Path, key: str = "") -> None:
    """Raise when nothing can be written under a path, or should not be. Leaves nothing behind.

    Raises:
        UsageError: It lies in a checkpoint, which may hold nothing else, or in a model folder.
        MachineError: No file can be written in it, if it is a folder, or in the nearest folder above it.
    """
    found = kind_above(target)
    if found is not None and found[0] != "a run folder":
        raise UsageError(f"lies in {found[0]}, {found[1]}", where=str(target), key=key, way_out="Choose another place.")
    place = next(folder for folder in (target, *target.parents) if folder.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".probe-"):  # without a name, where the file system can do that
            pass
    except OSError as error:
        raise MachineError(
            f"cannot be written: {error.strerror or error}", where=str(target), key=key, way_out="Choose another place."
        ) from error


def write_page(path: Path, page: str, key: str = "") -> None:
    """Write an HTML page whole, or not at all.

    Args:
        path: As a person named it.
        page: With `PAGE_MARK` in its head.
        key: The option that named it.

    Raises:
        UsageError: See `check_output_file`.
        MachineError: It cannot be written.
    """
    target = check_output_file(path, _is_page, key)
    make_writable_folder(target.parent)
    atomic_write_text(target, page)


def first_line_has(*keys: str, beside_others: bool = False) -> IsOurs:
    """Whether a file begins with a JSON object on one line that has these keys, and no others unless it may."""

    def is_ours(head: bytes) -> bool:
        record = _object_in(head.split(b"\n", 1)[0])
        if record is None:
            return False
        if beside_others:
            return set(keys) <= record.keys()
        return record.keys() == set(keys)

    return is_ours


def is_object_of(keys: Collection[str], optional: Collection[str], part: str, part_keys: Collection[str]) -> IsOurs:
    """Whether a file is a JSON object with these keys and no others.

    Args:
        keys: Those that it always has.
        optional: Those that it may have.
        part: One of `keys`, whose value is an object.
        part_keys: The keys of that object, no others.
    """

    def is_ours(head: bytes) -> bool:
        record = _object_in(head)
        if record is None or not set(keys) <= record.keys() <= {*keys, *optional}:
            return False
        inner = record[part]
        return isinstance(inner, dict) and inner.keys() == set(part_keys)

    return is_ours


def any_of(*kinds: IsOurs) -> IsOurs:
    """Whether a file is of one of these kinds."""
    return lambda head: any(is_ours(head) for is_ours in kinds)


def _object_in(content: bytes) -> JsonObject | None:
    try:
        record = parse_json(content)
    except ValueError:
        return None
    if isinstance(record, dict):
        return record
    return None


def _is_page(head: bytes) -> bool:
    start, end, _ = head.partition(b"</head>")
    return bool(end) and start[:9].lower() == b"<!doctype" and PAGE_MARK.encode() in start
