"""Text → token ids with character positions, as a model's processor or tokenizer makes them after its chat template.

With `split_special_tokens`, special tokens that stand in the text of a row are spelled out as text: rows are marked
before they are rendered (`protect`), so that those which the chat template writes stay what they are.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import Span
from mindspeed_mm.fsdp.utils.settings import setting_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPEN, _CLOSE = "\ue002", "\ue003"
"""Private-use characters around what is to be text."""
PROTECTED = _OPEN
"""In front of a special token that is text."""
_KEY = "data.dataset_param.preprocess_parameters.split_special_tokens"


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

    Raises:
        ModelFolderError: The tokenizer is of the slow kind, which has no character positions.
        ConfigError: `split_special` is asked for and the tokenizer appends a token to every text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, of_processor: bool, split_special: bool = False) -> None:
        if not setting_of(tokenizer, bool, "is_fast"):
            raise ModelFolderError(
                "the tokenizer gives no character positions",
                where=str(tokenizer.name_or_path),
                way_out="Save it as a fast tokenizer (tokenizer.json).",
            )
        self._backend = tokenizer.backend_tokenizer
        self._begins = _beginnings(tokenizer) if of_processor else ()
        self._of_processor = of_processor
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        special.sort(key=len, reverse=True)  # where one begins with another, the longer one is meant
        either = "|".join(map(re.escape, special)) or "(?!)"
        self._protected = re.compile(f"{_OPEN}({either}){_CLOSE}|[{_OPEN}{_CLOSE}]")
        self._special: re.Pattern[str] | None = None
        """Where special tokens are text."""
        if split_special:
            self._special = re.compile(either)
            self._check_ending()

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, list[Span]]:
        """Token ids, and for each character span the span of the tokens that touch it."""
        encoding = self.encoding(text)
        return np.array(encoding.ids, dtype=np.int64), [token_span(encoding, span) for span in spans]

    def encoding(self, text: str) -> Encoding:
        """Token ids with positions in `text`."""
        begins = self._of_processor and not text.startswith(self._begins)
        if self._special is not None and (_OPEN in text or _CLOSE in text):
            return self._in_pieces(text, begins)
        return self._backend.encode(text, add_special_tokens=begins)

    def protect(self, value: Any) -> Any:
        """The strings of messages or tools with their special tokens marked as text; unchanged where that is off."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(rf"{_OPEN}\g<0>{_CLOSE}", _without_marks(value))
        if isinstance(value, dict):
            protected = {key: self.protect(item) for key, item in value.items()}
            for key in protected.keys() & {"role", "type"}:
                protected[key] = value[key]
            return protected
        if isinstance(value, list | tuple):
            return list(map(self.protect, value))
        return value

    def shown(self, text: str) -> str:
        """The text without the marks of `protect`."""
        return text if self._special is None else _without_marks(text)

    # --- special tokens as text --------------------------------------------------------------------------------------

    def _in_pieces(self, text: str, begins: bool) -> Encoding:
        """Between two protected tokens as ever, the protected ones by the tokenizer's model alone."""
        pieces = _Pieces()
        position = 0
        for found in self._protected.finditer(text):
            self._add(pieces, text[position : found.start()], position, begins)
            if found[1]:
                pieces.add(self._spelled(found[1]), [(found.start(1), found.end(1))])
            position = found.end()
        self._add(pieces, text[position:], position, begins)
        return pieces

    def _add(self, pieces: _Pieces, piece: str, at: int, begins: bool) -> None:
        """In the middle behind a line break, which is taken away again: SentencePiece puts a space in front of every
        text."""
        if at == 0:
            encoding = self._backend.encode(piece, add_special_tokens=begins)
            pieces.add(encoding.ids, encoding.offsets)
        elif piece:
            breaks = len(self._backend.encode("\n", add_special_tokens=False).ids)
            skip, shift = breaks, at - 1
            encoding = self._backend.encode("\n" + piece, add_special_tokens=False)
            ends_at_break = encoding.offsets[breaks - 1][1] <= 1 <= len(encoding.ids)
            if not ends_at_break:  # the line break became one token with what follows it
                skip, shift = 0, at
                encoding = self._backend.encode(piece, add_special_tokens=False)
            offsets = [(start + shift, stop + shift) for start, stop in encoding.offsets[skip:]]
            pieces.add(encoding.ids[skip:], offsets)

    def _spelled(self, token: str) -> list[int]:
        """A special token's text, as the model spells it without knowing the token."""
        backend = self._backend
        text = "\n" + token
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        splits = [text]
        if backend.pre_tokenizer:
            splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        ids: list[int] = []
        for split in splits:
            ids += [part.id for part in backend.model.tokenize(split)]
        breaks = backend.encode("\n", add_special_tokens=False).ids
        if ids[: len(breaks)] == breaks:
            ids = ids[len(breaks) :]
        if backend.token_to_id(token) in ids:
            raise DataError(f"'{token}' cannot be spelled out: the tokenizer makes the token from plain text", key=_KEY)
        return ids

    def _check_ending(self) -> None:
        if self._of_processor and len(self._backend.encode("", add_special_tokens=True).ids) > 1:
            raise ConfigError("the tokenizer appends a token to every text", key=_KEY, way_out="Leave it at false.")


def _beginnings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What a text starts with where the chat template wrote the begin token itself: none is added then."""
    added = tokenizer.backend_tokenizer.encode("", add_special_tokens=True).tokens[:1]
    return tuple(set(filter(None, (tokenizer.bos_token, *added))))


def _without_marks(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


class _Pieces:
    """An encoding put together from pieces of the text, left to right."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._offsets: list[Span] = []
        self._starts: list[int] = []

    def add(self, ids: list[int], offsets: list[Span]) -> None:
        """Token ids and their characters; one span stands for all of them."""
        spans = offsets * len(ids) if len(offsets) == 1 else offsets
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
