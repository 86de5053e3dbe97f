"""One training sample between the raw row and its token ids, and the order of its turns: which conversations are
trained or answered, and how turns of one speaker become one.

Chat templates differ in what they take: most write two messages of one speaker as two turns, some refuse them. So the
messages stay as a row has them wherever its template writes all of them; `joined` is for templates that do not.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonMapping, JsonObject

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


_NOTE_SLOTS = 4096
REPAIR = "Repair the row."
"""The way out where a row itself is broken."""
_LEAVE_OUT = "such rows out: on_bad_sample: skip."


def offer_skipping(problem: Problem) -> Problem:
    """A problem of a row where it stops a training: leaving such rows out is a way out there."""
    if problem.key.startswith("data.") or _LEAVE_OUT in problem.way_out:
        return problem
    way_out = f"{problem.way_out} Or leave {_LEAVE_OUT}" if problem.way_out else f"Leave {_LEAVE_OUT}"
    return replace(problem, way_out=way_out)


class RowLocation(NamedTuple):
    """Where a row stands, printed as `train.jsonl:12`."""

    file: str
    row: int
    """Line of a JSONL file, otherwise the number of the row; both count from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


class MediaItem(NamedTuple):
    """A picture, video or sound of a row, not opened yet."""

    kind: MediaKind
    source: Any
    """A path, bytes, base64 text or `{"path" | "bytes"}`; of a video also a list of such frames. An object may also
    hold `options`: what the row asks for of this item alone (see `ItemOptions`)."""


class ItemOptions(TypedDict, total=False):
    """What a row asks for of one medium: which part of a video is taken, how many frames, how large it is shown."""

    start: float
    """Seconds at which the taken part of a video begins."""
    end: float
    fps: float
    """Frames taken a second."""
    frames: int
    """Number of frames that are taken."""
    max_frames: int
    min_pixels: int
    """Least area in pixels, of a picture or a frame."""
    max_pixels: int


def options_of(source: object) -> ItemOptions:
    """What a row asks for of this medium alone; empty: nothing."""
    found: ItemOptions = source.get("options") or {} if isinstance(source, Mapping) else {}
    return found


class Unread(NamedTuple):
    """Something that a row holds and nothing reads."""

    level: str
    """`column`, `turn`, `part` or `text`."""
    name: str

    def __str__(self) -> str:
        if self.level == "text":
            return f"{self.name} in a text"
        if self.level == "column":
            return f"column '{self.name}'"
        return f"'{self.name}' of a {self.level}"


class Boxes(NamedTuple):
    """What fills `<ref-object>` and `<bbox>` in the texts of a row (ms-swift's `objects`)."""

    refs: tuple[str, ...]
    boxes: tuple[tuple[float, ...], ...]
    """A point (x, y) or two corners (x1, y1, x2, y2) each."""
    images: tuple[int, ...]
    """Number of the picture that each box lies in."""
    is_relative: bool
    """Whether coordinates run from 0 to 1, rather than in pixels of the picture's file."""


@dataclass(slots=True)
class Sample:
    """A row, converted: the same shape for every row format."""

    place: RowLocation
    messages: list[JsonObject] = field(default_factory=list)
    """`{"role", "content"}` as chat templates take them. Roles: system, user, assistant, tool. Content is a string, or
    a list of typed parts where a turn holds media: `{"type": "text", "text"}`, `{"type": "image" | "video" | "audio"}`.
    Further keys where the row has them: `tool_calls` (`[{"type": "function", "function": {"name", "arguments"}}]`,
    arguments as an object) and `reasoning_content` of the model's turns, `name` and `tool_call_id` of tool results."""
    weights: list[float | None] = field(default_factory=list)
    """Per message, how much its tokens count in the loss; 0: not trained. None: of the prompt, and the row takes it not
    out, so that `train_on_prompt` decides."""
    media: list[MediaItem] = field(default_factory=list)
    """One for each media part, in order of appearance over all messages."""
    tools: list[JsonObject] | None = None
    """Descriptions of the tools that the model may call, as chat templates take them."""
    text: str | None = None
    """The document of a text-only row; `messages` is empty then."""
    rejected: Sample | None = None
    """Preference rows: this sample ends with the better answer, that one with the worse."""
    objects: Boxes | None = None
    """What marks in the texts stand for, until they are filled."""
    box_marks: frozenset[str] = frozenset()
    """Special tokens that fill the texts, as those of boxes: they stay tokens, though others in a text are spelled
    out."""
    unread: list[Unread] = field(default_factory=list, compare=False)
    """What the row holds and nothing reads, each once."""
    notes: list[str] = field(default_factory=list, compare=False)
    """How the row was read where it leaves that open, for the log and `mm data check`."""

    def note_unread(self, found: Unread) -> None:
        """Add one to `unread`, unless it is there."""
        if found not in self.unread:
            self.unread.append(found)


class NotesReported:
    """Warns of how rows were read where they leave that open: of each way once, whichever worker process meets it."""

    def __init__(self) -> None:
        import torch  # rows and media are read without it, too

        self._slots = torch.zeros(_NOTE_SLOTS, dtype=torch.bool).share_memory_()

    def report(self, sample: Sample) -> None:
        """Warn of the notes of a sample that are new."""
        for note in sample.notes:
            slot = zlib.crc32(note.encode()) % _NOTE_SLOTS
            if not self._slots[slot]:
                self._slots[slot] = True
                warnings.warn(f"some rows: {note}", stacklevel=2)


class NothingTrainedError(DataError):
    """No token of a sample is trained."""


class TooLongError(DataError):
    """A sample has more tokens than `cutoff_len` and the policy does not shrink it."""

    tokens: int = 0
    """How many it has."""


class EncodedSample(TypedDict):
    """A sample as token ids. L tokens. A data set of a plugin may give plain dicts with these keys."""

    sample_id: str
    input_ids: np.ndarray
    """(L,) int64."""
    labels: np.ndarray
    """(L,) int64, the token itself where trained, -100 elsewhere; not shifted."""
    media: list[Any]
    """The sample's media as its media plugin encoded them, in order of appearance."""
    shrunk: bool
    """Whether whole turns were left out to fit `cutoff_len`."""
    loss_weights: NotRequired[np.ndarray]
    """(L,) float32, only where some message's weight is neither 0 nor 1."""
    unread: NotRequired[list[str]]
    """See `Sample`; the loader counts them and takes them out."""


class EncodedPair(TypedDict):
    """A preference row as token ids."""

    sample_id: str
    chosen: EncodedSample
    rejected: EncodedSample
    unread: NotRequired[list[str]]


class EncodedPrompt(TypedDict):
    """A row that the model is to answer itself."""

    sample_id: str
    row: int
    """Number of the row in its data set."""
    input_ids: np.ndarray
    """(L,) int64, up to where the answer begins."""
    media: list[Any]
    """As of `EncodedSample`."""
    question: Sample
    """The conversation before the answer, as the row has it."""
    text: str
    """What the user said last."""
    columns: JsonObject
    """All columns of the row; `solution` where it has a right answer."""
    unread: NotRequired[list[str]]


class SampleSize(NamedTuple):
    """What a sample costs, known before it is encoded."""

    tokens: int
    """The length that encoding gives."""
    patches: int
    """Work of the encoders: vision patches and audio frames."""


def count_media(messages: Sequence[JsonMapping]) -> int:
    """Pictures, videos and sounds in messages: parts that are not text."""
    count = 0
    for message in messages:
        if not isinstance(message["content"], str):
            count += sum(part["type"] != "text" for part in message["content"])
    return count


Message = dict[str, Any]
Weights = list[float | None]
_BREAK = "\n\n"
"""Between the texts of two messages that become one, as Mistral's reference tokenizer (mistral-common) joins them."""
_JOINED = frozenset({"system", "user", "assistant"})
"""Results of tools are never joined: each answers a call of its own."""


def check_turns(sample: Sample) -> None:
    """Raise unless somebody asks, the model answers last, and results of tools follow the model.

    Raises:
        DataError: Naming the message.
    """
    where = str(sample.place)
    roles = [message["role"] for message in sample.messages]
    if "assistant" not in roles:
        raise DataError(
            "no trainable token: the conversation has no turn of the model", where=where, key="messages", way_out=REPAIR
        )
    if roles[-1] != "assistant":
        raise DataError(
            f"the last turn is the {roles[-1]}'s: nothing answers it", where=where, key="messages", way_out=REPAIR
        )
    if "user" not in roles:
        raise DataError(
            "the conversation has no turn of the user: nothing is asked", where=where, key="messages", way_out=REPAIR
        )
    for number, (before, role) in enumerate(pairwise(["", *roles])):
        if role == "tool" and before not in ("assistant", "tool"):
            raise DataError(
                f"a result of a tool follows {f'the turn of the {before}' if before else 'nothing'}",
                where=where,
                key=f"message {number}",
                way_out="Results of tools follow the turn of the model that calls them.",
            )


def is_usual(messages: Sequence[Message]) -> bool:
    """Whether turns alternate after at most one system message, tools answering calls: every chat template takes it."""
    before = "system"
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system" and number == 0:
            continue
        if role not in _FOLLOWERS[before]:
            return False
        before = "call" if message.get("tool_calls") else role
    return True


_FOLLOWERS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool", "user"),
    "tool": ("assistant", "tool"),
}
"""Kind of turn → the kinds that usually follow it."""


def joined(messages: Sequence[Message], weights: Sequence[float | None]) -> tuple[list[Message], Weights]:
    """The conversation with neighbouring messages of one speaker as one, two line breaks between their texts. Messages
    that count differently in the loss stay apart.

    Args:
        messages: As `Sample` has them.
        weights: Of each message.
    """
    kept: list[Message] = []
    counts: Weights = []
    for message, weight in zip(messages, weights, strict=True):
        if kept and message["role"] in _JOINED and kept[-1]["role"] == message["role"] and counts[-1] == weight:
            kept[-1] = _one(kept[-1], message)
        else:
            kept.append(message)
            counts.append(weight)
    return kept, counts


def _one(first: Message, second: Message) -> Message:
    message: Message = {**first, **second, "content": _contents(first["content"], second["content"])}
    thoughts = [part["reasoning_content"] for part in (first, second) if part.get("reasoning_content")]
    if thoughts:
        message["reasoning_content"] = _BREAK.join(thoughts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    return message


def _contents(first: str | list[Message], second: str | list[Message]) -> str | list[Message]:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + _BREAK + second
    return [*_parts(first), {"type": "text", "text": _BREAK}, *_parts(second)]


def _parts(content: str | list[Message]) -> list[Message]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content


def words_said(message: JsonMapping) -> list[str]:
    """The texts of a message, without blanks around them and without thoughts, which templates may leave out."""
    texts = []
    for part in _parts(message["content"]):
        texts.append(part.get("text", "").rpartition("</think>")[2].strip())
    return [text for text in texts if text]
