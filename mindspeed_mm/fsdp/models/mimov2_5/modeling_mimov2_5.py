"""MiMo-V2.5: the text model of MiMo-V2-Flash (arXiv:2601.02780) with a vision tower, an encoder of codes of sound, and
heads that predict further tokens.

Modules are named as the released weights are. Blocks of the text model are transformers'; queries, keys and values
come of one product, as released. Shapes: B rows, L tokens, H features of the text model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin, MiMoV2FlashConfig, MiMoV2FlashModel, Qwen2Model
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashAttention,
    MiMoV2FlashMLP,
    MiMoV2FlashPreTrainedModel,
    MiMoV2FlashRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from mindspeed_mm.fsdp.models.forward_arguments import kept_tokens
from mindspeed_mm.fsdp.models.mimov2_5.configuration_mimov2_5 import MiMoV2AudioConfig, MiMoV2Config
from mindspeed_mm.fsdp.models.mimov2_5.processing_mimov2_5 import MiMoV2Processor
from mindspeed_mm.fsdp.models.mimov2_5.vision import MiMoVisionTransformer
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

PROCESSOR = MiMoV2Processor
"""Of its folders, whose files name one of another family that neither hears nor tells times of frames."""
_MEDIA = ("pixel_values", "pixel_values_videos", "audio_codes")

# --- the text model ---------------------------------------------------------------------------------------------------


class MiMoV2Attention(MiMoV2FlashAttention):
    """MiMo-V2-Flash's, with one matrix for queries, keys and values.

    Args:
        config: Of the text model.
        layer_idx: Number of the layer.
    """

    def __init__(self, config: MiMoV2FlashConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self.widths = [part.out_features for part in parts]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.widths), bias=config.attention_bias)
        del self.q_proj, self.k_proj, self.v_proj

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = self.qkv_proj(hidden_states).split(self.widths, dim=-1)
        query, key = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k))
        # Values are scaled before they are cached.
        value = v.unflatten(-1, (-1, self.v_head_dim)).transpose(1, 2) * self.v_scale
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            s_aux=self.sinks,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights


class MiMoV2Model(MiMoV2FlashModel):
    """The text model without its head.

    Args:
        config: Its settings.
    """

    def __init__(self, config: MiMoV2FlashConfig) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = MiMoV2Attention(config, number)
        self.post_init()


class MiMoV2FurtherLayer(nn.Module):
    """One head for a further token: a layer with a window and a dense MLP, whatever the layers of the decoder are.

    Args:
        config: Of the text model.
        like: Number of a layer of the decoder that has a window.
    """

    def __init__(self, config: MiMoV2FlashConfig, like: int) -> None:
        super().__init__()
        norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
        for name in norms:
            setattr(self, name, MiMoV2FlashRMSNorm(config.hidden_size, config.rms_norm_eps))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = MiMoV2Attention(config, like)
        self.mlp = MiMoV2FlashMLP(config)

    def forward(self, ahead_BLH: torch.Tensor, hidden_BLH: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """(B, L, H) out of the embeddings of the tokens ahead, and what was made of the tokens up to here."""
        hidden = self.eh_proj(torch.cat([self.enorm(ahead_BLH), self.hnorm(hidden_BLH)], dim=-1))
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **arguments)[0]
        hidden = hidden + self.mlp(self.pre_mlp_layernorm(hidden))
        output: torch.Tensor = self.final_layernorm(hidden)
        return output


class MiMoV2FurtherHeads(nn.Module):
    """Heads for further tokens, each with all parts of its own.

    Args:
        config: Of the text model.
        depths: How many further tokens.
    """

    def __init__(self, config: MiMoV2FlashConfig, depths: int) -> None:
        super().__init__()
        like = config.layer_types.index("sliding_attention")
        self.layers = nn.ModuleList(MiMoV2FurtherLayer(config, like) for _ in range(depths))

    def forward(
        self, hidden_BLH: torch.Tensor, embeddings_BLH: torch.Tensor, **arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """(B, L, H) for each depth; arguments as `MultiTokenHeads` takes them."""
        found = []
        for layer in self.layers:
            # Each depth sees one token further; behind the last one stand zeros.
            embeddings_BLH = torch.cat([embeddings_BLH[:, 1:], torch.zeros_like(embeddings_BLH[:, :1])], dim=1)
            hidden_BLH = layer(embeddings_BLH, hidden_BLH, **arguments)
            found.append(hidden_BLH)
        return tuple(found)


# --- sound ------------------------------------------------------------------------------------------------------------


class MiMoLocalTransformer(Qwen2Model):
    """Qwen2's layers over the frames of a group, each of which sees all others.

    Args:
        config: Of a Qwen2 model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.embed_tokens  # codes have a table for each codebook instead

    @override
    def forward(self, frames_GND: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """(groups, frames, features) → the same."""
        places = torch.arange(frames_GND.shape[1], device=frames_GND.device)[None]
        turned = self.rotary_emb(frames_GND, places)
        for layer in self.layers:
            frames_GND = layer(frames_GND, position_embeddings=turned, attention_mask=None, is_causal=False)
        output: torch.Tensor = self.norm(frames_GND)
        return output


class MiMoAudioProjection(nn.Module):
    """The features of a group to those of a token.

    Args:
        width: Of a group.
        out: Of a token.
    """

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, out, bias=False)
        )

    def forward(self, groups: torch.Tensor) -> torch.Tensor:
        """(groups, width) → (groups, out)."""
        output: torch.Tensor = self.mlp(groups)
        return output


class MiMoAudioEncoder(nn.Module):
    """What stands behind the tables of codes.

    Args:
        config: Of sound.
    """

    def __init__(self, config: MiMoV2AudioConfig) -> None:
        super().__init__()
        self.input_local_transformer = MiMoLocalTransformer(config.local)
        self.projection = MiMoAudioProjection(config.input_local_dim * config.group_size, config.out_hidden_size)

    def forward(self, frames_GND: torch.Tensor) -> torch.Tensor:
        """(groups, frames, features) → (groups, H)."""
        output: torch.Tensor = self.projection(self.input_local_transformer(frames_GND).flatten(1))
        return output


# --- the whole model --------------------------------------------------------------------------------------------------


@model_register.register("mimo_v25")
class MiMoV2ForCausalLM(MiMoV2FlashPreTrainedModel, GenerationMixin):
    """The whole model.

    Args:
        config: As released.
    """

    config: MiMoV2Config
    config_class = MiMoV2Config
    main_input_name = "input_ids"
    needs_own_attention = True
    """Of transformers' attention functions `sdpa` knows no sinks."""
    _supports_flash_attn = False
    _no_split_modules: ClassVar[list[str]] = ["MiMoV2FlashDecoderLayer", "MiMoVisionBlock", "MiMoV2FurtherLayer"]
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^mtp\."]
    further_token_layers = "sliding_attention"
    """Kind of the decoder's layers whose arguments heads for further tokens are called with."""

    def __init__(self, config: MiMoV2Config) -> None:
        super().__init__(config)
        text, audio = config.text_config, config.audio_config
        self.model = MiMoV2Model._from_config(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.visual = MiMoVisionTransformer._from_config(config.vision_config)
        sizes = zip(audio.of_codebooks("speech_vocab_size"), audio.of_codebooks("speech_zeroemb_idx"), strict=True)
        self.speech_embeddings = nn.ModuleList(
            nn.Embedding(rows, audio.input_local_dim, padding_idx=empty) for rows, empty in sizes
        )
        self.audio_encoder = MiMoAudioEncoder(audio)
        self.post_init()

    @override
    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    @override
    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        """The text model without its head."""
        return self.model

    @override
    def set_attn_implementation(self, attn_implementation: object, *args: object, **kwargs: object) -> None:
        """Of the text model: towers are computed by our attention, whatever it is called by."""
        self.config._attn_implementation = attn_implementation
        self.model.set_attn_implementation(attn_implementation, *args, **kwargs)

    def further_token_heads(self, depths: int) -> nn.Module:
        """Heads for so many further tokens."""
        return MiMoV2FurtherHeads(self.config.text_config, depths)

    def get_towers(self) -> list[Tower]:
        """One merged square of patches, or one group of frames, is the least that a tower takes."""
        return [
            Tower("image", "visual", "pixel_values", "model", _run_idle_vision),
            Tower("video", "visual", "pixel_values_videos", "model", _run_idle_vision),
            Tower("audio", "audio_encoder", "audio_codes", "model", _run_idle_audio),
        ]

    def get_image_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor
    ) -> BaseModelOutputWithPooling:
        """What stands in the places of picture or video tokens: `pooler_output`, (tokens, H).

        Args:
            pixel_values: (patches, numbers) of all pictures.
            image_grid_thw: (pictures, 3) patches along time, height and width.
        """
        return BaseModelOutputWithPooling(pooler_output=self.visual(pixel_values, image_grid_thw))

    def get_audio_features(self, audio_codes: torch.Tensor) -> BaseModelOutputWithPooling:
        """What stands in the places of sound tokens: `pooler_output`, (groups, H).

        Args:
            audio_codes: (frames, codebooks); the frames of each sound fill whole groups.

        Raises:
            DataError: They are of fewer codebooks than the model has tables.
        """
        settings = self.config.audio_config
        if audio_codes.shape[1] < settings.audio_channels:
            raise DataError(
                f"a sound has codes of {audio_codes.shape[1]} codebooks, and the model has {settings.audio_channels}",
                key="model.model_name_or_path",
                way_out="Take config.json and audio_tokenizer of one version of the model.",
            )
        # (groups, frames of a group, codebooks): the sum over codebooks is what a frame is.
        codes_GNC = audio_codes[:, : settings.audio_channels].unflatten(0, (-1, settings.group_size))
        frames = torch.stack([table(codes_GNC[..., n]) for n, table in enumerate(self.speech_embeddings)]).sum(0)
        return BaseModelOutputWithPooling(pooler_output=self.audio_encoder(frames))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        audio_codes: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocabulary) of tokens (B, L).

        Args:
            input_ids: Tokens; those of media stand for one feature each.
            pixel_values: As of `get_image_features`.
            image_grid_thw: As of `get_image_features`.
            pixel_values_videos: The same of videos.
            video_grid_thw: The same of videos.
            audio_codes: As of `get_audio_features`.
            attention_mask: As transformers' text models take it; so are the remaining arguments.
            position_ids: Places of the tokens.
            past_key_values: Cache.
            inputs_embeds: In place of tokens, with media in them.
            labels: Tokens to predict, for the model's own loss.
            use_cache: Whether the cache is filled.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            kwargs: For the text model.
        """
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.get_input_embeddings()(input_ids)
            own = self.config
            for pixels, grids, token in (
                (pixel_values, image_grid_thw, own.image_token_id),
                (pixel_values_videos, video_grid_thw, own.video_token_id),
            ):
                if pixels is not None:
                    assert grids is not None
                    seen = self.get_image_features(pixels, grids).pooler_output
                    inputs_embeds = with_media(inputs_embeds, input_ids == token, seen)
            if audio_codes is not None:
                heard = self.get_audio_features(audio_codes).pooler_output
                inputs_embeds = with_media(inputs_embeds, input_ids == own.audio_token_id, heard)
        outputs = self.model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(outputs.last_hidden_state[:, kept_tokens(logits_to_keep)])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    @override
    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: object) -> dict[str, Any]:
        """Media are shown with the prompt, and not with the tokens that follow it."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if not kwargs.get("is_first_iteration") and kwargs.get("use_cache", True):
            inputs |= dict.fromkeys(_MEDIA)
        return inputs


def _run_idle_vision(model: Any) -> BaseModelOutputWithPooling:
    vision, device = model.config.vision_config, current_device()
    merge, numbers = vision.spatial_merge_size, vision.in_chans * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.zeros(merge * merge, numbers, device=device, dtype=model.visual.dtype)
    return model.get_image_features(pixels, torch.tensor([[1, merge, merge]], device=device))  # type: ignore[no-any-return]


def _run_idle_audio(model: Any) -> BaseModelOutputWithPooling:
    audio = model.config.audio_config
    codes = torch.zeros(audio.group_size, audio.audio_channels, device=current_device(), dtype=torch.long)
    return model.get_audio_features(codes)  # type: ignore[no-any-return]


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming

    AutoConfig.register(MiMoV2Config.model_type, MiMoV2Config, exist_ok=True)
    AutoModelForImageTextToText.register(MiMoV2Config, MiMoV2ForCausalLM, exist_ok=True)
    AutoProcessor.register(MiMoV2Config, MiMoV2Processor, exist_ok=True)
    rules = [*get_checkpoint_conversion_mapping("mimo_v2_flash"), WeightRenaming(r"^model\.mtp\.", "mtp.")]
    register_checkpoint_conversion_mapping(MiMoV2Config.model_type, rules, overwrite=True)
