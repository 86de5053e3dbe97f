"""What a model says, taken apart: its thoughts, its words, and its calls of tools.

Thoughts stand in `<think>…</think>` at the beginning, or before `</think>` where the prompt has begun them; calls stand
in `<tool_call>…</tool_call>`, as the chat templates of most families ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rows.turns import read_call_text

BEGIN_THOUGHT, END_THOUGHT, BEGIN_CALL = "<think>", "</think>", "<tool_call>"
PieceKind = Literal["thoughts", "words"]


@dataclass(frozen=True)
class Spoken:
    """An answer in parts: words, thoughts and calls of tools."""

    words: str
    thoughts: str = ""
    calls: list[JsonObject] = field(default_factory=list)
    """`{"type": "function", "function": {"name", "arguments"}}`, arguments as an object."""


def take_apart(text: str, *, thinks: bool = False, calls: bool = False) -> Spoken:
    """The parts of an answer.

    Args:
        text: All that was said.
        thinks: The prompt ends within a thought.
        calls: Whether the model was offered tools. A call that cannot be read is left among the words.
    """
    parts = SpokenPieces(thinks=thinks, calls=calls)
    said: dict[PieceKind, str] = {"thoughts": "", "words": ""}
    for kind, piece in (*parts.take(text), *parts.close()):
        said[kind] += piece
    return Spoken(said["words"].strip(), said["thoughts"].strip(), parts.calls)


def words_of(text: str) -> str:
    """An answer without its thoughts, which may have begun in the prompt."""
    begins = text.lstrip().startswith(BEGIN_THOUGHT)
    if not begins and END_THOUGHT not in text:
        return text
    return take_apart(text, thinks=not begins).words


class SpokenPieces:
    """Takes an answer apart while it is made.

    Args:
        thinks: The prompt ends within a thought.
        calls: Whether the model was offered tools.
    """

    def __init__(self, *, thinks: bool = False, calls: bool = False) -> None:
        self._thinks, self._looks_for_calls = thinks, calls
        self._held = ""
        self._is_first = True
        self._calling = False
        self.calls: list[JsonObject] = []
        """Known once it is closed."""

    def take(self, piece: str) -> list[tuple[PieceKind, str]]:
        """The parts that a piece of text makes certain."""
        self._held += piece
        told: list[tuple[PieceKind, str]] = []
        while (part := self._next()) is not None:
            told.append(part)
        return [(kind, text) for kind, text in told if text]

    def close(self) -> list[tuple[PieceKind, str]]:
        """What was held back; calls stand in `calls`."""
        kind: PieceKind = "thoughts" if self._thinks else "words"
        held, self._held = self._held, ""
        if not self._calling:
            if held:
                return [(kind, held)]
            return []
        try:
            _, words, self.calls = read_call_text(held, "", "answer")
        except DataError:
            words = held
        if words:
            return [("words", words)]
        return []

    def _next(self) -> tuple[PieceKind, str] | None:
        """The next part that is certain; None until more is said."""
        if self._calling or not self._held:
            return None
        if self._is_first and not self._thinks:
            start = self._held.lstrip()
            if BEGIN_THOUGHT.startswith(start[: len(BEGIN_THOUGHT)]) and len(start) < len(BEGIN_THOUGHT):
                return None
            self._is_first = False
            if start.startswith(BEGIN_THOUGHT):
                self._thinks, self._held = True, start[len(BEGIN_THOUGHT) :]
        if self._thinks:
            return self._cut_at(END_THOUGHT, "thoughts")
        if self._looks_for_calls:
            return self._cut_at(BEGIN_CALL, "words")
        text, self._held = self._held, ""
        return "words", text

    def _cut_at(self, mark: str, kind: PieceKind) -> tuple[PieceKind, str] | None:
        before, found, after = self._held.partition(mark)
        if found and kind == "thoughts":
            self._thinks, self._is_first, self._held = False, False, after.lstrip()
            return kind, before
        if found:
            self._calling, self._held = True, found + after
            return kind, before
        # What may be the beginning of the mark is held back until more is said.
        certain = len(before)
        for start in range(max(0, len(before) - len(mark) + 1), len(before)):
            if mark.startswith(before[start:]):
                certain = start
                break
        text, self._held = before[:certain], before[certain:]
        if text:
            return (kind, text)
        return None
