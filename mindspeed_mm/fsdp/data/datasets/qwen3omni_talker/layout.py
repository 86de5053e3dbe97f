"""What Qwen3-Omni's talker reads of a conversation and what it tells, place by place, as
`Qwen3OmniMoeForConditionalGeneration.generate` of transformers gives it: the user's turns as they are, no other turn,
and the last answer with the codes of its speech. The answer's words go beside the frames, one a frame:

    text   user's turns  mark role ⏎  pad pad pad pad    bos  word₁  word₂  …  eos  pad …  pad
    codec                             head …      voice  pad  bos    frames …              eos
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE
from mindspeed_mm.core.errors import DataError

if TYPE_CHECKING:
    from transformers import Qwen3OmniMoeConfig

_OPENING = 3
"""Tokens in front of an answer's first word: the mark of a turn, its role, a line feed."""


@dataclass(frozen=True)
class SpokenAnswer:
    """A sequence of L places of the talker, made from one of K of the thinker."""

    input_ids: np.ndarray
    """(L,) int64 of text, with the placeholders of media."""
    codec_ids: np.ndarray
    """(L, G) int64 of the codebooks."""
    labels: np.ndarray
    """(L,) int64 of the first codebook, not shifted."""
    media_places: np.ndarray
    """(M,) int64 places of media among the L."""
    media_sources: np.ndarray
    """(M,) int64 the same places among the K."""
    read: int
    """How many of the K places the thinker has to read: none behind the last user's turn."""


def spoken_answer(
    config: Qwen3OmniMoeConfig, ids_K: np.ndarray, words: Sequence[int], codes: np.ndarray, voice: int
) -> SpokenAnswer:
    """The sequence of one sample.

    Args:
        config: Of the whole model: marks of text and codes.
        ids_K: The conversation's tokens.
        words: Tokens of the last answer's text, without thoughts.
        codes: (frames, G).
        voice: The speaker's number in the first codebook.

    Raises:
        DataError: The conversation does not end with an answer, follows no question, or others than users show media.
    """
    user_K, opening = _users_turns(config, ids_K), _opening(config, ids_K)
    media_K = np.isin(ids_K, _placeholders(config))
    if (media_K & ~user_K).any():
        raise DataError(
            "media are in a turn that is not the user's, and the talker reads only the user's turns of a prompt",
            way_out="Move them into a user's turn, or drop the row.",
        )
    asked = ids_K[user_K]
    marks = config.talker_config
    head = [marks.codec_nothink_id, marks.codec_think_bos_id, marks.codec_think_eos_id, voice, marks.codec_pad_id]
    first = [NO_CODE] * (len(asked) + len(opening)) + [*head, marks.codec_bos_id]
    speech = [*codes[:, 0].tolist(), marks.codec_eos_token_id]
    pad = config.tts_pad_token_id
    beside = [*words[1:], config.tts_eos_token_id][: len(speech)]
    text = [*asked, *opening, *[pad] * (len(head) - 1), config.tts_bos_token_id, words[0], *beside]
    text += [pad] * (len(first) + len(speech) - len(text))
    codec_ids = np.full((len(text), codes.shape[1]), NO_CODE, dtype=np.int64)
    codec_ids[:, 0] = first + speech
    codec_ids[len(first) : -1] = codes
    sources = np.flatnonzero(media_K)
    return SpokenAnswer(
        np.array(text, dtype=np.int64),
        codec_ids,
        np.array([IGNORED_LABEL] * len(first) + speech, dtype=np.int64),
        media_places=np.cumsum(user_K)[sources] - 1,
        media_sources=sources,
        read=int(np.flatnonzero(user_K)[-1]) + 1,
    )


def _users_turns(config: Qwen3OmniMoeConfig, ids_K: np.ndarray) -> np.ndarray:
    """(K,) which places are in a turn of the user."""
    starts = np.flatnonzero(ids_K[:-1] == config.im_start_token_id)
    user_K = np.zeros(len(ids_K), dtype=bool)
    for start, end in zip(starts, [*starts[1:], len(ids_K)], strict=True):
        user_K[start:end] = ids_K[start + 1] == config.user_token_id
    if not user_K.any():
        raise DataError("no turn is the user's", way_out="Give each row a question, or drop it.")
    return user_K


def _opening(config: Qwen3OmniMoeConfig, ids_K: np.ndarray) -> Sequence[int]:
    """What the last turn, which is the model's, begins with."""
    last = int(np.flatnonzero(ids_K[:-1] == config.im_start_token_id)[-1])
    if ids_K[last + 1] != config.assistant_token_id:
        raise DataError("the last turn is not the model's", way_out="End the row with the answer that is spoken.")
    return ids_K[last : last + _OPENING].tolist()  # type: ignore[no-any-return]


def _placeholders(config: Qwen3OmniMoeConfig) -> list[int]:
    thinker = config.thinker_config
    return [thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id]
