"""Frames of speech, one after the other: a talker chooses the first code of each, its code predictor the others.

The published loop (`Qwen3TTSTalkerForConditionalGeneration` of the Qwen3-TTS repository) draws both from one stream of
random numbers, and so does this one: with the same seed it says the same on a CPU.

Shapes: L places of the prompt, G codebooks, N frames, D the talker's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from mindspeed_mm.fsdp.sampling.answers.choosing import RowChoices, RowStart, TokenChoice, generator_of
from mindspeed_mm.fsdp.sampling.finite import not_finite, rows_are_finite

_LEAST_FRAMES = 2
"""The published loop does not end before."""


@dataclass(frozen=True)
class FrameChoice:
    """How the codes of a frame are chosen."""

    first: TokenChoice
    others: TokenChoice
    codes: int
    """Codes of the first codebook; what is behind them in its table are marks, of which only the end is chosen."""
    most_frames: int
    is_given_up: Callable[[], bool]


@torch.inference_mode()
def talk(model: Any, prompt: torch.Tensor, choice: FrameChoice) -> tuple[torch.Tensor, bool]:
    """What a talker says.

    Args:
        model: A `Qwen3TTSForConditionalGeneration`.
        prompt: (L, D) embeddings up to the mark that begins speech.
        choice: How codes are chosen.

    Returns:
        (N, G) codes, and whether the talker ended by itself.

    Raises:
        NotFiniteError: Scores are not finite.
    """
    talker, config = model.talker, model.config.talker_config
    device, end = prompt.device, config.codec_eos_token_id
    generator = generator_of(choice.first, device)
    choose = RowChoices([choice.first], [RowStart(0, 0)], device, generators=[generator])
    predict = _Predictor(talker.code_predictor, choice.others, generator, device)
    silent_1D = model.text_at(torch.tensor([model.config.tts_pad_token_id], device=device))
    marks = torch.arange(config.vocab_size, device=device) >= choice.codes
    cache, read = DynamicCache(config=config), prompt[None]
    frames: list[torch.Tensor] = []
    while len(frames) < choice.most_frames and not choice.is_given_up():
        hidden_11D = talker.model(inputs_embeds=read, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
        scores_1V = talker.codec_head(hidden_11D[:, 0]).float()
        is_finite = rows_are_finite(scores_1V)
        left_out = marks.clone()
        left_out[end] = len(frames) < _LEAST_FRAMES
        scores_1V = scores_1V.masked_fill(left_out, -torch.inf)
        # Of the first codebook alone: its penalty for repetitions looks at these.
        said_1N = marks.new_zeros((1, 0)).long()
        if frames:
            said_1N = torch.stack([frame[0] for frame in frames])[None]
        first = choose(said_1N, scores_1V).argmax(dim=-1)
        token, good = torch.cat([first, is_finite.long()]).tolist()  # one read of the device before each frame
        if not good:
            raise not_finite(f"the scores of frame {len(frames) + 1} of the speech", {"": model})
        if token == end:
            return _stacked(frames, config, device), True
        first_11D = talker.model.codec_embedding(first)[:, None]
        codes_G, others_11D, others_good = predict(hidden_11D, first_11D, first)
        if not others_good:
            raise not_finite(f"the scores of further codes of frame {len(frames) + 1}", {"": model})
        frames.append(codes_G)
        # A frame is read as the sum of its codes' embeddings and that of the text beside it, which is over.
        read = first_11D + others_11D + silent_1D
    return _stacked(frames, config, device), False


def _stacked(frames: list[torch.Tensor], config: Any, device: torch.device) -> torch.Tensor:
    if frames:
        return torch.stack(frames)
    return torch.zeros((0, config.num_code_groups), dtype=torch.long, device=device)


class _Predictor:
    """Chooses the codes of a frame behind the first.

    Args:
        parts: `model` with `codec_embedding`, `lm_head` and `small_to_mtp_projection`.
        choice: How codes are chosen.
        generator: What they are drawn by.
        device: Of the model.
    """

    def __init__(self, parts: Any, choice: TokenChoice, generator: torch.Generator, device: torch.device) -> None:
        self._parts = parts
        self._choose = RowChoices([choice], [RowStart(0, 0)], device, generators=[generator])

    def __call__(
        self, hidden_11D: torch.Tensor, first_11D: torch.Tensor, first: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The codes (G,) of a frame, the sum (1, 1, D) of the embeddings of all but the first, and whether all scores
        were finite."""
        parts = self._parts
        cache, read = DynamicCache(config=parts.model.config), torch.cat([hidden_11D, first_11D], dim=1)
        codes, total, finite = [first], torch.zeros_like(first_11D), []
        for table, head in zip(parts.model.codec_embedding, parts.lm_head, strict=True):
            given = parts.small_to_mtp_projection(read)
            made = parts.model(inputs_embeds=given, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
            scores_1V = head(made).float()
            finite.append(rows_are_finite(scores_1V))
            said_1N = first[None, :0]
            if codes[1:]:
                said_1N = torch.stack(codes[1:], dim=1)
            code = self._choose(said_1N, scores_1V).argmax(-1)
            read = table(code)[:, None]
            codes.append(code)
            total = total + read
        return torch.cat(codes), total, bool(torch.cat(finite).all())
