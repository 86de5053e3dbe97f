"""Chameleon as Lumina-mGPT trains it (arXiv:2408.02657): a picture is a row of tokens of the vocabulary, and may be an
answer. transformers' class gives these tokens no probability."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ChameleonForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.utils.register import model_register


@model_register.register("lumina_mgpt")
class LuminaMGPTForConditionalGeneration(ChameleonForConditionalGeneration):
    """Chameleon whose head tells the tokens of pictures as it tells words."""

    tells_pictures = True

    @property
    def picture_placeholder(self) -> int:
        """The token that stands for one of a picture until the encoder has said which."""
        return int(self.model.vocabulary_mapping.image_token_id)

    def picture_tokens(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(pictures, tokens) int64 of pictures (pictures, 3, height, width)."""
        return self.model.get_image_tokens(pixel_values)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As transformers', but that no logits are taken out.

        Args:
            input_ids: (B, L).
            pixel_values: (pictures, 3, height, width), in the order of their placeholders.
            attention_mask: (B, L), 1 on real tokens.
            position_ids: (B, L).
            kwargs: What attention takes, and a cache.
        """
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    def get_cut_points(self) -> Any:
        """None: labels are told by the encoder on the first stage, and the last one needs them.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot be cut into stages: the first one says what the labels of the last one are",
            key="parallel.pipeline_parallel_size",
            way_out="Set it to 1.",
        )
