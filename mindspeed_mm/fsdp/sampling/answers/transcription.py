"""Transcripts by Whisper, with transformers' own `generate`: an encoder hears, a decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.fsdp.sampling.answers.live import Ending
from mindspeed_mm.fsdp.sampling.finite import FiniteScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST_START = 4
"""Tokens that a transcript begins with: start, language, task, no times."""


@dataclass(frozen=True)
class Transcript:
    """The tokens of a transcript up to and including its end token."""

    token_ids: tuple[int, ...]
    ending: Ending


def transcripts(model: PreTrainedModel, inputs: Mapping[str, Any], *, max_new_tokens: int) -> list[Transcript]:
    """The transcript of each sound.

    Language and task stand in the decoder's tokens; without these transformers takes those of the generation
    configuration, or finds out the language of each sound.

    Args:
        model: Whisper.
        inputs: `input_features` (B, mel bins, frames) and perhaps `decoder_input_ids` (B, L).
        max_new_tokens: Longest transcript; no more than the decoder's places are used.
    """
    starts = inputs.get("decoder_input_ids")
    start_tokens = _LONGEST_START if starts is None else starts.shape[1]
    most = min(max_new_tokens, model.config.max_target_positions - start_tokens)
    finite = FiniteScores(len(inputs["input_features"]))
    with torch.inference_mode():
        # Times are not trained. `generate` leaves the beginning and the end token out of what it returns.
        output_BL = model.generate(
            **inputs, max_new_tokens=most, do_sample=False, return_timestamps=False, logits_processor=[finite]
        )
    settings = model.generation_config
    found = []
    for *row, good in finite.beside(output_BL).tolist():
        transcript = _ended(row, most, settings.pad_token_id, settings.eos_token_id)
        if good < len(transcript.token_ids):
            transcript = Transcript(transcript.token_ids[:good], "failed")
        found.append(transcript)
    return found


def _ended(row: list[int], most: int, padding: int | None, end: int) -> Transcript:
    """A row without padding, and with its end token where it stopped before the limit."""
    ids = [int(token) for token in row]
    while ids and ids[-1] in (padding, end):
        ids.pop()
    return Transcript((*ids, end), "stop") if len(ids) < most else Transcript(tuple(ids), "length")
