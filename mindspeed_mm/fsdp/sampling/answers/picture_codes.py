"""Pictures that Janus draws: codes one after the other under classifier-free guidance, and their pixels.

Source of the rule: `generate` of deepseek-ai/Janus `generation_inference.py`. With guidance w, a code is chosen by

    scores = plain + w · (asked − plain)

where `plain` are the scores behind a prompt whose tokens, but for the first and the last, are padding. Shapes: L tokens
of the prompt, T codes of a picture, V codes in the book.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.sampling.answers.choosing import check_temperature
from mindspeed_mm.fsdp.sampling.finite import not_finite, rows_are_finite
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

GUIDANCE, TEMPERATURE = 5.0, 1.0
"""As published."""
MOST_GUIDANCE = 1000
"""Far above it the scores of the prompt are lost, and in the end they overflow."""
_PARTS = ("vqmodel.decoder", "generation_embeddings", "generation_aligner", "generation_head")


@dataclass(frozen=True)
class CodeChoice:
    """The settings by which the next code of a picture is chosen from its scores."""

    guidance: float = GUIDANCE
    """1: by the scores of the prompt alone."""
    temperature: float = TEMPERATURE
    """0: the likeliest code, always."""
    top_k: int = 0
    """0: of all codes."""
    top_p: float = 1.0
    seed: int = 0

    def next_code(self, scores_1V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The code (1,) that comes next."""
        if self.temperature == 0:
            return scores_1V.argmax(dim=-1)
        from transformers import TopKLogitsWarper, TopPLogitsWarper  # seconds

        scores_1V = scores_1V / self.temperature
        nothing: Any = None
        if self.top_k:
            scores_1V = TopKLogitsWarper(min(self.top_k, scores_1V.shape[1]))(nothing, scores_1V)
        if self.top_p < 1:
            scores_1V = TopPLogitsWarper(self.top_p)(nothing, scores_1V)
        return torch.multinomial(scores_1V.softmax(dim=-1), 1, generator=generator).squeeze(1)


def can_draw(model: object) -> bool:
    """Whether a model has codes of pictures, with a head that predicts them and a decoder that shows them."""
    return all(attribute_at(model, f"model.{part}") is not None for part in _PARTS)


def draw_codes(model: Any, prompt: Mapping[str, torch.Tensor], choice: CodeChoice, pad_id: int) -> torch.Tensor:
    """The codes (1, T) int64 of the picture that a prompt asks for.

    Args:
        model: `JanusForConditionalGeneration` of transformers, or a class of its kind.
        prompt: `input_ids` (1, L), which end with the mark that begins a picture, and `pixel_values` of pictures that
            the prompt shows, if any.
        choice: How codes are chosen.
        pad_id: The token that hides the prompt from guidance.

    Raises:
        NotFiniteError: Scores are not finite.
    """
    ids_1L = prompt["input_ids"]
    embeds = [_shown(model, ids_1L, prompt.get("pixel_values"))]
    if choice.guidance != 1:
        hidden = ids_1L.clone()
        # The first token stays, and the mark that begins a picture.
        hidden[:, 1:-1] = pad_id
        embeds.append(model.get_input_embeddings()(hidden))
    generator = torch.Generator(ids_1L.device).manual_seed(choice.seed)
    inputs_embeds, cache, codes = torch.cat(embeds), None, []
    is_good = torch.ones((), dtype=torch.bool, device=ids_1L.device)
    for _ in range(model.config.vision_config.num_image_tokens):
        made = model.model.language_model(inputs_embeds=inputs_embeds, past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        scores = model.model.generation_head(made.last_hidden_state[:, -1]).float()
        asked, plain = scores[:1], scores[1:]
        if len(plain):
            asked = plain + choice.guidance * (asked - plain)
        is_good &= rows_are_finite(asked).all()
        # Without NaN, which multinomial refuses at once: the error below names the cause.
        code = choice.next_code(asked.nan_to_num(), generator)
        codes.append(code)
        inputs_embeds = model.prepare_embeddings_for_image_generation(code.expand(len(embeds))[:, None])
    if not is_good:
        raise not_finite("the scores of the picture's codes", {"": model})
    return torch.stack(codes, dim=1)


def pixels_of(model: Any, codes: torch.Tensor) -> torch.Tensor:
    """(N, side, side, 3) uint8 of codes (N, T).

    Raises:
        NotFiniteError: The decoder's numbers are not finite.
    """
    decoded = model.model.vqmodel.decode(codes).float()
    if not decoded.isfinite().all():
        raise not_finite("the pixels of the picture", {"": model})
    # (N, 3, side, side) from -1 to 1 → (N, side, side, 3) bytes
    return ((decoded + 1) * 127.5).clamp(0, 255).byte().permute(0, 2, 3, 1)


def _shown(model: Any, ids_1L: torch.Tensor, pixels: torch.Tensor | None) -> torch.Tensor:
    """(1, L, H) what stands for a prompt and its pictures."""
    embeds: torch.Tensor = model.get_input_embeddings()(ids_1L)
    if pixels is None:
        return embeds
    features = model.model.get_image_features(pixels.to(embeds.dtype), return_dict=True).pooler_output
    places = (ids_1L == model.config.image_token_id)[..., None]
    return embeds.masked_scatter(places, features.to(embeds.dtype))


def choice_of(
    *, guidance: float | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> CodeChoice:
    """What is given, else as published.

    Raises:
        UsageError: Guidance is below 1 or so large that scores overflow, or the temperature is too small.
    """
    if guidance is not None and guidance < 1:
        way_out = "1 switches guidance off, the published weight is 5."
        raise UsageError(f"{guidance:g} is below 1", key="--guidance-scale", way_out=way_out)
    if guidance is not None and guidance > MOST_GUIDANCE:
        way_out = f"Give up to {MOST_GUIDANCE:,}; the published weight is 5."
        raise UsageError(f"{guidance:g} is too large", key="--guidance-scale", way_out=way_out)
    check_temperature(temperature, "code")
    return CodeChoice(
        guidance=GUIDANCE if guidance is None else guidance,
        temperature=TEMPERATURE if temperature is None else temperature,
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        seed=seed or 0,
    )
