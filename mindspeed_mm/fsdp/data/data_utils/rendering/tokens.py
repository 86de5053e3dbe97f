"""Text → token ids with character positions, as a model's processor or tokenizer makes them after its chat template.

Special tokens that stand in the text of a row or a request are spelled out as text: texts are marked before they are
rendered (`protect`), so that the tokens which the chat template writes stay what they are. The ids are those of
transformers' `apply_chat_template(..., sanitize_control_tokens=True)`; a text without special tokens takes the ordinary
way.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import THOUGHT_MARKS, Span
from mindspeed_mm.fsdp.utils.model_parts import setting_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Around what is to be text: two code points that Unicode reserves for use inside a program."""
PROTECTED = _OPEN
"""In front of a special token that is text."""
_MARKED = re.compile(f"{_OPEN}(.)[^{_CLOSE}]*{_CLOSE}", re.DOTALL)
_OWN_VALUES = frozenset({"system", "user", "assistant", "tool", "text", "image", "video", "audio", "function"})
"""Roles and types that conversions write: part of the structure, never text."""
_OWN_KEYS = frozenset({"role", "content", "type", "text"})
_SPELLINGS = 4096
_BEGINNING = 3
_LONGEST_WORD, _WORDS = 12, 1024
"""Keys, roles and types of parts are looked at in every row: what was found in short texts is kept, of so many."""
_FRONTS = ("\n", "0", "a", "~")


class Encoding(Protocol):
    """Of the `tokenizers` library, as far as it is needed here."""

    ids: list[int]

    def char_to_token(self, position: int) -> int | None:
        """The token that holds a character."""

    def token_to_chars(self, token: int) -> Span | None:
        """The characters of a token."""


class Tokens:
    """Tokenises with character positions.

    Args:
        tokenizer: A fast tokenizer.
        of_processor: Whether a processor owns it (it adds its begin token unless the template wrote one).
        split_special: Special tokens in the text of rows are text.
        kept: Special tokens that a row may use, but for `marks` and `placeholders`.
        marks: Further tokens that are text in a row, though the tokenizer does not call them special: those with which
            the chat template opens turns.
        placeholders: Tokens that stand for media: text in a row, whatever `split_special` says.

    Raises:
        ModelFolderError: The tokenizer is of the slow kind, which has no character positions.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        of_processor: bool,
        split_special: bool = True,
        kept: Collection[str] = (),
        marks: Collection[str] = (),
        placeholders: Collection[str] = (),
    ) -> None:
        if not setting_of(tokenizer, bool, "is_fast"):
            raise ModelFolderError(
                "the tokenizer gives no character positions",
                where=str(tokenizer.name_or_path),
                way_out="Save it as a fast tokenizer (tokenizer.json).",
            )
        self._backend = tokenizer.backend_tokenizer
        self._begins: tuple[str, ...] = ()
        if of_processor:
            self._begins = _beginnings(tokenizer)
        self._of_processor = of_processor
        reserved = set(placeholders)
        if split_special:
            special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
            reserved |= (special - set(kept)) | set(marks)
        self._reserved = _Texts({*reserved, _OPEN, _CLOSE})
        """What is marked in texts; a mark that a text has itself, too, so that it comes through."""
        self._reserved_of_model = _Texts({*reserved, _OPEN, _CLOSE} - THOUGHT_MARKS)
        """The same in the model's turns, whose thoughts have marks of their own."""
        self._marked = re.compile(f"{_OPEN}({self._reserved.pattern.pattern}){_CLOSE}|[{_OPEN}{_CLOSE}]")
        ids = {self._backend.token_to_id(token) for token in reserved}
        self._reserved_ids = ids - {None, tokenizer.unk_token_id}
        self._spelled = lru_cache(_SPELLINGS)(self._spell)

    def __getstate__(self) -> JsonObject:
        """Without the cache, which is not pickled."""
        return {key: value for key, value in vars(self).items() if key != "_spelled"}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        vars(self).update(state)
        self._spelled = lru_cache(_SPELLINGS)(self._spell)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, list[Span]]:
        """Token ids, and for each character span the span of the tokens that touch it."""
        encoding = self.encoding(text)
        return np.array(encoding.ids, dtype=np.int64), [token_span(encoding, span) for span in spans]

    def encoding(self, text: str) -> Encoding:
        """Token ids with positions in `text`."""
        # A processor adds its begin token unless the template wrote one; a tokenizer alone adds none.
        begins = self._of_processor and not text.startswith(self._begins)
        if _OPEN in text or _CLOSE in text:
            return self._in_pieces(text, begins)
        return _Whole(self._backend.encode(text, add_special_tokens=begins))

    def protect(self, value: object) -> Any:
        """A text, or the texts of tools, with special tokens marked as text; the very same value where it has none."""
        if _holds(value, self._reserved):
            return _with_marks(value, self._reserved.pattern)
        return value

    def protect_messages(self, messages: Sequence[JsonObject], kept: frozenset[str] = frozenset()) -> list[JsonObject]:
        """Messages as chat templates take them, with the special tokens in their texts marked as text, but for those of
        `kept`."""
        found = []
        for message in messages:
            reserved = self._reserved
            if message["role"] == "assistant":
                reserved = self._reserved_of_model
            if kept:
                reserved = reserved.without(kept)
            if _holds(message, reserved):
                message = _with_marks(message, reserved.pattern)
            found.append(message)
        return found

    # --- special tokens as text --------------------------------------------------------------------------------------

    def _in_pieces(self, text: str, begins: bool) -> Encoding:
        """Between two protected tokens as ever, the protected ones by the tokenizer's model alone."""
        pieces = _Pieces()
        front, back = list[int](), list[int]()
        if begins:
            front, back = self._around()
        pieces.add(front, [(0, 0)])
        position = 0
        for found in self._marked.finditer(text):
            self._add(pieces, text[position : found.start()], position)
            if found[1]:
                pieces.add(self._spelled(found[1]), [(found.start(1), found.end(1))])
            position = found.end()
        self._add(pieces, text[position:], position)
        pieces.add(back, [(len(text), len(text))])
        return pieces

    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts in front of a text and behind it."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        # "a" stands for any text: what is not its own token is what the tokenizer adds around.
        own = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]

    def _add(self, pieces: _Pieces, piece: str, at: int) -> None:
        if at == 0:
            encoding = self._backend.encode(piece, add_special_tokens=False)
            pieces.add(encoding.ids, encoding.offsets)
        elif piece:
            encoding, skip, shift = self._behind(piece)
            offsets = [(start + at - shift, stop + at - shift) for start, stop in encoding.offsets[skip:]]
            pieces.add(encoding.ids[skip:], offsets)

    def _behind(self, piece: str) -> tuple[Any, int, int]:
        """A text as in the middle of another, for SentencePiece puts a space in front of every text: behind a character
        that keeps its own tokens, their number and that of its characters; if there is none, alone."""
        for front in _FRONTS:
            own = len(self._backend.encode(front, add_special_tokens=False).ids)
            encoding = self._backend.encode(front + piece, add_special_tokens=False)
            if own <= len(encoding.ids) and encoding.offsets[own - 1][1] <= len(front):
                return encoding, own, len(front)
        return self._backend.encode(piece, add_special_tokens=False), 0, 0

    def _spell(self, token: str) -> list[int]:
        """A special token's text, as the model spells it without knowing the token.

        Raises:
            DataError: The tokenizer makes the token of a single character.
        """
        ids = self._plain(token)
        for front in _FRONTS:
            own, both = self._plain(front), self._plain(front + token)
            if both[: len(own)] == own:
                ids = both[len(own) :]
                break
        if self._reserved_ids.isdisjoint(ids):
            return ids
        if len(token) == 1:
            raise DataError(
                f"'{token}' cannot be spelled out: the tokenizer makes the special token from plain text",
                way_out="Leave it out of the text.",
            )
        return [*self._spell(token[:1]), *self._spell(token[1:])]  # a piece of the vocabulary is the token (Unigram)

    def _plain(self, text: str) -> list[int]:
        """Without looking for added tokens."""
        backend = self._backend
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids: list[int] = []
        for split in splits:
            ids += [part.id for part in backend.model.tokenize(split)]
        return ids


class _Texts:
    """Finds any of some texts; where one begins with another, the longer one.

    Their beginnings are looked for first: that takes a hundredth of the time in which a text is tokenised, a regular
    expression of hundreds of tokens as long as that.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))))
        self._texts, self._subsets = frozenset(texts), dict[frozenset[str], _Texts]()
        self._beginnings = tuple(sorted({text[:_BEGINNING] for text in texts}))
        self._words: dict[str, bool] = {}

    def without(self, kept: frozenset[str]) -> _Texts:
        """The same but for some of them."""
        if kept not in self._subsets:
            self._subsets[kept] = _Texts(self._texts - kept)
        return self._subsets[kept]

    def are_in(self, text: str) -> bool:
        """Whether a text holds one of them."""
        if len(text) > _LONGEST_WORD:
            return self._search(text)
        found = self._words.get(text)
        if found is None:
            found = self._search(text)
            if len(self._words) < _WORDS:
                self._words[text] = found
        return found

    def _search(self, text: str) -> bool:
        for beginning in self._beginnings:
            if beginning in text:
                return self.pattern.search(text) is not None
        return False


def _beginnings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What a text starts with where the chat template wrote the begin token itself: none is added then."""
    added = tokenizer.backend_tokenizer.encode("", add_special_tokens=True).tokens[:1]
    return tuple(set(filter(None, (tokenizer.bos_token, *added))))


def _holds(value: object, texts: _Texts) -> bool:
    if isinstance(value, str):
        return texts.are_in(value)
    if isinstance(value, dict | Mapping):  # loops: this is done for every message
        for key, part in value.items():
            if isinstance(part, str) and part in _OWN_VALUES and key in ("role", "type"):
                continue
            if (key not in _OWN_KEYS and _holds(key, texts)) or _holds(part, texts):
                return True
    elif isinstance(value, list | tuple):
        for part in value:
            if _holds(part, texts):
                return True
    return False


def _with_marks(value: object, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(rf"{_OPEN}\g<0>{_CLOSE}", value)
    if isinstance(value, Mapping):
        marked = {}
        for key, part in value.items():
            is_own = key in ("role", "type") and isinstance(part, str) and part in _OWN_VALUES
            if not is_own:
                part = _with_marks(part, pattern)
            marked[_with_marks(key, pattern)] = part
        return marked
    if isinstance(value, list | tuple):
        return [_with_marks(part, pattern) for part in value]
    return value


def without_marks(text: str) -> str:
    """The text without the marks of `protect`."""
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def with_stand_ins(text: str) -> str:
    """The text with one letter and a mark in the place of each token that is to be text, for a processor to look at:
    what it writes next to a word may depend on its first letter."""
    return _MARKED.sub(rf"\1{_OPEN}", text)


class _Whole:
    """An encoding of the `tokenizers` library, its ids asked for once: it makes a new list of them each time."""

    __slots__ = ("char_to_token", "ids", "token_to_chars")

    def __init__(self, encoding: Encoding) -> None:
        self.ids = encoding.ids
        self.char_to_token, self.token_to_chars = encoding.char_to_token, encoding.token_to_chars


class _Pieces:
    """An encoding put together from pieces of the text, left to right."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._offsets: list[Span] = []
        self._starts: list[int] = []

    def add(self, ids: list[int], offsets: list[Span]) -> None:
        """Token ids and their characters; one span stands for all of them."""
        spans = offsets
        if len(offsets) == 1:
            spans = offsets * len(ids)
        self.ids += ids
        self._offsets += spans
        self._starts += [start for start, _ in spans]

    def char_to_token(self, position: int) -> int | None:
        """The first token that holds a character."""
        token = bisect.bisect_right(self._starts, position) - 1
        if token < 0 or position >= self._offsets[token][1]:
            return None
        while token > 0 and self._offsets[token - 1] == self._offsets[token]:
            token -= 1
        return token

    def token_to_chars(self, token: int) -> Span | None:
        """The characters of a token."""
        return self._offsets[token]


def token_span(encoding: Encoding, span: Span) -> Span:
    """The tokens that touch the characters `span`."""
    return _first(encoding, *span), _last(encoding, *span) + 1


def _first(encoding: Encoding, start: int, end: int) -> int:
    for character in range(start, end):
        token = encoding.char_to_token(character)
        if token is not None:
            return token
    return len(encoding.ids)


def _last(encoding: Encoding, start: int, end: int) -> int:
    for character in range(end - 1, start - 1, -1):
        token = encoding.char_to_token(character)
        if token is None:
            continue
        while token + 1 < len(encoding.ids) and encoding.token_to_chars(token + 1) == encoding.token_to_chars(token):
            token += 1  # a character of several tokens: all of them have its position
        return token
    return -1
