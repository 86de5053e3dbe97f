"""Media of a row: placeholders and typed parts in the messages, media columns beside them, put into one order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.placeholders import seems_lost, settle_placeholders
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import ATTR_KEY, Row, first_column, first_given, short
from mindspeed_mm.fsdp.data.data_utils.rows.sources import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, REPAIR, MediaItem, MediaKind, Sample

_PLACEHOLDER = re.compile(r"<(image|video|audio)>")
_PART_KINDS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""`type` of a part → kind of medium."""
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_PATHS = ("path", "url", "file")
_BYTES = ("bytes", "base64", "data")


def read_parts(parts: list[Any], where: str, key: str) -> str | list[JsonObject]:
    """Typed parts of a message: their text where that is all; otherwise a list in which a medium that brings its own
    source has it under `source`.

    Raises:
        DataError: A part is of an unknown type, or what it holds is not of that type.
    """
    found = [_part(part, where, f"{key}[{number}]") for number, part in enumerate(parts)]
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found)
    return [part for part in found if part["type"] != "text" or part["text"]]


def _part(part: object, where: str, key: str) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    name = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and name in _TEXT_TYPES:
        if not isinstance(part.get("text"), str):
            raise DataError(f"{short(part.get('text'))} is not text", where=where, key=f"{key}.text", way_out=REPAIR)
        return {"type": "text", "text": part["text"]}
    if not isinstance(part, Mapping) or not isinstance(name, str) or name not in _PART_KINDS:
        raise DataError(
            f"{short(part)} is not a part of a message",
            where=where,
            key=key,
            way_out=f"A part is an object whose type is text, {', '.join(_PART_KINDS)}.",
        )
    kind = _PART_KINDS[name]
    field = first_given(part, (name, kind))
    if field is not None:
        return {"type": kind, "source": _source(part[field], kind, where, key)}
    if first_given(part, (*_PATHS, *_BYTES)) is not None:
        return {"type": kind, "source": _source(part, kind, where, key)}
    return {"type": kind}  # its source is in a column of the row


def _source(value: object, kind: MediaKind, where: str, key: str) -> Any:
    """A source as the media loader takes it: a path, bytes, `{"path" | "bytes"}`; of a video also a list of frames."""
    if isinstance(value, Mapping):
        path, data = first_given(value, _PATHS), first_given(value, _BYTES)
        if data is not None and isinstance(value[data], str | bytes):
            return {"bytes": value[data]}
        value = None if path is None else value[path]
    if isinstance(value, str | bytes) and value:
        return value
    if kind == "video" and isinstance(value, list | tuple) and value:
        return [_source(frame, "image", where, key) for frame in value]
    what, way_out = f"{short(value)} is not an {kind}", 'Give a path, bytes, {"path": …} or {"bytes": …}'
    if kind == "video":
        what, way_out = f"{short(value)} is not a video", f"{way_out}; or the list of its frames"
    raise DataError(what, where=where, key=key, way_out=f"{way_out}.")


def place_media(sample: Sample, row: Row, row_format: RowFormat, *, draws: bool = False) -> None:
    """Give each medium of the messages its source: its own, or the next of its kind's column.

    Args:
        sample: The conversation.
        row: The raw row, with the columns of media.
        row_format: Their names.
        draws: Placeholders in the model's turns stand for media.

    Raises:
        DataError: A column does not hold one medium for each placeholder or part without a source.
    """
    columns = {kind: _column(sample, row, row_format, kind) for kind in MEDIA_KINDS}
    read = {*(name for name, _ in columns.values()), *row_format.question_columns, row_format.answer_column}
    counts = {kind: len(sources) for kind, (_, sources) in columns.items()}
    settle_placeholders(sample, counts, lambda kind: seems_lost(row, kind, read), draws=draws)
    media = [part for part in _parts_of(sample.messages) if part["type"] != "text"]
    taken: dict[MediaKind, Iterator[Any]] = {}
    for kind, (name, sources) in columns.items():
        placeholders = sum(part["type"] == kind and "source" not in part for part in media)
        if placeholders != len(sources):
            way_out = "Write one placeholder for each, in the same order."
            if name not in row:
                way_out = f"The row has no column '{name}': name the column in {ATTR_KEY}.{kind}s, or write none."
            raise DataError(
                f"{placeholders} <{kind}> placeholders in the text, but {len(sources)} {kind}s",
                where=str(sample.place),
                key=name,
                way_out=way_out,
            )
        taken[kind] = iter(sources)
    for part in media:
        source = part.pop("source") if "source" in part else next(taken[part["type"]])
        sample.media.append(MediaItem(part["type"], source))


def _parts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[JsonObject]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def _column(sample: Sample, row: Row, row_format: RowFormat, kind: MediaKind) -> tuple[str, list[Any]]:
    """The name of a kind's column, and the sources in it."""
    configured = {"image": row_format.images, "video": row_format.videos, "audio": row_format.audios}[kind]
    name = first_column(row, configured, (f"{kind}s", kind))
    if name is None:
        return configured or f"{kind}s", []
    value = row[name]
    if value == "":
        return name, []
    where = str(sample.place)
    sources = []
    for number, item in enumerate(value if isinstance(value, list | tuple) else [value]):
        if not _may_be_source(item, kind):
            raise DataError(f"{short(value)} is not a list of media", where=where, key=name, way_out=REPAIR)
        sources.append(_source(item, kind, where, f"{name}[{number}]"))
    return name, sources


def _may_be_source(item: object, kind: MediaKind) -> bool:
    return isinstance(item, str | bytes | Mapping) or (kind == "video" and isinstance(item, list | tuple))


def split_text(content: str) -> str | list[JsonObject]:
    """Text of a row as typed parts; as it is where it has no placeholder. A part that was written as a placeholder has
    its text beside its kind, until `settle_placeholders` knows whether it stands for a medium."""
    if "<" not in content or not _PLACEHOLDER.search(content):
        return content
    return list(_pieces(content))


def _pieces(content: str) -> Iterator[JsonObject]:
    for number, piece in enumerate(_PLACEHOLDER.split(content)):
        if number % 2:
            yield {"type": piece, "text": f"<{piece}>"}
        elif piece:
            yield {"type": "text", "text": piece}
