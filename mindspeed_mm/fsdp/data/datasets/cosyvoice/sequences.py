"""How text and speech tokens stand in one sequence for CosyVoice3, and what is to be predicted where.

An id below `text_rows` is of text; the others are rows of the speech embedding, moved up by `text_rows`. Labels count
speech rows from 0. As everywhere here, a label is that of the token at its own place; a token is predicted from the one
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL

START, END, SPEECH_FOLLOWS, TEXT_FOLLOWS = range(4)
"""Speech rows behind those of the codec. `TEXT_FOLLOWS` is to be predicted, and never stands in a sequence."""


@dataclass(frozen=True)
class SpeechRows:
    """Where the rows of speech begin, and how text and speech take turns."""

    text_rows: int
    codec_rows: int
    text_turn: int
    """Tokens of text at a time, where they take turns."""
    speech_turn: int
    """Tokens of speech that follow them."""

    def can_mix(self, text: Sequence[int], speech: Sequence[int]) -> bool:
        """Whether there is speech for every turn of the text."""
        return len(speech) * self.text_turn > len(text) * self.speech_turn

    def whole(self, prompt: Sequence[int], text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        """All of the text, then all of the speech."""
        return self._ended(self._begun(prompt), text, speech)

    def mixed(self, prompt: Sequence[int], text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        """Text and speech in turns, as for text that is still being written; then the rest of both."""
        tokens, full = self._begun(prompt), len(text) // self.text_turn
        for turn in range(full):
            tokens.unlabelled(text[turn * self.text_turn :][: self.text_turn])
            tokens.labelled(self._rows(speech[turn * self.speech_turn :][: self.speech_turn]), self.text_rows)
            # Told by the speech's last token, although text comes next.
            tokens.label_of_next = self.codec_rows + TEXT_FOLLOWS
        return self._ended(tokens, text[full * self.text_turn :], speech[full * self.speech_turn :])

    def _begun(self, prompt: Sequence[int]) -> SpeechSequence:
        tokens = SpeechSequence()
        tokens.unlabelled([self._mark(START), *prompt])
        return tokens

    def _ended(self, tokens: SpeechSequence, text: Sequence[int], speech: Sequence[int]) -> SpeechSequence:
        tokens.unlabelled([*text, self._mark(SPEECH_FOLLOWS)])
        tokens.labelled([*self._rows(speech), self.codec_rows + END], self.text_rows)
        return tokens

    def _mark(self, mark: int) -> int:
        return self.text_rows + self.codec_rows + mark

    def _rows(self, speech: Sequence[int]) -> list[int]:
        return [int(token) for token in speech]


@dataclass
class SpeechSequence:
    """A sequence that is being written."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    label_of_next: int = IGNORED_LABEL
    """Of the first of the tokens without labels that come next."""

    def unlabelled(self, ids: Sequence[int]) -> None:
        """Add tokens that are given."""
        self.ids += ids
        self.labels += [self.label_of_next, *[IGNORED_LABEL] * (len(ids) - 1)]
        self.label_of_next = IGNORED_LABEL

    def labelled(self, rows: Sequence[int], first_row: int) -> None:
        """Add speech that is to be predicted."""
        self.ids += [first_row + row for row in rows]
        self.labels += rows

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, (L,) int64 each."""
        return np.array(self.ids, dtype=np.int64), np.array(self.labels, dtype=np.int64)
