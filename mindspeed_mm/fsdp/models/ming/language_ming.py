"""The language model of Ming-Lite-Omni: Ling's layers (arXiv:2503.05139), whose router is another for tokens of text,
of pictures and videos, and of sounds (arXiv:2506.09344). Experts, norms and attention are transformers'.

Shapes: B rows of L tokens, T = B · L; H features, E experts, K of them for a token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2_5_VLTextModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    OutputRecorder,
    Qwen2MoeAttention,
    Qwen2MoeExperts,
    Qwen2MoeMLP,
    Qwen2MoeRMSNorm,
)
from typing_extensions import override

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.ming.configuration_ming import BailingMoeConfig

IMAGE, VIDEO, AUDIO = 1, 2, 3
"""What tokens stand for parts of, in `mm_token_type_ids`; 0: text."""


class ModalityRouter(nn.Module):
    """Chooses experts, by weights of the kind of each token. The preview's published code takes the pictures' weights
    for words between two pictures, too; here, as in version 1.5, each token goes by its own.

    Args:
        config: Of the language model. Without `multi_gate` all tokens are text.
    """

    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.top_k, self._sums_to_one = config.num_experts_per_tok, config.norm_topk_prob
        names = ("weight", "image_weight", "audio_weight") if config.multi_gate else ("weight",)
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(config.num_experts, config.hidden_size)))
        self._names = names

    def forward(
        self, hidden: torch.Tensor, kinds: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(T, H) → logits (T, E), weights (T, K) and numbers (T, K) of the chosen experts.

        Args:
            hidden: Tokens.
            kinds: (T,) as `mm_token_type_ids` has them; None: all are text.
        """
        of_all = torch.cat([self.get_parameter(name) for name in self._names])  # one product, whatever a batch holds
        logits_TGE = F.linear(hidden, of_all).unflatten(1, (len(self._names), -1))
        gates = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        if kinds is not None and len(self._names) > 1:
            gates = gates.masked_fill((kinds == IMAGE) | (kinds == VIDEO), 1).masked_fill(kinds == AUDIO, 2)
        logits = logits_TGE.gather(1, gates[:, None, None].expand(-1, 1, logits_TGE.shape[2])).squeeze(1)
        weights, numbers = logits.softmax(dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.top_k > 1 and self._sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), numbers


class BailingMoeBlock(nn.Module):
    """Routed experts, and the shared ones beside them.

    Args:
        config: Of the language model.
    """

    def __init__(self, config: BailingMoeConfig) -> None:
        super().__init__()
        self.gate, self.experts = ModalityRouter(config), Qwen2MoeExperts(config)
        self.shared_experts: nn.Module | None = None
        if config.num_shared_experts:
            self.shared_experts = Qwen2MoeMLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, hidden: torch.Tensor, kinds: torch.Tensor | None) -> torch.Tensor:
        """(B, L, H) → (B, L, H).

        Args:
            hidden: Tokens.
            kinds: (B, L) as `mm_token_type_ids` has them; None: all are text.
        """
        rows = hidden.flatten(0, 1)
        _, weights, numbers = self.gate(rows, None if kinds is None else kinds.flatten())
        routed = self.experts(rows, numbers, weights).view_as(hidden)
        if self.shared_experts is None:
            return routed
        return routed + self.shared_experts(hidden)


class BailingMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention and experts.

    Args:
        config: Of the language model.
        layer: Its number.
    """

    def __init__(self, config: BailingMoeConfig, layer: int) -> None:
        super().__init__()
        self.attention, self.mlp = Qwen2MoeAttention(config, layer), BailingMoeBlock(config)
        self.input_layernorm = Qwen2MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen2MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, mm_token_type_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """(B, L, H) → (B, L, H).

        Args:
            hidden_states: Tokens.
            mm_token_type_ids: (B, L) what each token stands for; None: all are text.
            kwargs: For the attention.
        """
        attended, _ = self.attention(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden = hidden_states + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden), mm_token_type_ids)


class BailingMoeModel(Qwen2_5_VLTextModel):
    """The language model without its head. Positions and masks are those of Qwen2.5-VL's, which makes them.

    Args:
        config: Of the language model.
    """

    config: BailingMoeConfig
    _no_split_modules: ClassVar[list[str]] = ["BailingMoeDecoderLayer"]
    _can_record_outputs: ClassVar[JsonObject] = {
        "router_logits": OutputRecorder(ModalityRouter, index=0),
        "hidden_states": BailingMoeDecoderLayer,
        "attentions": Qwen2MoeAttention,
    }

    def __init__(self, config: BailingMoeConfig) -> None:
        super(Qwen2_5_VLTextModel, self).__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BailingMoeDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = Qwen2MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen2_5_VLRotaryEmbedding(config=config)
        self.has_sliding_layers = False
        self.post_init()

    @override
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (Qwen2MoeExperts, ModalityRouter)):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=self.config.initializer_range)


class ColumnNormHead(nn.Module):
    """A head whose columns are brought to length 1 over the vocabulary before they are used, as the preview's are. The
    lengths are constants for the backward pass, as in the published code.

    Args:
        features: H.
        vocabulary: Tokens.
    """

    def __init__(self, features: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, H) → (…, vocabulary)."""
        lengths = self.weight.detach().norm(dim=0, keepdim=True) + 1e-7
        return F.linear(hidden, self.weight / lengths)
