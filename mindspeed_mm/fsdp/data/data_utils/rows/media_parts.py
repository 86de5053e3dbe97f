"""Media of a row: placeholders and typed parts in the messages, media columns beside them, put into one order.

`<image>`, `<video>` and `<audio>` in the text stand for media, or are text. TRL (`prepare_multimodal_messages`) and
ms-swift (`_add_default_tags`) put media that no placeholder names in front of the first question, without a separator;
LLaVA moves its `<image>` there. The same is done here, but only where a row has no placeholder at all: where some are
missing, which ones cannot be known.
"""

from __future__ import annotations

import math
import mimetypes
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.media import is_data_url
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.rows.row_fields import (
    ATTR_KEY,
    Row,
    first_column,
    first_given,
    not_text,
    note_unread,
    short,
)
from mindspeed_mm.fsdp.data.data_utils.sample import (
    MEDIA_KINDS,
    REPAIR,
    ItemOptions,
    MediaItem,
    MediaKind,
    Sample,
    Unread,
    options_of,
)

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


def read_parts(parts: Sequence[object], sample: Sample, key: str) -> str | list[JsonObject]:
    """Typed parts of a message: their text where that is all; otherwise a list in which a medium that brings its own
    source has it under `source`. What nothing reads is noted on the sample.

    Raises:
        DataError: A part is of an unknown type, or what it holds is not of that type.
    """
    found = [_typed_part(part, sample, f"{key}[{number}]") for number, part in enumerate(parts)]
    if all(part["type"] == "text" for part in found):
        return "".join(part["text"] for part in found)
    return [part for part in found if part["type"] != "text" or part["text"]]


def _typed_part(part: object, sample: Sample, key: str) -> JsonObject:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    where, name = str(sample.place), None
    if isinstance(part, Mapping):
        name = part.get("type")
    if isinstance(part, Mapping) and name in _TEXT_TYPES:
        _check_trained_whole(part, where, key)
        note_unread(sample, "part", part, _TEXT_FIELDS, key)
        return {"type": "text", "text": text_of_part(part, where, key)}
    if not isinstance(part, Mapping) or not isinstance(name, str) or name not in _PART_KINDS:
        raise DataError(
            f"{short(part)} is not a part of a message",
            where=where,
            key=key,
            way_out=f"A part is an object whose type is text, {', '.join(_PART_KINDS)}.",
        )
    kind = _PART_KINDS[name]
    fields = (name, kind, "value", "source", *_PATHS, *_BYTES)
    options = _note_fields(part, kind, sample, key, {"type", *fields})
    field = first_given(part, fields[:4])
    if field is not None:
        return {"type": kind, "source": _source(part[field], kind, sample, key, options)}
    if first_given(part, (*_PATHS, *_BYTES)) is not None:
        return {"type": kind, "source": _source(part, kind, sample, key, options)}
    if options:
        what = f"{', '.join(options)} are asked of a medium that stands in a column"
        raise DataError(what, where=where, key=key, way_out="Write the path into the part.")
    return {"type": kind}  # its source is in a column of the row


def text_of_part(part: Mapping[str, object], where: str, key: str) -> str:
    """The text of a part. Raises `DataError` where it has none."""
    text = part.get(first_given(part, _TEXT_FIELDS_OF_TEXT) or "text")
    if not isinstance(text, str):
        raise not_text(text, where, f"{key}.text")
    return text


_TEXT_FIELDS_OF_TEXT = ("text", "value", "content")
"""Of OpenAI, of LLaMA-Factory v1, of axolotl."""
_TEXT_FIELDS = frozenset({"type", *_TEXT_FIELDS_OF_TEXT, "train", "weight"})


def _check_trained_whole(part: Mapping[str, object], where: str, key: str) -> None:
    """Raise where a part is marked (axolotl's `train` and `weight`) otherwise than its turn may be."""
    for name in ("train", "weight"):
        if part.get(name) not in (None, True):  # 1 counts as well
            raise DataError(
                f"{name} {short(part[name])} trains parts of a turn apart, which is not done",
                where=where,
                key=f"{key}.{name}",
                way_out="Mark whole turns: split the turn, or take the mark out.",
            )


_OPTIONS: dict[str, str] = {
    "start": "start", "video_start": "start", "start_time": "start",
    "end": "end", "video_end": "end", "end_time": "end",
    "fps": "fps", "nframes": "frames", "num_frames": "frames", "max_frames": "max_frames",
    "min_pixels": "min_pixels", "max_pixels": "max_pixels",
}  # fmt: skip
"""Field of a medium, as qwen-vl-utils and others call it → the option that it is."""
_OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "image": ("min_pixels", "max_pixels"),
    "video": tuple(_OPTIONS.values()),
    "audio": (),
}
_RATES_OF_FRAMES = ("fps", "sample_fps", "raw_fps")
_DESCRIBE = frozenset({"format", "mime_type", "media_type", "mimeType"})
"""Fields that say what a file shows by itself."""


def _note_fields(holder: JsonMapping, kind: MediaKind, sample: Sample, key: str, known: Collection[str]) -> ItemOptions:
    """What is asked of a medium; fields that nothing reads are noted or refused."""
    options: ItemOptions = {}
    own = [name for name, option in _OPTIONS.items() if option in _OPTIONS_OF[kind] and holder.get(name) is not None]
    where = str(sample.place)
    if isinstance(holder.get("video"), list | tuple):  # frames: which of them are taken is the configuration's matter
        for name in _RATES_OF_FRAMES:
            if holder.get(name) is not None:
                sample.note_unread(Unread("part", name))
        own = [name for name in own if name not in _RATES_OF_FRAMES]
        known = {*known, *_RATES_OF_FRAMES}
    for name in own:
        value, option = holder[name], _OPTIONS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or not math.isfinite(value):
            what = f"{name} {short(value)} is not a number from 0"
            raise DataError(what, where=where, key=f"{key}.{name}", way_out=REPAIR)
        if option not in ("start", "end", "fps") and value != int(value):
            raise DataError(f"{name} {value} is not whole", where=where, key=f"{key}.{name}", way_out=REPAIR)
        options[option] = value  # type: ignore[literal-required]
    if "end" in options and options["end"] <= options.get("start", 0):
        what = f"the part of the video ends at {options['end']:g} s, before it begins"
        raise DataError(what, where=where, key=key, way_out=REPAIR)
    if "fps" in options and "frames" in options:
        raise DataError("both fps and a number of frames are given", where=where, key=key, way_out="Keep one.")
    if holder.get("detail") in ("auto", "original"):
        known = {*known, "detail"}
    note_unread(sample, "part", holder, {*known, *own, *_DESCRIBE}, key)
    return options


def _source(value: object, kind: MediaKind, sample: Sample, key: str, options: ItemOptions | None = None) -> Any:
    """A source as the media loader takes it: a path, bytes, `{"path" | "bytes"}`; of a video also a list of frames."""
    options = options or {}
    if isinstance(value, Mapping):
        if "type" not in value or value["type"] in ("url", "base64"):  # else it is the part, whose fields are read
            options = options | _note_fields(value, kind, sample, key, {"type", kind, *_PATHS, *_BYTES})
        path, data = first_given(value, (*_PATHS, kind)), first_given(value, _BYTES)
        if data is not None and isinstance(value[data], str | bytes):
            return _with_options({"bytes": value[data]}, options)
        value = path and value[path]
    if isinstance(value, str) and is_data_url(value):
        return {"bytes": value}  # not a path, wherever paths are looked for
    if isinstance(value, str | bytes) and value:
        if not options:
            return value
        return _with_options(_as_object(value), options)
    if kind == "video" and isinstance(value, list | tuple) and value:
        if options:
            what = f"{', '.join(options)} are asked of a video that is a list of frames"
            raise DataError(what, where=str(sample.place), key=key, way_out="Choose the frames in the row itself.")
        return [_source(frame, "image", sample, key) for frame in value]
    what, way_out = f"{short(value)} is not an {kind}", 'Give a path, bytes, {"path": …} or {"bytes": …}'
    if kind == "video":
        what, way_out = f"{short(value)} is not a video", f"{way_out}; or the list of its frames"
    raise DataError(what, where=str(sample.place), key=key, way_out=f"{way_out}.")


def _with_options(source: JsonObject, options: ItemOptions) -> JsonObject:
    if options:
        return {**source, "options": options}
    return source


def _as_object(source: str | bytes) -> JsonObject:
    if isinstance(source, bytes):
        return {"bytes": source}
    return {"path": source}


OF_TURNS: dict[str, MediaKind] = {"images": "image", "videos": "video", "audios": "audio"}
"""Field of a turn that lists media of its own (DeepSeek-VL2) → their kind."""


def with_own_media(
    content: str | list[JsonObject], message: Mapping[str, object], sample: Sample, key: str
) -> str | list[JsonObject]:
    """Content of a turn with the media that the turn itself lists: each at its placeholder, or before the text where
    there is no placeholder.

    Raises:
        DataError: A field holds no list of media, or not as many as there are placeholders.
    """
    for name, kind in OF_TURNS.items():
        given = message.get(name)
        if given is None or given == []:
            continue
        if not isinstance(given, list | tuple):
            what = f"{short(given)} is not a list of {name}"
            raise DataError(what, where=str(sample.place), key=f"{key}.{name}", way_out=REPAIR)
        sources = [_source(each, kind, sample, f"{key}.{name}") for each in given]
        parts = content
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        open_parts = [part for part in parts if part["type"] == kind and "source" not in part]
        if open_parts and len(open_parts) != len(sources):
            what = f"{len(open_parts)} <{kind}> placeholders in the turn, but {len(sources)} {name}"
            way_out = "Write one placeholder for each, in the same order."
            raise DataError(what, where=str(sample.place), key=f"{key}.{name}", way_out=way_out)
        for part, source in zip(open_parts, sources, strict=False):
            part.pop("text", None)
            part["source"] = source
        content = parts
        if not open_parts:
            content = [*({"type": kind, "source": source} for source in sources), *parts]
    return content


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
    counts = {kind: len(sources) for kind, (_, sources) in columns.items()}

    def is_lost(kind: MediaKind) -> bool:
        """Media of a kind are in no column that is read, or in one that lists nothing but nulls."""
        value = row.get(columns[kind][0])
        named = (row_format.images, row_format.videos, row_format.audios)
        read = {name for name in (*named, row_format.prompt, row_format.query, row_format.response) if name}
        return seems_lost(row, kind, read) or (isinstance(value, list | tuple) and len(value) > 0)

    settle_placeholders(sample, counts, is_lost, draws=draws)
    media = [part for part in _parts_of(sample.messages) if part["type"] != "text"]
    taken: dict[MediaKind, Iterator[object]] = {}
    for kind, (name, sources) in columns.items():
        placeholders = sum(part["type"] == kind and "source" not in part for part in media)
        if placeholders != len(sources):
            way_out = "Write one placeholder for each, in the same order."
            column = vars(row_format)[f"{kind}s"]
            if name not in row or (not sources and not column):
                way_out = f"The row has no column '{name}': name the column in {ATTR_KEY}.{kind}s, or write none."
            raise DataError(
                f"{placeholders} <{kind}> placeholders in the text, but {len(sources)} {kind}s",
                where=str(sample.place),
                key=name,
                way_out=way_out,
            )
        taken[kind] = iter(sources)
    for part in media:
        # Parts with a source of their own take nothing from the column.
        source = part.pop("source") if "source" in part else next(taken[part["type"]])
        sample.media.append(MediaItem(part["type"], source))


CLIP = "clip"
"""Column of the part of a row's only video that is taken: [start, end] in seconds (InternVL)."""


def take_clip(sample: Sample, row: Row) -> None:
    """Take the part of the row's video that it names. Raises `DataError` where it does not name one."""
    clip, videos = row.get(CLIP), [number for number, item in enumerate(sample.media) if item.kind == "video"]
    if not clip or len(videos) != 1:
        return
    if not isinstance(clip, list | tuple) or len(clip) != 2:
        what = f"{short(clip)} is not [start, end] in seconds"
        raise DataError(what, where=str(sample.place), key=CLIP, way_out=REPAIR)
    item = sample.media[videos[0]]
    source = item.source
    if isinstance(source, Mapping):
        source = {name: value for name, value in source.items() if name != "options"}
    else:
        source = _as_object(source)
    asked = {**source, "start": clip[0], "end": clip[1]}
    found = _source(asked, "video", sample, CLIP, options_of(item.source))
    sample.media[videos[0]] = item._replace(source=found)


def _parts_of(messages: Sequence[JsonMapping]) -> Iterator[JsonObject]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]


def _column(sample: Sample, row: Row, row_format: RowFormat, kind: MediaKind) -> tuple[str, list[object]]:
    """The name of a kind's column, and the sources in it."""
    configured = {"image": row_format.images, "video": row_format.videos, "audio": row_format.audios}[kind]
    usual = _USUAL_COLUMNS[kind]
    if configured not in row and row.keys().isdisjoint(usual):
        return configured or usual[0], []
    may_hold = (column for column in (configured, *usual) if column in row)
    filled = {column: row[column] for column in may_hold if column and not _is_blank(row[column])}
    name = first_column(filled, configured, usual)  # an empty list does not hide the other usual column
    if name is None:
        return first_column(row, configured, usual) or configured or f"{kind}s", []
    value = row[name]
    where = str(sample.place)
    sources = []
    items = [value]
    if isinstance(value, list | tuple):
        items = list(value)
    for number, item in enumerate(items):
        if _is_blank(item) and not isinstance(item, list | tuple):
            continue  # tables fill up lists of several lengths
        if not _may_be_source(item, kind):
            raise DataError(f"{short(value)} is not a list of media", where=where, key=name, way_out=REPAIR)
        sources.append(_source(item, kind, sample, f"{name}[{number}]"))
    return name, sources


_USUAL_COLUMNS = {kind: (f"{kind}s", kind) for kind in MEDIA_KINDS}


def _is_blank(value: object) -> bool:
    """Whether a column holds no media: null, "", or a list of nothing else."""
    if value is None or isinstance(value, str):
        return not value
    cells = (value,)
    if isinstance(value, list | tuple):
        cells = tuple(value)
    return all(cell is None or (isinstance(cell, str) and not cell) for cell in cells)


def _may_be_source(item: object, kind: MediaKind) -> bool:
    return isinstance(item, str | bytes | Mapping) or (kind == "video" and isinstance(item, list | tuple))


def split_text(content: str) -> str | list[JsonObject]:
    """Text of a row as typed parts; as it is where it has no placeholder. A part that was written as a placeholder has
    its text beside its kind, until `settle_placeholders` knows whether it stands for a medium."""
    if "<" not in content or not _PLACEHOLDER.search(content):
        return content
    return list(_pieces(content))


def _pieces(content: str) -> Iterator[JsonObject]:
    # The expression has one group, so every second piece is a kind of medium.
    for number, piece in enumerate(_PLACEHOLDER.split(content)):
        if number % 2:
            yield {"type": piece, "text": f"<{piece}>"}
        elif piece:
            yield {"type": "text", "text": piece}


# --- placeholders in the text -----------------------------------------------------------------------------------------


MEDIA_FIRST = "media without a placeholder in the text are shown before the first question"
"""Note of a sample."""


def settle_placeholders(
    sample: Sample, counts: Mapping[MediaKind, int], is_lost: Callable[[MediaKind], bool], *, draws: bool = False
) -> None:
    """Decide which placeholders stand for media: none of a kind that the row has no media of, and none in an answer
    unless the model answers with media or the numbers fit in no other way. Media of a row without placeholders are
    put before the first question.

    Args:
        sample: The conversation; placeholders in its texts are parts with their text beside their kind.
        counts: Media of each kind in the columns of the row.
        is_lost: Whether media of a kind seem to be in a column that is not read: their placeholders stay, and do not
            fit.
        draws: The model answers with media.
    """
    of_kind: dict[str, list[JsonObject]] = {}
    for part in _parts_of(sample.messages):
        if "text" in part:
            of_kind.setdefault(part["type"], []).append(part)
    for kind, count in counts.items():
        written = of_kind.get(kind)
        if not written:
            continue
        in_answers = []
        if not draws:
            in_answers = _written_in_answers(sample, kind)
        if not count and not _brings_own(sample, kind):
            if not is_lost(kind):
                _to_text(written)
                sample.notes.append(f"<{kind}> in the text of rows without {kind}s is plain text")
        elif in_answers:
            elsewhere = _without_source(sample, kind) - len(in_answers)
            if elsewhere in (0, count) or elsewhere + len(in_answers) != count:
                _to_text(in_answers)
                sample.notes.append(f"<{kind}> in an answer is plain text")
    has_media = any(part["type"] != "text" for part in _parts_of(sample.messages))
    if not has_media and any(counts.values()):
        _put_first(sample, counts)
    for message in sample.messages:
        message["content"] = _plain(message["content"])


def without_media(content: str | list[JsonObject], kinds: Collection[str]) -> str | list[JsonObject]:
    """Content of one message in which placeholders of these kinds are text; the others stand for media."""
    if not isinstance(content, str):
        _to_text([part for part in content if part["type"] in kinds])
    return _plain(content)


def seems_lost(row: Mapping[str, object], kind: MediaKind, read: Collection[str]) -> bool:
    """Whether a column that is not read seems to hold media of a kind.

    Args:
        row: The raw row.
        kind: Of media.
        read: Columns that are read.
    """
    return any(_is_medium(value, kind) for name, value in row.items() if name not in read)


def _is_medium(value: object, kind: MediaKind) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_medium(item, kind) for item in value)
    if isinstance(value, Mapping):
        return _is_medium(value.get("path"), kind) or isinstance(value.get("bytes"), bytes)
    if not isinstance(value, str) or not value or any(map(str.isspace, value)):
        return False
    guessed, _ = mimetypes.guess_type(value)
    return guessed is not None and guessed.startswith(kind)


def _written_in_answers(sample: Sample, kind: str) -> list[JsonObject]:
    answers = [message for message in sample.messages if message["role"] == "assistant"]
    return [part for part in _parts_of(answers) if part["type"] == kind and "text" in part]


def _brings_own(sample: Sample, kind: str) -> bool:
    return any(part["type"] == kind and "source" in part for part in _parts_of(sample.messages))


def _without_source(sample: Sample, kind: str) -> int:
    return sum(part["type"] == kind and "source" not in part for part in _parts_of(sample.messages))


def _to_text(parts: list[JsonObject]) -> None:
    for part in parts:
        part["type"] = "text"


def _put_first(sample: Sample, counts: Mapping[MediaKind, int]) -> None:
    first = next((message for message in sample.messages if message["role"] == "user"), None)
    if first is None:
        return
    content = first["content"]
    said = content
    if isinstance(content, str):
        said = [{"type": "text", "text": content}]
    marks = [{"type": kind} for kind in MEDIA_KINDS for _ in range(counts[kind])]
    first["content"] = [*marks, *(part for part in said if part["text"])]
    sample.notes.append(MEDIA_FIRST)


def _plain(content: str | list[JsonObject]) -> str | list[JsonObject]:
    """Content with texts that follow one another as one, and media without the text that they were written as."""
    if isinstance(content, str):
        return content
    parts: list[JsonObject] = []
    for part in content:
        if part["type"] != "text":
            parts.append({key: value for key, value in part.items() if key != "text"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
        else:
            parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
