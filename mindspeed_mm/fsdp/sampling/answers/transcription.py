"""Transcripts by Whisper, with transformers' own `generate`: an encoder hears, a decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST_START = 4
"""Tokens that a transcript begins with: start, language, task, no times."""


def transcripts(
    model: PreTrainedModel, inputs: Mapping[str, Any], *, max_new_tokens: int
) -> list[tuple[tuple[int, ...], bool]]:
    """The tokens of each transcript up to and including its end token, and whether it has one.

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
    with torch.inference_mode():
        # Times are not trained. `generate` leaves the beginning and the end token out of what it returns.
        output_BL = model.generate(**inputs, max_new_tokens=most, do_sample=False, return_timestamps=False)
    settings = model.generation_config
    return [_ended(row, most, settings.pad_token_id, settings.eos_token_id) for row in output_BL.tolist()]


def _ended(row: list[int], most: int, padding: int | None, end: int) -> tuple[tuple[int, ...], bool]:
    """A row without padding, and with its end token where it stopped before the limit."""
    ids = [int(token) for token in row]
    while ids and ids[-1] in (padding, end):
        ids.pop()
    return ((*ids, end), True) if len(ids) < most else (tuple(ids), False)
