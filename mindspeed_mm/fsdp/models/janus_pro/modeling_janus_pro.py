"""Janus-Pro (arXiv:2501.17811) trained to answer in words and in pictures.

A picture that the model sees goes through SigLIP; one that it draws is a row of codes of a VQ tokenizer, which have
embeddings, an aligner and a head of their own. transformers has all modules, and trains the words alone. Shapes: B rows
of L tokens, N drawn pictures of T codes each, M = N · T, H the width of the text model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, JanusConfig, JanusForConditionalGeneration
from transformers.models.janus.modeling_janus import JanusCausalLMOutputWithPast
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from mindspeed_mm.fsdp.models.forward_arguments import kept_tokens
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.register import model_register

_DECODER = "model.language_model"


@dataclass
class JanusProOutput(JanusCausalLMOutputWithPast):
    """Logits of words in `logits`, (B, L, vocabulary); those of codes beside them."""

    code_logits: torch.Tensor | None = None
    """(M, codes), each from the state in front of a code."""
    code_targets: torch.Tensor | None = None
    """(M,) int64 the codes themselves."""


def codes_of(vqmodel: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """The codes (N, T) int64 of pictures.

    A code is the entry of the code book nearest to a latent, both scaled to length 1 (`VectorQuantizer` of
    deepseek-ai/Janus, `codebook_l2_norm`); transformers' `encode` compares them unscaled.

    Args:
        vqmodel: `JanusVQVAE` of transformers.
        pixel_values: (N, 3, side, side) from -1 to 1.
    """
    # Not under no_grad: on a rank that sees nothing, the encoder's hooks first run the trained tower on zeros.
    book = vqmodel.quantize.embedding.weight
    latents = vqmodel.quant_conv(vqmodel.encoder(pixel_values.to(book.dtype)))
    likeness = F.normalize(latents, dim=1).flatten(2).transpose(1, 2) @ F.normalize(book, dim=1).T
    return likeness.argmax(dim=2)


@model_register.register("janus_pro")
class JanusProForConditionalGeneration(JanusForConditionalGeneration):
    """Janus with pictures in answers. The VQ tokenizer is frozen, as published.

    Args:
        config: As released.
    """

    draws_pictures = True

    def __init__(self, config: JanusConfig) -> None:
        super().__init__(config)
        self.model.vqmodel.requires_grad_(False)
        # Blocks of the tokenizer would be gathered one by one, and its code book is read without a call of its module.
        blocks: set[str] = set(attribute_at(self, "_no_split_modules", ()))
        self._no_split_modules = {name for name in blocks if not name.startswith("JanusVQVAE")}

    @property
    def picture_placeholder(self) -> int:
        """The token that stands for each place of a picture, seen or drawn."""
        return int(self.config.image_token_id)

    def get_towers(self) -> list[Tower]:
        """SigLIP, and the tokenizer with the embedding, aligner and head of codes."""
        return [
            Tower("image", "model.vision_model", "pixel_values", _DECODER, _see_nothing),
            Tower("drawn image", "model.vqmodel.encoder", "drawn_pixel_values", _DECODER, _draw_nothing),
        ]

    def get_cut_points(self) -> Any:
        """Refuse a pipeline: codes come from the first stage's pictures, and their loss is on the last one.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be cut into stages: the first one has the codes that the last one predicts",
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1; or leave model.model_id out, to train on answers in words.",
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        drawn_pixel_values: torch.Tensor | None = None,
        drawn_places: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> JanusProOutput:
        """Logits of words and of codes.

        Args:
            input_ids: (B, L), with a placeholder for each place of a picture.
            pixel_values: Pictures that are seen, in order of place.
            drawn_pixel_values: (N, 3, side, side) from -1 to 1, pictures that are drawn, in order of place.
            drawn_places: (M,) places of their codes in the flattened rows. No row begins with one.
            attention_mask: (B, L), 1 on real tokens.
            position_ids: (B, L).
            past_key_values: Cache.
            inputs_embeds: In place of tokens.
            use_cache: Whether the cache is filled.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            kwargs: What attention takes.

        Raises:
            KeyError: There are drawn pictures without `drawn_places`, which the loss adds.
        """
        if drawn_pixel_values is not None and drawn_places is None:
            raise KeyError("drawn_places")
        codes_M = None
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if pixel_values is not None:
                seen = self.model.get_image_features(pixel_values, return_dict=True).pooler_output
                is_seen = input_ids.eq(self.picture_placeholder).flatten()
                if drawn_places is not None:
                    # Places of drawn pictures have the same token.
                    is_seen = is_seen.index_fill(0, drawn_places, value=False)
                inputs_embeds = with_media(inputs_embeds, is_seen.view(*input_ids.shape), seen)
            if drawn_pixel_values is not None and drawn_places is not None:
                codes_M = codes_of(self.model.vqmodel, drawn_pixel_values).flatten()
                drawn = self.prepare_embeddings_for_image_generation(codes_M).to(inputs_embeds.dtype)
                flat = inputs_embeds.flatten(0, 1).index_copy(0, drawn_places, drawn)
                inputs_embeds = flat.view_as(inputs_embeds)
        outputs = self.model.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        output = JanusProOutput(
            logits=self.lm_head(hidden[:, kept_tokens(logits_to_keep)]), past_key_values=outputs.past_key_values
        )
        if codes_M is not None and drawn_places is not None:
            in_front = hidden.flatten(0, 1).index_select(0, drawn_places - 1)
            output.code_logits, output.code_targets = self.model.generation_head(in_front), codes_M
        return output

    @override
    def generate(self, *args: object, **kwargs: object) -> Any:
        if kwargs.get("generation_mode") == "image":
            return super().generate(*args, **kwargs)
        return GenerationMixin.generate(self, *args, **{"guidance_scale": None, **kwargs})


def _zeros(whole: Any, dtype: torch.dtype) -> torch.Tensor:
    vision = whole.config.vision_config
    return torch.zeros(1, vision.num_channels, *[vision.image_size] * 2, device=current_device(), dtype=dtype)


def _see_nothing(whole: nn.Module) -> torch.Tensor:
    model: Any = whole.get_submodule("model")
    pixels = _zeros(whole, model.vision_model.dtype)
    features: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
    return features


def _draw_nothing(whole: nn.Module) -> list[torch.Tensor]:
    model: Any = whole
    codes = codes_of(model.model.vqmodel, _zeros(whole, model.model.vqmodel.dtype))
    embeds = model.prepare_embeddings_for_image_generation(codes)
    return [embeds, model.model.generation_head(embeds)]
