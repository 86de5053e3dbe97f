"""`<image>`, `<video>` and `<audio>` in the text of a row: which of them stand for media, and where other media go.

TRL (`prepare_multimodal_messages`) and ms-swift (`_add_default_tags`) put media that no placeholder names in front of
the first question, without a separator; LLaVA moves its `<image>` there. The same is done here, but only where a row
has no placeholder at all: where some are missing, which ones cannot be known.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, MediaKind, Sample

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
    for part in _parts(sample.messages):
        if "text" in part:
            of_kind.setdefault(part["type"], []).append(part)
    for kind, count in counts.items():
        written = of_kind.get(kind)
        if not written:
            continue
        in_answers = [] if draws else _written_in_answers(sample, kind)
        if not count and not _brings_own(sample, kind):
            if not is_lost(kind):
                _to_text(written)
                sample.notes.append(f"<{kind}> in the text of rows without {kind}s is plain text")
        elif in_answers:
            elsewhere = _without_source(sample, kind) - len(in_answers)
            if elsewhere in (0, count) or elsewhere + len(in_answers) != count:
                _to_text(in_answers)
                sample.notes.append(f"<{kind}> in an answer is plain text")
    has_media = any(part["type"] != "text" for part in _parts(sample.messages))
    if not has_media and any(counts.values()):
        _put_first(sample, counts)
    for message in sample.messages:
        message["content"] = _plain(message["content"])


def without_media(content: str | list[JsonObject], kinds: Collection[str]) -> str | list[JsonObject]:
    """Content of one message in which placeholders of these kinds are text; the others stand for media."""
    if not isinstance(content, str):
        _to_text([part for part in content if part["type"] in kinds])
    return _plain(content)


def seems_lost(row: Mapping[str, Any], kind: MediaKind, read: Collection[str]) -> bool:
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
    return [part for part in _parts(answers) if part["type"] == kind and "text" in part]


def _brings_own(sample: Sample, kind: str) -> bool:
    return any(part["type"] == kind and "source" in part for part in _parts(sample.messages))


def _without_source(sample: Sample, kind: str) -> int:
    return sum(part["type"] == kind and "source" not in part for part in _parts(sample.messages))


def _to_text(parts: list[JsonObject]) -> None:
    for part in parts:
        part["type"] = "text"


def _put_first(sample: Sample, counts: Mapping[MediaKind, int]) -> None:
    first = next((message for message in sample.messages if message["role"] == "user"), None)
    if first is None:
        return
    content = first["content"]
    said = content if isinstance(content, list) else [{"type": "text", "text": content}]
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


def _parts(messages: list[JsonObject]) -> Iterator[JsonObject]:
    for message in messages:
        if not isinstance(message["content"], str):
            yield from message["content"]
