"""How text and codes stand beside each other in one sequence for MOSS-TTS (`processing_moss_tts.py` of its repository).
Every place has a token of text and a code of each codebook, which may be none. Of three frames in two codebooks:

    text      … start  slot  slot  slot  delay  end …
    first     …        a1    a2    a3
    second    …              b1    b2    b3

Codebook g begins g places behind the first. A voice that is given stands in the user's turn in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE

if TYPE_CHECKING:  # an annotation only: this imports transformers' models
    from mindspeed_mm.fsdp.models.moss_tts_delay.configuration_moss_tts_delay import MossTTSDelayConfig

AUDIO = "<|audio|>"
"""In a text: here stand the codes of a sound."""
FIELDS = ("instruction", "tokens", "quality", "sound_event", "ambient_sound", "language", "text")
"""Of a user's turn, in their order, behind the references."""
SAID = ("instruction", "sound_event", "ambient_sound", "text")
"""Those that ask for a sound; the others say how it is to be."""


@dataclass(frozen=True)
class DelayedSequence:
    """A sequence of L places, or a part of one."""

    input_ids: np.ndarray
    """(L,) int64 of text."""
    codec_ids: np.ndarray
    """(L, G) int64; `NO_CODE` where there is none."""

    @staticmethod
    def joined(parts: Sequence[DelayedSequence]) -> DelayedSequence:
        """The sequence of several parts, one behind the other."""
        ids = np.concatenate([part.input_ids for part in parts])
        return DelayedSequence(ids, np.concatenate([part.codec_ids for part in parts]))

    def labels(self, begin: int) -> np.ndarray:
        """(L,) int64, not shifted, of which all from `begin` on are trained."""
        labels = self.input_ids.copy()
        labels[:begin] = IGNORED_LABEL
        return labels


def delayed(codes: np.ndarray) -> np.ndarray:
    """Frames (N, G) under the delay pattern, (N + G − 1, G)."""
    frames, books = codes.shape
    made = np.full((frames + books - 1, books), NO_CODE, dtype=np.int64)
    for book in range(books):
        made[book : book + frames, book] = codes[:, book]
    return made


def undelayed(codes: np.ndarray) -> np.ndarray:
    """The frames (N, G) of codes under the delay pattern, (N + G − 1, G)."""
    books = codes.shape[1]
    frames = max(len(codes) - books + 1, 0)
    return np.stack([codes[book : book + frames, book] for book in range(books)], axis=1)


def user_turn(fields: Mapping[str, str], references: Sequence[bool] | None) -> str:
    """What the user says, with `AUDIO` for every reference that there is.

    Args:
        fields: Text of each of `FIELDS`.
        references: Of each speaker, whether there is a voice; None: nothing is said of voices.
    """
    voices = "None"
    if references is not None:
        named = [f"[S{number}]:\n{AUDIO}" for number, is_given in enumerate(references, 1) if is_given]
        voices = "\n".join(named)
    told = [("Reference(s)", voices)]
    told += [(name.replace("_", " ").title(), fields[name]) for name in FIELDS]
    lines = "".join(f"- {name}:\n{value}\n" for name, value in told)
    return f"<user_inst>\n{lines}</user_inst>"


def text_part(ids: Sequence[int], books: int) -> DelayedSequence:
    """Text, with no code at any of its places."""
    return DelayedSequence(np.array(ids, dtype=np.int64), np.full((len(ids), books), NO_CODE, dtype=np.int64))


def sound_part(config: MossTTSDelayConfig, codes: np.ndarray, *, is_answer: bool) -> DelayedSequence:
    """Codes (N, G) of a sound with the tokens of text beside them.

    Args:
        config: Of the model: the marks.
        codes: Of at least one frame.
        is_answer: Whether the model is to say it; otherwise it is a voice that is given.
    """
    frames, books = codes.shape
    slot = delay = config.audio_user_slot_token_id
    if is_answer:
        slot, delay = config.audio_assistant_gen_slot_token_id, config.audio_assistant_delay_slot_token_id
    beside = [slot] * frames + [delay] * (books - 1)
    marks = [text_part([mark], books) for mark in (config.audio_start_token_id, config.audio_end_token_id)]
    sound = DelayedSequence(np.array(beside, dtype=np.int64), delayed(codes))
    return DelayedSequence.joined([marks[0], sound, marks[1]])
