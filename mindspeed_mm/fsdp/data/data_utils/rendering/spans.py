"""Where in a rendered conversation each turn stands, told by its structure: by marks in the turns' texts that come
through the template, by what the template writes for a shorter conversation, or for one with a turn's text exchanged.
Marker strings of a format are never searched for in the text of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from mindspeed_mm.core.errors import DataError

Message = dict[str, Any]
Context = dict[str, Any]
"""What a template is handed besides messages: tools, settings."""
Span = tuple[int, int]
"""Start and end in characters of the rendered text."""
Render = Callable[..., str]
"""(messages, add_generation_prompt=False) → text."""

_FIRST_MARK = 0xF0000
_MARK = re.compile("[\U000f0000-\U000ffffd]")
"""One character of the last private-use planes for each message: no row holds them and no template changes them."""
MOST_MESSAGES = 0xFFFE
_STAND_IN = "\ue000turn\ue001"
_THOUGHT_BORDER = re.compile(r"(\s*)(</?think>)(\s*)")
THOUGHT_MARKS = frozenset({"<think>", "</think>"})
"""What stands around thoughts in the model's turns."""
_ASKED: Message = {"role": "user", "content": "?"}
_ANSWERED: Message = {"role": "assistant", "content": "!"}
_CALL = {"type": "function", "function": {"name": "a", "arguments": {"b": "c"}}}
_PLAIN_PROBES: tuple[list[Message], ...] = (
    [_ASKED, _ANSWERED],
    [_ASKED, _ANSWERED, _ASKED, _ANSWERED],
    [{"role": "system", "content": "."}, _ASKED, _ANSWERED],
)
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_CALLING_PROBES: tuple[list[Message], ...] = (
    [_ASKED, _CALLED],
    [_ASKED, _CALLED, {"role": "tool", "name": "a", "content": "d"}, _ANSWERED],
)
"""Conversations that show what a template writes around turns: their words are no tokens of their own."""


class Borders(NamedTuple):
    """Where a message's own words begin and end, and how far the template's words around them reach."""

    before: int
    """Where the words of whatever stands in front end."""
    first: int
    last: int
    after: int
    """Where the words of whatever follows begin."""


class TurnFinder:
    """Finds turns in what one chat template writes.

    Args:
        render: The template.
        for_template: Brings messages into the form that the template reads.
        marks: The tokenizer's special tokens.
        added: All its added tokens, the special ones among them.
    """

    def __init__(
        self,
        render: Render,
        for_template: Callable[[Sequence[Message]], list[Message]],
        marks: tuple[str, ...],
        added: tuple[str, ...] = (),
    ) -> None:
        self._render, self._for_template, self._marks, self._added = render, for_template, marks, added
        self._openings = self._generation_prompts()

    def find(self, messages: list[Message], wanted: Sequence[int], text: str, **context: object) -> list[Span]:
        """The span of each wanted turn: from the end of the prompt that opens it to its end mark; of one that is not
        the model's, its words and media and the end mark behind them.

        Args:
            messages: As the template reads them.
            wanted: Numbers of messages, rising.
            text: What the template writes for them.
            context: Handed to the template.

        Raises:
            DataError: The template mixes turns so that spans cannot be told.
        """
        if list(wanted) == [len(messages) - 1]:
            at_end = self._at_end(messages[-1], text)
            if at_end is not None:
                return [at_end]
        marked = self.borders(messages, text, **context)
        spans = []
        for i in wanted:
            if messages[i]["role"] != "assistant":
                spans.append(self._of_prompt(messages, i, text, marked.get(i), context))
                continue
            span = None
            if i in marked:
                span = self._by_marks(messages, i, text, marked[i], context)
            spans.append(span or self._by_rendering(messages, i, text, context))
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise mixed_turns(text)
        return spans

    def borders(self, messages: list[Message], text: str, **context: object) -> dict[int, Borders]:
        """Message → where its words stand; only for messages whose words come through the template unchanged."""
        try:
            marked = self._render([_marked_message(m, _mark(i)) for i, m in enumerate(messages)], **context)
        except DataError:
            return {}
        if len(messages) > MOST_MESSAGES or _MARK.sub("", marked) != text:
            return {}
        places, owners = [], []
        for k, mark in enumerate(_MARK.finditer(marked)):
            places.append(mark.start() - k)  # in the text without marks: k of them stand in front
            owners.append(ord(mark.group()) - _FIRST_MARK)
        borders: dict[int, Borders] = {}
        parted = set()
        in_front, behind = [0, *places[:-1]], [*places[1:], len(text)]
        for k, (before, at, after, i) in enumerate(zip(in_front, places, behind, owners, strict=False)):
            if i not in borders:
                borders[i] = Borders(before, at, at, after)
            elif owners[k - 1] == i:
                borders[i] = borders[i]._replace(last=at, after=after)
            else:
                parted.add(i)  # the words of another message stand in between
        for i in parted:
            del borders[i]
        return borders

    @cached_property
    def turn_end(self) -> str | None:
        """The special token that stands behind the model's words when the user speaks next: an end mark or, in formats
        without one (GLM's), the mark that opens the user's turn, with which models of such a format end their own.
        None: the template writes plain words there.
        """
        asked, answer = self._for_template([_ASKED, {"role": "assistant", "content": "!"}])
        try:
            text = self._render([asked, _marked_message(answer, _mark(0)), asked])
        except DataError:
            return None
        marks = list(_MARK.finditer(text))
        if marks:
            return self.mark_at(text, marks[-1].end())
        return None

    def is_ended(self, text: str) -> bool:
        """Whether a turn's text closes with an end mark of the format, blanks aside."""
        return text.rstrip().endswith(self.end_marks)

    @cached_property
    def end_marks(self) -> tuple[str, ...]:
        """The special tokens that the template itself writes behind words or calls of the model; all special tokens
        where no probe tells. Others may stand at the end of an answer and do not end the turn."""
        found = {self.turn_end}
        for messages, text in self._probed:
            bare = _MARK.sub("", text).rstrip()
            found.add(next((mark for mark in self._marks if bare.endswith(mark)), None))
            for place in _ends_of_words(text, messages):
                found.add(self.mark_at(text, place))
        if self._probed:
            return tuple(mark for mark in self._marks if mark in found)
        return self._marks

    @cached_property
    def turn_marks(self) -> frozenset[str]:
        """The added tokens that the template writes around plain turns, which are its own and no words of anybody,
        whether the tokenizer calls them special or not (DeepSeek's are not)."""
        text = "\n".join(text for messages, text in self._probed if messages in _PLAIN_PROBES)
        return frozenset(
            token for token in self._added if token in text and _is_mark(token) and token not in THOUGHT_MARKS
        )

    @cached_property
    def _probed(self) -> list[tuple[list[Message], str]]:
        """The probes that the template takes, and what it writes for them, with marks around the words."""
        found = []
        for messages in (*_PLAIN_PROBES, *_CALLING_PROBES):
            with suppress(DataError):
                prepared = self._for_template(messages)
                text = self._render([_marked_message(m, _mark(number)) for number, m in enumerate(prepared)])
                found.append((messages, text))
        return found

    # --- the last turn -----------------------------------------------------------------------------------------------

    def _at_end(self, message: Message, text: str) -> Span | None:
        """Where the text ends with the words of a plain answer inside what the template writes around a lone one,
        nothing needs to be rendered again."""
        words = _only_words(message)
        if words is None or not self._openings or self._lone is None:
            return None
        opening, (head, tail) = self._openings[0], self._lone
        first = len(text) - len(tail) - len(words)
        if first < 0 or not (text.endswith(tail) and text.startswith(words, first)):
            return None
        if not text.endswith(opening + head, 0, first):
            return None
        start = first - len(head)
        return start, self._without_blanks_after_mark(text, start, len(text))

    @cached_property
    def _lone(self) -> tuple[str, str] | None:
        [answer] = self._for_template([{"role": "assistant", "content": "!"}])
        return self._alone(answer, {})

    # --- by marks ----------------------------------------------------------------------------------------------------

    def _by_marks(self, messages: list[Message], i: int, text: str, where: Borders, context: Context) -> Span | None:
        """Only the template's own words stand between those of two messages, so they may be compared with what it
        writes around the turn alone."""
        is_last = i == len(messages) - 1
        alone = None
        if not (is_last and self._openings):
            alone = self._alone(messages[i], context)
        start = self._start(text, where, alone)
        end = len(text) if is_last else self._end(text, where, alone)
        if start is None or end is None or not start < end:
            return None
        return start, self._without_blanks_after_mark(text, start, end)

    def _start(self, text: str, where: Borders, alone: tuple[str, str] | None) -> int | None:
        """Behind the prompt that opens the turn."""
        for opening in self._openings:
            at = text.rfind(opening, where.before, where.first)
            if at >= 0:
                return at + len(opening)
        if self._openings:
            return where.first
        if alone is None or not text.endswith(alone[0], where.before, where.first):
            return None
        return where.first - len(alone[0])

    def _end(self, text: str, where: Borders, alone: tuple[str, str] | None) -> int | None:
        """Behind what the template writes after the turn when nothing follows it, or else behind its end mark."""
        if alone is not None and text.startswith(alone[1], where.last, where.after):
            return where.last + len(alone[1])
        mark = self.mark_at(text, where.last, where.after)
        if mark:
            return where.last + len(mark)
        return None

    def _alone(self, message: Message, context: Context) -> tuple[str, str] | None:
        """What the template writes in front of the turn's words and behind them when it only answers a question."""
        asked = self._for_template([_ASKED])
        try:
            text = self._render([*asked, _marked_message(message, _mark(0))], **context)
            prompt = self._render(asked, add_generation_prompt=True, **context)
        except DataError:
            return None
        if not _MARK.search(text):
            return None
        before, *_, tail = _MARK.split(text)
        if not before.startswith(prompt):
            return "", tail
        return before.removeprefix(prompt), tail

    # --- turns of the prompt -----------------------------------------------------------------------------------------

    def _of_prompt(self, messages: list[Message], i: int, text: str, where: Borders | None, context: Context) -> Span:
        """No prompt opens these. Marks stand around words alone, so those with media are told by exchange."""
        if where is None or _has_media(messages[i]):
            start, end = self._by_exchange(messages, i, text, context)
            return start, self._without_blanks_after_mark(text, start, end)
        return where.first, where.last + len(self.mark_at(text, where.last, where.after) or "")

    # --- by rendering other conversations ----------------------------------------------------------------------------

    def _by_rendering(self, messages: list[Message], i: int, text: str, context: Context) -> Span:
        start = self._start_by_prefix(messages, i, text, context)
        end = self._end_by_prefix(messages, i, text, context)
        if start is None or end is None:
            other_start, other_end = self._by_exchange(messages, i, text, context)
            if start is None:
                start = other_start
            if end is None:
                end = other_end
        if not start < end:
            raise mixed_turns(text)
        return start, self._without_blanks_after_mark(text, start, end)

    def _start_by_prefix(self, messages: list[Message], i: int, text: str, context: Context) -> int | None:
        if i == 0:
            return None
        prompt = self._render(messages[:i], add_generation_prompt=True, **context)
        if text.startswith(prompt):
            return len(prompt)
        return None

    def _end_by_prefix(self, messages: list[Message], i: int, text: str, context: Context) -> int | None:
        if i == len(messages) - 1:
            return len(text)
        so_far = self._render(messages[: i + 1], **context)
        return len(so_far) if text.startswith(so_far) else None

    def _by_exchange(self, messages: list[Message], i: int, text: str, context: Context) -> Span:
        """For templates that change a turn's words, and write it differently once others follow: exchange its words,
        and what stays the same is not the turn's."""
        [stand_in] = self._for_template([{**messages[i], "content": _STAND_IN}])
        exchanged = [*messages[:i], stand_in, *messages[i + 1 :]]
        before, found, after = self._render(exchanged, **context).partition(_STAND_IN)
        fits = len(before) + len(after) <= len(text) and text.startswith(before) and text.endswith(after)
        closing = self._closing(exchanged[: i + 1], after, context)
        if not found or not fits or closing is None:
            raise mixed_turns(text)
        return len(before), len(text) - len(after) + len(closing)

    def _closing(self, exchanged: list[Message], after: str, context: Context) -> str | None:
        alone = self._render(exchanged, **context).partition(_STAND_IN)[2]
        return alone if after.startswith(alone) else self.mark_at(after, 0)

    # --- the template's words ----------------------------------------------------------------------------------------

    def mark_at(self, text: str, at: int, until: int | None = None) -> str | None:
        """The special token that stands at a place; `until`: where the words of the next message begin."""
        for mark in self._marks:
            if text.startswith(mark, at, until):
                return mark
        return None

    def _without_blanks_after_mark(self, text: str, start: int, end: int) -> int:
        """The model stops at its end mark: the line break that a template writes after it is not the model's."""
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(self._own_marks) else end

    @cached_property
    def _own_marks(self) -> tuple[str, ...]:
        """Special tokens that the template writes around turns of anybody."""
        own = {*self.end_marks, *self.turn_marks}
        return tuple(mark for mark in self._marks if mark in own)

    def _generation_prompts(self) -> list[str]:
        """What the template writes to open the model's turn, as it is set and then with thinking on and off; nothing
        where it writes nothing."""
        probe = self._for_template([_ASKED])
        openings = []
        for context in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            try:
                without = self._render(probe, **context)
                opened = self._render(probe, add_generation_prompt=True, **context)
            except DataError:
                return []  # it wants another conversation; rows will tell
            if opened.startswith(without) and opened != without:
                openings.append(opened.removeprefix(without))
        return list(dict.fromkeys(openings))


def mixed_turns(text: str) -> DataError:
    """The error for a template whose turns cannot be told apart."""
    return DataError(
        f"the model's turns cannot be told from the others in what the chat template writes: {text[:2000]!r}",
        way_out="Set data.dataset_param.basic_parameters.mask_history: true, or give a simpler template in "
        "data.dataset_param.basic_parameters.chat_template.",
    )


def _only_words(message: Message) -> str | None:
    """What a message says, when it is one text without thoughts, calls or media."""
    content = message["content"]
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        content = content[0]["text"]
    if not isinstance(content, str) or not content.strip():
        return None
    is_plain = message.keys() <= {"role", "content"} and "think>" not in content
    if is_plain:
        return content
    return None


def _has_media(message: Message) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _is_mark(token: str) -> bool:
    """Whether an added token can only be a mark: no word, and no blanks, which are tokens of some vocabularies."""
    return not any(map(str.isspace, token)) and not token[0].isalnum() and not token[-1].isalnum()


def _ends_of_words(marked: str, messages: Sequence[Message]) -> list[int]:
    """Where in a marked text the words of each of the model's turns end."""
    ends = []
    for number, message in enumerate(messages):
        last = marked.rfind(_mark(number))
        if message["role"] == "assistant" and last >= 0:
            ends.append(last + 1)
    return ends


def _mark(number: int) -> str:
    return chr(_FIRST_MARK + number)


def _marked_message(message: Message, mark: str) -> Message:
    """The message with a mark at the edges of each of its texts, inside the blanks that templates strip."""
    marked = dict(message)
    content = message.get("content")
    if isinstance(content, str):
        marked["content"] = _between(content, mark)
    elif isinstance(content, list):
        marked["content"] = [_marked_part(part, mark) for part in content]
    if isinstance(message.get("reasoning_content"), str):
        marked["reasoning_content"] = _between(message["reasoning_content"], mark)
    if message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(call, mark) for call in message["tool_calls"]]
    return marked


def _marked_part(part: Message, mark: str) -> Message:
    if isinstance(part.get("text"), str):
        return {**part, "text": _between(part["text"], mark)}
    return part


def _marked_call(call: Message, mark: str) -> Message:
    function = dict(call["function"])
    function["name"] = _between(function["name"], mark)
    function["arguments"] = _marked_leaves(function.get("arguments"), mark)
    return {**call, "function": function}


def _marked_leaves(value: object, mark: str) -> object:
    if isinstance(value, str):
        return _between(value, mark)
    if isinstance(value, dict):
        return {key: _marked_leaves(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked_leaves(item, mark) for item in value]
    return value


def _between(text: str, mark: str) -> str:
    """Marks around the text, and around thoughts in it, which many templates cut out."""
    if not text or text.isspace():
        return text
    if "think>" in text and _THOUGHT_BORDER.search(text):
        pieces = _THOUGHT_BORDER.split(text)
        # The expression has three groups: every fourth piece is what stands between borders.
        pieces[::4] = [_between(words, mark) for words in pieces[::4]]
        return "".join(pieces)
    bare = text.strip()
    first = len(text) - len(text.lstrip())
    return f"{text[:first]}{mark}{bare}{mark}{text[first + len(bare) :]}"
