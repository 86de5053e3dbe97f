"""Token ids → the stretches of text that a person reads, each trained or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import tokens_of_media
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_mm.fsdp.utils.processor import Processor

_MOST_BYTES = 8
"""Tokens that a character may be spread over."""
_LEAST_REPEATED = 3
"""A special token so many times in a row stands for a medium, or is padding."""
_HALF = "\ufffd"


@dataclass(frozen=True)
class TokenPiece:
    """One token, or several where they make up one character."""

    text: str
    ids: tuple[int, ...]
    first: int
    """Number of its first token in the sample."""
    weight: float
    """How much it counts in the loss; 0: not trained."""


@dataclass(frozen=True)
class TokenSpan:
    """Pieces that are trained alike."""

    pieces: tuple[TokenPiece, ...]
    repeated: int = 0
    """How often a special token is repeated; 0 for other spans."""

    @property
    def text(self) -> str:
        """Text of all pieces, joined; a repeated special token appears once."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def weight(self) -> float:
        """How much its pieces count in the loss."""
        return self.pieces[0].weight

    @property
    def first(self) -> int:
        """Number of its first token."""
        return self.pieces[0].first

    @property
    def tokens(self) -> int:
        """Number of tokens in the span, repetitions of a special token included."""
        return self.repeated or sum(len(piece.ids) for piece in self.pieces)


class TokenReader:
    """Reads ids back as text, token by token.

    Args:
        tokenizer: Of the model; None: ids are shown as numbers.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._known: dict[tuple[int, ...], str] = {}

    def stretches(
        self, ids: Sequence[int], labels: Sequence[int] | None, weights: npt.ArrayLike | None = None
    ) -> list[TokenSpan]:
        """The sample as stretches.

        Args:
            ids: (L,) token ids.
            labels: (L,), -100 where not trained; None: nothing is.
            weights: (L,) of the loss, or None.
        """
        numbers = list(map(int, ids))
        counted = _token_weights(len(numbers), labels, weights)
        found: list[TokenSpan] = []
        pending: list[TokenPiece] = []
        for stretch in self._parts(numbers, counted):
            piece = stretch.pieces[0]
            if pending and (stretch.repeated or pending[-1].weight != piece.weight):
                found.append(TokenSpan(tuple(pending)))
                pending = []
            if stretch.repeated:
                found.append(stretch)
            else:
                pending.append(piece)
        if pending:
            found.append(TokenSpan(tuple(pending)))
        return found

    def _parts(self, ids: list[int], weights: list[float]) -> Iterator[TokenSpan]:
        """Pieces one by one, repeated special tokens as one."""
        start = 0
        before: tuple[int, ...] = ()
        while start < len(ids):
            repeated = self._repeats(ids, weights, start)
            if repeated:
                piece = TokenPiece(self._text((), (ids[start],)), (ids[start],), start, weights[start])
                yield TokenSpan((piece,), repeated)
                start, before = start + repeated, (ids[start],)
                continue
            end = self._end(ids, start, before)
            taken = tuple(ids[start:end])
            yield TokenSpan((TokenPiece(self._text(before, taken), taken, start, max(weights[start:end])),))
            start, before = end, taken

    def _repeats(self, ids: list[int], weights: list[float], start: int) -> int:
        """How often a special token is repeated here, trained alike; 0 when it is no such run."""
        if ids[start] not in self._special:
            return 0
        end = start
        while end < len(ids) and (ids[end], weights[end]) == (ids[start], weights[start]):
            end += 1
        if end - start >= _LEAST_REPEATED:
            return end - start
        return 0

    def _end(self, ids: list[int], start: int, before: tuple[int, ...]) -> int:
        """Behind the last token of the character that begins here."""
        for end in range(start + 1, min(start + _MOST_BYTES, len(ids)) + 1):
            if not self._text(before, tuple(ids[start:end])).endswith(_HALF):
                return end
        return start + 1

    def _text(self, before: tuple[int, ...], ids: tuple[int, ...]) -> str:
        """What tokens say behind others: some tokenizers drop the blank in front of what they decode first."""
        if before:
            together, ahead = self._decode(before + ids), self._decode(before)
            if together.startswith(ahead):
                return together[len(ahead) :]
        return self._decode(ids)

    def _decode(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            if self._tokenizer is None:
                text = "".join(f"{number} " for number in ids)
            else:
                text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._known[ids] = text
        return self._known[ids]


def special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Ids of special tokens, those that were added included; none of a model without a tokenizer."""
    if tokenizer is None:
        return frozenset()
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added


def special_texts(processor: Processor | None) -> tuple[str, ...]:
    """Special tokens as text, those that were added included, and those that stand for media; none of a model without a
    tokenizer. The longest first: one may begin with another."""
    if processor is None:
        return ()
    tokenizer = tokenizer_of(processor)
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    found = {*tokenizer.all_special_tokens, *added, *tokens_of_media(processor)}
    return tuple(sorted(found, key=lambda token: (-len(token), token)))


def _token_weights(length: int, labels: Sequence[int] | None, weights: npt.ArrayLike | None) -> list[float]:
    if labels is None:
        return [0.0] * length
    counted = np.ones(length) if weights is None else np.asarray(weights, dtype=np.float64)
    found: list[float] = np.where(np.asarray(labels) == IGNORED_LABEL, 0.0, counted).tolist()
    return found
