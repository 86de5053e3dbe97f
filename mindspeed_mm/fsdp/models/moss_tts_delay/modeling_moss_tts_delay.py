"""MOSS-TTS with a delay pattern (`moss_tts_delay` of the MOSS-TTS repository): a Qwen3 that reads, at each place, a
token of text and a code of each codebook, and predicts the next of all of them by a head each.

Codebook g stands g places behind the first, so that a frame's codes follow one another. Modules are named as the
released weights are. Shapes: B rows of L places, G codebooks of C codes, M places that codes are predicted at, H of
Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, Qwen3Model
from transformers.modeling_outputs import CausalLMOutputWithPast

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.fsdp.models.moss_tts_delay.configuration_moss_tts_delay import MossTTSDelayConfig
from mindspeed_mm.fsdp.ops.linear_cross_entropy import wide_dtype
from mindspeed_mm.fsdp.utils.register import model_register


@dataclass
class DelayedOutput(CausalLMOutputWithPast):
    """Logits of text in `logits`, (B, L, vocabulary); those of the codebooks beside them."""

    code_logits: torch.Tensor | None = None
    """(M, G, C)."""


@model_register.register("moss_tts_delay")
class MossTTSDelayModel(PreTrainedModel):
    """Qwen3 between tables and heads of text and of every codebook.

    Args:
        config: Sizes and marks.
    """

    config_class = MossTTSDelayConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["Qwen3DecoderLayer"]
    code_heads = "lm_heads"
    """Heads of codebooks are in this list, behind that of text."""

    def __init__(self, config: MossTTSDelayConfig) -> None:
        super().__init__(config)
        language, rows = config.language_config, config.audio_vocab_size + 1
        self.language_model = Qwen3Model(language)
        self.emb_ext = nn.ModuleList(nn.Embedding(rows, language.hidden_size) for _ in range(config.n_vq))
        sizes = [language.vocab_size] + [rows] * config.n_vq
        self.lm_heads = nn.ModuleList(nn.Linear(language.hidden_size, size, bias=False) for size in sizes)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of text; codes have tables of their own, `emb_ext`."""
        return self.language_model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """The head of text; those of codebooks follow it in `lm_heads`."""
        return self.lm_heads[0]

    def get_decoder(self) -> nn.Module:
        """Return Qwen3 itself, which takes what places stand for through the layers."""
        return self.language_model

    def embed(self, input_ids: torch.Tensor, codec_ids: torch.Tensor) -> torch.Tensor:
        """What each place stands for, (B, L, H): its text, and a row of every codebook's table.

        Args:
            input_ids: (B, L) of text.
            codec_ids: (B, L, G) codes, negative where there is none.
        """
        embeds: torch.Tensor = self.language_model.embed_tokens(input_ids)
        codes_BLG = codec_ids.where(codec_ids >= 0, self.config.audio_pad_code)
        for table, codes_BL in zip(self.emb_ext, codes_BLG.unbind(-1), strict=True):
            embeds = embeds + table(codes_BL)
        return embeds

    def code_logits_at(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """(M, G, C) of hidden states: a score for every code, and none for the row that stands for no code."""
        return torch.stack([head(hidden_MH)[:, :-1] for head in self.lm_heads[1:]], dim=1)

    def forward(
        self,
        input_ids: torch.Tensor,
        codec_ids: torch.Tensor,
        code_places: torch.Tensor | None = None,
        code_targets: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> DelayedOutput:
        """Logits of what follows each place.

        Args:
            input_ids: (B, L) of text.
            codec_ids: (B, L, G) codes under the delay pattern, negative where there is none.
            code_places: (M,) places, in the flattened rows, whose codes are predicted; None: all places.
            code_targets: (M, G) the codes that follow them, -100 where none is trained; for the model's own loss.
            attention_mask: (B, L), 1 on real places.
            position_ids: (B, L).
            past_key_values: A cache.
            labels: (B, L) of text, not shifted; for the model's own loss, the mean over text and codebooks of the mean
                of each.
            use_cache: Whether to hand a cache on.
            kwargs: For attention.
        """
        made = self.language_model(
            inputs_embeds=self.embed(input_ids, codec_ids),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_MH = made.last_hidden_state.flatten(0, 1)
        if code_places is not None:
            hidden_MH = hidden_MH.index_select(0, code_places)
        output = DelayedOutput(
            logits=self.lm_heads[0](made.last_hidden_state),
            past_key_values=made.past_key_values,
            code_logits=self.code_logits_at(hidden_MH),
        )
        if labels is not None and code_targets is not None:
            output.loss = _own_loss(output, labels, code_targets)
        return output


def _own_loss(output: DelayedOutput, labels: torch.Tensor, targets_MG: torch.Tensor) -> torch.Tensor:
    """The published loss of a micro-batch: every head's mean, and the mean of these."""
    assert output.logits is not None and output.code_logits is not None
    pairs = [(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())]
    pairs += zip(output.code_logits.unbind(1), targets_MG.unbind(1), strict=True)
    means = []
    for logits, targets in pairs:
        total = F.cross_entropy(
            logits.to(wide_dtype(logits.dtype)), targets, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        means.append(total / (targets != IGNORED_LABEL).sum().clamp(min=1))
    return torch.stack(means).mean()


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.register(MossTTSDelayConfig.model_type, MossTTSDelayConfig, exist_ok=True)
    AutoModelForCausalLM.register(MossTTSDelayConfig, MossTTSDelayModel, exist_ok=True)
