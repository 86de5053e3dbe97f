"""How text and codes stand beside each other in one sequence for Qwen3-TTS (arXiv:2601.15621, its published
fine-tuning): every place has a token of text and one of the first codebook, either of which may say that there is none.

    text   role  pad pad pad pad    bos  text …  eos  pad  pad …     pad
    codec        head …      voice  pad  pad …   pad  bos  frames …  eos

What generation goes on from is the same without the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL, NO_CODE

if TYPE_CHECKING:  # an annotation only: this imports transformers' models
    from mindspeed_mm.fsdp.models.qwen3tts.configuration_qwen3tts import Qwen3TTSConfig


@dataclass(frozen=True)
class SpokenSequence:
    """A sequence of L places."""

    input_ids: np.ndarray
    """(L,) int64 of text."""
    codec_ids: np.ndarray
    """(L, G) int64 of the codebooks."""
    labels: np.ndarray
    """(L,) int64 of the first codebook, not shifted."""


def sequence_of(
    config: Qwen3TTSConfig,
    role: Sequence[int],
    text: Sequence[int],
    codes: np.ndarray,
    voice: Sequence[int],
    language: int | None = None,
) -> SpokenSequence:
    """The sequence of one sample.

    Args:
        config: Of the model: the marks.
        role: Tokens that say whose turn it is, behind a turn with instructions if there is one.
        text: Tokens of what is said.
        codes: (frames, G).
        voice: What stands for the voice: `SPEAKER_CODE`, the first codebook's number of a known voice, or nothing.
        language: The first codebook's number of a language, as generation has it; None: it is heard in the text.
    """
    talker = config.talker_config
    if language is None:
        head = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    else:
        head = [talker.codec_think_id, talker.codec_think_bos_id, language, talker.codec_think_eos_id]
    head += voice
    silent = [talker.codec_pad_id] * (len(text) + 2)  # from the text's beginning to its end
    first = [NO_CODE] * len(role) + head + silent + [talker.codec_bos_id]
    speech = [*codes[:, 0].tolist(), talker.codec_eos_token_id]
    pads = [config.tts_pad_token_id]
    words = [*role, *pads * len(head), config.tts_bos_token_id, *text, config.tts_eos_token_id]
    words += pads * (1 + len(speech))
    codec_ids = np.full((len(words), codes.shape[1]), NO_CODE, dtype=np.int64)
    codec_ids[:, 0] = first + speech
    codec_ids[len(first) : -1] = codes
    labels = [IGNORED_LABEL] * len(first) + speech
    return SpokenSequence(np.array(words, dtype=np.int64), codec_ids, np.array(labels, dtype=np.int64))
