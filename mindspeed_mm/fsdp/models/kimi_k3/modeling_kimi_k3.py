"""Kimi-K3: a text model of Kimi delta attention and latent attention, three layers to one, with experts in a narrow
space and attention over depth; in front of it MoonViT.

Blocks are those of transformers' Kimi Linear (arXiv:2510.26692) and Kimi-K2.5. What Kimi-K3 adds is written here from
its published formulas: attention residuals (arXiv:2603.15031), the activation SiTU, experts behind a projection, gates
behind attention. Modules have the released names but for what transformers' blocks name otherwise. Shapes: B rows, L
tokens, H features of the text model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, Kimi_K25ForConditionalGeneration
from transformers import initialization as init
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25Model, Kimi_K25PreTrainedModel
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
    eager_attention_forward,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs
from typing_extensions import override

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.kimi_k3.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from mindspeed_mm.fsdp.models.kimi_k3.delta_attention import KimiK3DeltaAttention
from mindspeed_mm.fsdp.models.kimi_k3.processing_kimi_k3 import KimiK3ImageProcessor, KimiK3Processor
from mindspeed_mm.fsdp.models.kimi_k3.released_names import conversion_rules
from mindspeed_mm.fsdp.models.kimi_k3.vision import KimiK3Projector, KimiK3VisionModel
from mindspeed_mm.fsdp.utils.register import model_register

PROCESSOR = KimiK3Processor
"""Of its folders, whose own is code."""
Blocks = tuple[torch.Tensor, ...]
"""(B, L, H) each: what layers of a finished block added up to; the first is what the layers began with."""

# --- what takes a token through a layer -------------------------------------------------------------------------------


def situ(gate: torch.Tensor, up: torch.Tensor, bound: float, linear_bound: float) -> torch.Tensor:
    """A gated linear unit in which both parts are bounded, in fp32: (β tanh(g / β) σ(g)) · (β' tanh(u / β')).

    Args:
        gate: g.
        up: u, of the same shape.
        bound: β.
        linear_bound: β'.
    """
    wide_gate, wide_up = gate.float(), up.float()
    gated = bound * torch.tanh(wide_gate / bound) * torch.sigmoid(wide_gate)
    return (gated * (linear_bound * torch.tanh(wide_up / linear_bound))).to(gate.dtype)


class KimiK3MLP(nn.Module):
    """A dense MLP, or the shared experts.

    Args:
        config: Of the text model.
        inner: Features between its layers.
    """

    def __init__(self, config: KimiK3TextConfig, inner: int) -> None:
        super().__init__()
        self.bounds = config.activation_situ_beta, config.activation_situ_linear_beta
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, H) → the same."""
        output: torch.Tensor = self.down_proj(situ(self.gate_proj(hidden), self.up_proj(hidden), *self.bounds))
        return output


@use_experts_implementation
class KimiK3Experts(nn.Module):
    """Routed experts, which work on fewer features than a token has.

    Args:
        config: Of the text model.
    """

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.num_experts, inner = config.num_local_experts, config.moe_intermediate_size
        self.hidden_dim, self.intermediate_dim = config.routed_expert_hidden_size, inner
        self.bounds = config.activation_situ_beta, config.activation_situ_linear_beta
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inner, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, inner))

    def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, dim=-1)
        return situ(gate, up, *self.bounds)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(tokens, features) → the same: expert by expert, where no other implementation is chosen."""
        output = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                inner = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
                made = F.linear(inner, self.down_proj[expert]) * top_k_weights[token, choice, None]
                output.index_add_(0, token, made.to(output.dtype))
        return output


class KimiK3MoE(nn.Module):
    """Routed experts between two projections, beside shared ones on all features. The router sees all features.

    Args:
        config: Of the text model.
    """

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__()
        self.gate = KimiLinearTopkRouter(config)
        self.experts = KimiK3Experts(config)
        self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.n_shared_experts)
        narrow = config.routed_expert_hidden_size
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.routed_expert_norm = KimiLinearRMSNorm(narrow, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(narrow, config.hidden_size, bias=False)

    def forward(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """(B, L, H) → the same."""
        _, weights, chosen = self.gate(hidden_BLH)
        routed = self.experts(self.routed_expert_down_proj(hidden_BLH).flatten(0, 1), chosen, weights)
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed)).view_as(hidden_BLH)
        output: torch.Tensor = routed + self.shared_experts(hidden_BLH)
        return output


class KimiK3Attention(KimiLinearAttention):  # type: ignore[misc]
    """Kimi Linear's latent attention, which knows no places, with a gate in front of the last projection.

    Args:
        config: Of the text model.
        layer_idx: Number of the layer.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, self.num_heads * self.v_head_dim, bias=False)

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, tokens = hidden_states.shape[:2]
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent, shared = self.kv_a_layernorm(latent)[:, None], shared[:, None]
        if past_key_values is not None:
            latent, shared = past_key_values.update(latent, shared, self.layer_idx)
        key, value = self.expand_kv(latent, shared)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        gate = torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output.reshape(rows, tokens, -1) * gate), weights


# --- attention over depth ---------------------------------------------------------------------------------------------


def over_depth(sources: Blocks, score: nn.Linear, norm: nn.Module) -> torch.Tensor:
    """(B, L, H): of each token the mean of its sources, weighted by a softmax of their scores, in fp32. A score is one
    product with the source at unit mean square.

    Args:
        sources: What the token was at several depths.
        score: One row.
        norm: Its weight scales what is scored, and not what is added up.
    """
    direction = norm.weight.float() * score.weight[0].float()  # type: ignore[operator]
    eps: float = norm.variance_epsilon  # type: ignore[assignment]
    scores = []
    for source in sources:
        wide = source.float()
        scores.append((wide * direction).sum(dim=-1) * torch.rsqrt(wide.pow(2).mean(dim=-1) + eps))
    shares = torch.stack(scores).softmax(dim=0)[..., None]
    mixed = sum(share * source.float() for share, source in zip(shares, sources, strict=True))
    return mixed.to(sources[0].dtype)  # type: ignore[union-attr]


class KimiK3DecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention and an MLP. Each of them sees a mean over depth; what they add goes to the sum of this block of layers.

    Args:
        config: Of the text model.
        layer_idx: Number of the layer.
    """

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_linear = config.layer_types[layer_idx] == "linear_attention"
        attention: Any = KimiK3Attention
        if self.is_linear:
            attention = KimiK3DeltaAttention
        self.self_attn = attention(config, layer_idx)
        if config.mlp_layer_types[layer_idx] == "sparse":
            self.block_sparse_moe = KimiK3MoE(config)
        else:
            self.mlp = KimiK3MLP(config, config.intermediate_size)
        self.begins_block = layer_idx % config.attn_res_block_size == 0
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            setattr(self, name, KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attention_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.mlp_res_proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(
        self,
        hidden_states: torch.Tensor,
        block_states: Blocks,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The sum of this block of layers so far, (B, L, H).

        Args:
            hidden_states: The sum up to here; in front of the first layer, the embeddings.
            block_states: Finished blocks; in front of a layer that begins one, `hidden_states` is the last of them.
            attention_mask: As this kind of layer takes it.
            past_key_values: Cache.
            kwargs: For the attention.
        """
        sources = block_states
        if not self.begins_block:
            sources = (*block_states, hidden_states)
        seen = over_depth(sources, self.self_attention_res_proj, self.self_attention_res_norm)
        cache = {"cache_params" if self.is_linear else "past_key_values": past_key_values}
        own = self.input_layernorm(seen)
        added = self.self_attn(hidden_states=own, attention_mask=attention_mask, **cache, **kwargs)
        if not self.is_linear:
            added = added[0]
        if not self.begins_block:  # else the sum of a new block begins with what this layer adds
            added = hidden_states + added
        hidden_states = added
        seen = over_depth((*block_states, hidden_states), self.mlp_res_proj, self.mlp_res_norm)
        normed = self.post_attention_layernorm(seen)
        if hasattr(self, "mlp"):
            return hidden_states + self.mlp(normed)  # type: ignore[no-any-return]
        return hidden_states + self.block_sparse_moe(normed)  # type: ignore[no-any-return]


# --- the text model ---------------------------------------------------------------------------------------------------


class KimiK3TextModel(KimiLinearPreTrainedModel):  # type: ignore[misc]
    """The text model without its head.

    Args:
        config: Its settings.
    """

    config: KimiK3TextConfig
    config_class = KimiK3TextConfig
    _no_split_modules: ClassVar[list[str]] = ["KimiK3DecoderLayer"]
    _supports_attention_backend = True
    _can_record_outputs: ClassVar[JsonObject] = {
        "router_logits": OutputRecorder(KimiLinearTopkRouter, index=0),
        "hidden_states": KimiK3DecoderLayer,
        "attentions": KimiK3Attention,
    }

    def __init__(self, config: KimiK3TextConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(KimiK3DecoderLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_attn_res_norm = KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, KimiK3Experts):
            for parameter in (module.gate_up_proj, module.down_proj):
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Hidden states (B, L, H) of tokens, or of their embeddings.

        Args:
            input_ids: (B, L).
            attention_mask: (B, L), 1 on real tokens; or a mask for each kind of layer.
            position_ids: (B, L). Layers know no places; borders of documents are read off these.
            past_key_values: Cache.
            inputs_embeds: (B, L, H) in place of tokens.
            use_cache: Whether the cache is filled.
            kwargs: For the layers.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0
            if past_key_values is not None:
                past = past_key_values.get_seq_length()
            position_ids = torch.arange(past, past + inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        masks = attention_mask
        if not isinstance(masks, dict):
            asked = {
                "config": self.config,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "past_key_values": past_key_values,
                "position_ids": position_ids,
            }
            masks = {
                "full_attention": create_causal_mask(**asked),
                "linear_attention": create_recurrent_attention_mask(**asked),
            }
        hidden = inputs_embeds
        blocks: Blocks = ()
        for number, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=False)):
            if number % self.config.attn_res_block_size == 0:
                blocks = (*blocks, hidden)
            hidden = layer(
                hidden,
                block_states=blocks,
                attention_mask=masks[kind],
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **kwargs,
            )
        hidden = over_depth((*blocks, hidden), self.output_attn_res_proj, self.output_attn_res_norm)
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden), past_key_values=past_key_values)


# --- the whole model --------------------------------------------------------------------------------------------------


class KimiK3Model(Kimi_K25Model):  # type: ignore[misc]
    """Tower, projector and text model.

    Args:
        config: Of the whole model.
    """

    config: KimiK3Config
    config_class = KimiK3Config
    _no_split_modules: ClassVar[list[str]] = ["Kimi_K25VisionEncoderLayer", "KimiK3DecoderLayer"]

    def __init__(self, config: KimiK3Config) -> None:
        Kimi_K25PreTrainedModel.__init__(self, config)
        self.vision_tower = KimiK3VisionModel._from_config(config.vision_config)
        self.language_model = KimiK3TextModel._from_config(config.text_config)
        self.mm_projector = KimiK3Projector(config)
        self.post_init()


@model_register.register("kimi_k3")
class KimiK3ForConditionalGeneration(Kimi_K25ForConditionalGeneration):  # type: ignore[misc]
    """The whole model with its head.

    Args:
        config: As released.
    """

    config: KimiK3Config
    config_class = KimiK3Config
    _is_stateful = True
    _no_split_modules: ClassVar[list[str]] = ["Kimi_K25VisionEncoderLayer", "KimiK3DecoderLayer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, config: KimiK3Config) -> None:
        Kimi_K25PreTrainedModel.__init__(self, config)
        self.model = KimiK3Model(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping

    AutoConfig.register(KimiK3Config.model_type, KimiK3Config, exist_ok=True)
    AutoModelForImageTextToText.register(KimiK3Config, KimiK3ForConditionalGeneration, exist_ok=True)
    AutoImageProcessor.register(KimiK3Config, fast_image_processor_class=KimiK3ImageProcessor, exist_ok=True)
    AutoProcessor.register(KimiK3Config, KimiK3Processor, exist_ok=True)
    register_checkpoint_conversion_mapping(KimiK3Config.model_type, conversion_rules(), overwrite=True)
