"""One answer while it is made: its tokens, its text piece by piece, and when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.steering import TokenLogProb

Ending = Literal["stop", "length", "given up", "failed"]
Decode = Callable[[Sequence[int]], str]
"""Token ids → text."""


@dataclass(frozen=True)
class Speech:
    """How a speech recogniser is to hear a sound."""

    language: str | None = None
    """As its tokenizer names it, "de" or "german"; None: as the folder says."""
    prompt: str = ""
    """What was said before, whose spelling it follows."""
    temperature: float = 0.0
    """0: the likeliest token, always."""


@dataclass(frozen=True)
class Answer:
    """What a model said: its tokens up to and including the end token, and their text."""

    token_ids: tuple[int, ...]
    text: str
    finished: bool
    """False when `max_new_tokens` cut it off."""


@dataclass(eq=False)
class LiveAnswer:
    """An answer that is asked for, and what is there of it.

    Args:
        question: What it answers.
        sampling: How its tokens are chosen.
        tell: Is given its text piece by piece, on the thread of the model; None: nobody listens.
        stop: Texts that end it; they are not part of it.
        tell_every_s: Pieces come no more often than this; what a piece costs is not to slow the model down.
        adapter: Name of the adapters that it is made with; None: those that the model always has, if any.
        keeps_blanks: Its text keeps the white space at its ends.
        speech: Of a speech recogniser, how it is to hear; None: as the folder says.
    """

    question: EncodedQuestion
    sampling: Sampling
    tell: Callable[[str], None] | None = None
    stop: Sequence[str] = ()
    tell_every_s: float = 0.0
    adapter: str | None = None
    keeps_blanks: bool = False
    speech: Speech | None = None
    token_ids: list[int] = field(default_factory=list)
    ending: Ending | None = None
    text: TextPieces | None = None
    answer: Answer | None = None
    """Once it is over, unless it failed."""
    failure: MMError | None = None
    """Once it is over: why there is no answer."""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    """Once it is over, where they were asked for."""
    most_tokens: int = field(init=False)
    """How many it may have: those that are asked for, from its beginning no more than the model has room for."""
    _told_s: float = 0.0
    _gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.most_tokens = self.sampling.max_new_tokens

    def begin(self, decode: Decode, longest: int | None = None) -> None:
        """Forget what is there of it, unless somebody has read some.

        Args:
            decode: Of the tokenizer.
            longest: Tokens that the model takes, question and answer together; None: it does not say.

        Raises:
            RuntimeError: Somebody has.
        """
        self.check_untold()
        self.token_ids, self.ending, self.answer, self.failure = [], None, None, None
        if longest is not None:
            self.most_tokens = min(self.sampling.max_new_tokens, longest - len(self.question.input_ids))
        self.log_probs = []
        if self.tell is not None or self.stop:
            self.text = TextPieces(decode, self.tell, self.stop, keeps_blanks=self.keeps_blanks)
        else:
            self.text = None

    def check_untold(self) -> None:
        """Raise `RuntimeError` where somebody has read a part of it: then it cannot begin again."""
        if self.token_ids and self.tell is not None:
            raise RuntimeError("an answer that was partly streamed cannot start again")

    def give_up(self) -> None:
        """Nobody waits for it any more: it ends with the next token."""
        self._gone.set()

    def ends(self, ends: Sequence[int]) -> Sequence[int]:
        """Which of the model's end tokens end it."""
        if self.sampling.steering.ignores_end:
            return ()
        return ends

    def take(self, token: int, ends: Sequence[int]) -> bool:
        """Add a token, unless it is over; whether it is over now."""
        if self.ending is not None:
            return True
        self.token_ids.append(token)
        if token in self.ends(ends):
            self.ending = "stop"
        elif self._gone.is_set():
            self.ending = "given up"
        elif self.text is not None and self._is_due() and self.text.take(self.token_ids):
            self.ending = "stop"
        elif len(self.token_ids) >= self.most_tokens:
            self.ending = "length"
        return self.ending is not None

    def fail(self) -> bool:
        """End it, unless it is over: its next token cannot be chosen. It is over now."""
        if self.ending is None:
            self.ending = "failed"
        return True

    def _is_due(self) -> bool:
        """Whether the text is to be read now: a text that may end it is looked for with every token."""
        if not self.tell_every_s or self.stop:
            return True
        now_s = time.monotonic()
        if now_s - self._told_s < self.tell_every_s:
            return False
        self._told_s = now_s
        return True

    def close(self, decode: Decode) -> Answer:
        """The answer; what of its text was held back is told."""
        whole = decode(self.token_ids)
        whole = whole if self.keeps_blanks else whole.strip()
        text = self.text.close(self.token_ids, whole) if self.text is not None else whole
        self.answer = Answer(tuple(self.token_ids), text, finished=self.ending == "stop")
        return self.answer


class TextPieces:
    """The text of tokens that come one by one.

    Held back is what may still change: the bytes of a character that are not all there, blanks at the end, which an
    answer does not have unless it keeps them, and the beginning of a text that would end it.

    Args:
        decode: Token ids → text.
        tell: Is given the pieces.
        stop: Texts that end it.
        keeps_blanks: The white space at its ends belongs to it.
    """

    def __init__(
        self,
        decode: Decode,
        tell: Callable[[str], None] | None,
        stop: Sequence[str] = (),
        *,
        keeps_blanks: bool = False,
    ) -> None:
        self._keeps_blanks = keeps_blanks
        self._decode, self._tell, self._stop = decode, tell or (lambda _: None), tuple(stop)
        self._read, self._settled = 0, 0
        """Tokens whose text is in `_text`; those before `_settled` are not decoded again."""
        self._text, self._told = "", 0
        self._end: int | None = None

    def take(self, token_ids: Sequence[int]) -> bool:
        """Read the tokens so far; whether a text has ended them."""
        # Text depends on the tokens before: some tokenizers drop a blank at the beginning. So those of the last piece
        # are decoded with the new ones.
        before = self._decode(token_ids[self._settled : self._read])
        after = self._decode(token_ids[self._settled :])
        if after.endswith("\ufffd") or not after.startswith(before):
            return False
        self._text += after[len(before) :]
        self._settled, self._read = self._read, len(token_ids)
        self._look_for_end()
        self._catch_up(self._safe())
        return self._end is not None

    def close(self, token_ids: Sequence[int], whole: str) -> str:
        """The whole text, cut where a text ended it; what was not told yet is told.

        Args:
            token_ids: All of them.
            whole: Their text.
        """
        if self._end is None:
            rest = self._decode(token_ids[self._settled :])
            self._text += rest.removeprefix(self._decode(token_ids[self._settled : self._read]))
            self._look_for_end()
        end = len(self._text) if self._end is None else self._end
        self._catch_up(self._before_blanks(self._text[:end]))
        if self._end is None:
            return whole
        if self._keeps_blanks:
            return self._text[:end]
        return self._text[:end].strip()

    def _look_for_end(self) -> None:
        places = [self._text.find(text) for text in self._stop]
        self._end = min((place for place in places if place >= 0), default=None)

    def _safe(self) -> int:
        """How much of the text will not change."""
        if self._end is not None:
            return self._before_blanks(self._text[: self._end])
        text = self._text
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        return self._before_blanks(text[: len(text) - held])

    def _before_blanks(self, text: str) -> int:
        return len(text if self._keeps_blanks else text.rstrip())

    def _catch_up(self, end: int) -> None:
        blanks = 0 if self._keeps_blanks else len(self._text) - len(self._text.lstrip())
        start = self._told or blanks
        if end > start:
            self._tell(self._text[start:end])
            self._told = end


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text begin another."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
