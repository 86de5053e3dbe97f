"""CosyVoice3's language model (Du et al. 2025, arXiv 2505.17589): a Qwen2 that goes on from text with speech tokens.

Text and speech share one sequence. Ids from 0 are Qwen2's text; from `llm_config.vocab_size` on they are rows of the
speech embedding: `speech_token_size` tokens of the codec, then those that mark places (`Mark`). The head tells speech
rows only, so labels count from the first of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from mindspeed_mm.core.json_file import JsonObject


class Mark(IntEnum):
    """Speech rows behind those of the codec."""

    START = 0
    END = 1
    SPEECH_FOLLOWS = 2
    """Stands between the whole of the text, or the rest of it, and its speech."""
    TEXT_FOLLOWS = 3
    """Is to be predicted where speech has used up the text that there was so far; it never stands in a sequence."""


class CosyVoice3Config(PretrainedConfig):
    """What `config.json` holds.

    Args:
        llm_config: Of Qwen2.
        speech_token_size: Tokens of the codec.
        extra_speech_rows: Rows behind them, of which `Mark` uses the first.
        mix_ratio: Tokens of text and of speech that take turns where they are mixed.
        kwargs: As for every model of transformers.
    """

    model_type = "cosyvoice3"
    sub_configs: ClassVar[JsonObject] = {"llm_config": Qwen2Config}

    def __init__(
        self,
        llm_config: Qwen2Config | Mapping[str, object] | None = None,
        speech_token_size: int = 6561,
        extra_speech_rows: int = 200,
        mix_ratio: tuple[int, int] | list[int] = (5, 15),
        **kwargs: Any,
    ) -> None:
        given = llm_config if isinstance(llm_config, Qwen2Config) else Qwen2Config(**(llm_config or {}))
        self.llm_config: Any = given
        self.speech_token_size, self.extra_speech_rows = speech_token_size, extra_speech_rows
        self.mix_ratio = list(mix_ratio)
        kwargs.setdefault("tie_word_embeddings", given.tie_word_embeddings)
        super().__init__(**kwargs)

    @property
    def speech_rows(self) -> int:
        """Of the speech embedding and of the head."""
        return self.speech_token_size + self.extra_speech_rows

    def get_text_config(self, *args: object, **kwargs: object) -> Qwen2Config:
        """That of Qwen2, which has the sizes of the layers."""
        return self.llm_config


class CosyVoice3LM(PreTrainedModel):
    """Qwen2 with an embedding and a head for speech. The names of its parameters are those of the released model.

    Args:
        config: Sizes.
    """

    config_class = CosyVoice3Config
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _no_split_modules = ["Qwen2DecoderLayer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"llm.model.lm_head.weight": "llm.model.model.embed_tokens.weight"}
    """Of the text, which nothing predicts; the released weights have both. Speech has a head of its own."""

    def __init__(self, config: CosyVoice3Config) -> None:
        super().__init__(config)
        self.llm = nn.Module()
        self.llm.model = Qwen2ForCausalLM(config.llm_config)
        width = config.llm_config.hidden_size
        self.speech_embedding = nn.Embedding(config.speech_rows, width)
        self.llm_decoder = nn.Linear(width, config.speech_rows, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of text; speech tokens have another one, `speech_embedding`."""
        return self.llm.model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, whose logits are over speech tokens only."""
        return self.llm_decoder

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(B, L) ids of text and speech → (B, L, D)."""
        first_speech = self.config.llm_config.vocab_size
        is_speech = input_ids >= first_speech
        # Both tables are read at every place, at row 0 where an id is the other's; `where` drops that.
        text_BLD = self.llm.model.model.embed_tokens(input_ids.masked_fill(is_speech, 0))
        speech_BLD = self.speech_embedding((input_ids - first_speech).clamp(min=0))
        return torch.where(is_speech[..., None], speech_BLD, text_BLD)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the speech rows, (B, L, `speech_rows`).

        Args:
            input_ids: (B, L) of text and speech.
            attention_mask: (B, L), 1 on real tokens.
            position_ids: (B, L).
            kwargs: As Qwen2 takes them.
        """
        made = self.llm.model.model(
            inputs_embeds=self.embed(input_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        return CausalLMOutputWithPast(
            logits=self.llm_decoder(made.last_hidden_state), past_key_values=made.past_key_values
        )
