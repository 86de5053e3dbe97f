"""DeepSeek-VL2 (arXiv:2412.10302): pictures in tiles through a SigLIP tower and a projector into a DeepSeek language
model with routed experts.

Modules are named as the released weights are. Blocks of the tower and the whole text model are transformers'; what is
written here is what stands between them. Shapes: N tiles, P patches along a side of a tile, S tokens along it behind
the projector, V features of the tower, H of the text model.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoModel, DeepseekOcr2TextModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer
from typing_extensions import override

from mindspeed_mm.fsdp.models.behaviour.shared_media import with_media
from mindspeed_mm.fsdp.models.deepseek_vl2.configuration_deepseek_vl2 import (
    DeepseekVLV2Config,
    DeepseekVLV2VisionConfig,
)
from mindspeed_mm.fsdp.models.deepseek_vl2.processing_deepseek_vl2 import DeepseekVLV2Processor
from mindspeed_mm.fsdp.models.forward_arguments import kept_tokens
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

IMAGE = 1
"""The number of picture tokens in `mm_token_type_ids`."""


class _Parts(PreTrainedModel):
    """What the tower and the whole model have in common."""

    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = [
        "SiglipEncoderLayer",
        "DeepseekV2DecoderLayer",
        "DeepseekV3DecoderLayer",
        "DeepseekOcr2TextDecoderLayer",
    ]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _OWN):  # what they hold beside their modules: places, marks, the latent
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


class DeepseekVLV2Vision(_Parts):
    """SigLIP without pooling.

    Args:
        config: Of the tower.
    """

    config: DeepseekVLV2VisionConfig
    main_input_name = "pixel_values"

    def __init__(self, config: DeepseekVLV2VisionConfig) -> None:
        super().__init__(config)
        patch = config.patch_size
        convolution = nn.Conv2d(config.num_channels, config.width, kernel_size=patch, stride=patch)
        self.patch_embed = nn.ModuleDict({"proj": convolution})
        self.pos_embed = nn.Parameter(torch.empty(1, config.patches**2, config.width))
        self.blocks = nn.ModuleList(SiglipEncoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attn_pool = UnusedPool(config)
        self.post_init()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(N, channels, side, side) pixels → (N, P², V)."""
        patches = self.patch_embed["proj"](pixel_values.to(self.pos_embed.dtype))
        hidden = patches.flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None)
        return self.norm(hidden)


class UnusedPool(nn.Module):
    """SigLIP's pooling, which the release keeps and the model does not use: it is loaded and exported, never called.

    Args:
        config: Of the tower.
    """

    def __init__(self, config: DeepseekVLV2VisionConfig) -> None:
        super().__init__()
        width, inner = config.width, config.intermediate_size
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q, self.kv, self.proj = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})


class DeepseekVLV2TextModel(DeepseekOcr2TextModel):
    """DeepSeek-V2 with plain multi-head attention. Under a name of its own it has its own rules for stored weights."""


class Projector(nn.Module):
    """Joins squares of neighbouring patches and takes them to the width of the text model.

    Args:
        input_dim: V.
        n_embed: H.
        depth: Linear layers.
        mlp_ratio: Features between them, in H.
        downsample_ratio: Side of a square, in patches.
    """

    def __init__(
        self, *, input_dim: int, n_embed: int, depth: int, mlp_ratio: int, downsample_ratio: int, **_: Any
    ) -> None:
        super().__init__()
        self.square = downsample_ratio
        widths = [input_dim * downsample_ratio**2, *[n_embed * mlp_ratio] * (depth - 1), n_embed]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.GELU(), nn.Linear(before, after)]
        self.layers = nn.Sequential(*layers[1:])  # no activation in front of the first one

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(N, P², V) → (N, S, S, H). Zeros fill up a side that the squares do not divide."""
        side = round(patches.shape[1] ** 0.5)
        grid = patches.transpose(1, 2).unflatten(2, (side, side))  # (N, V, P, P)
        short = -side % self.square
        grid = nn.functional.pad(grid, (0, short, 0, short))
        # A square's features lie channel by channel, as `torch.nn.functional.unfold` lays them.
        squares = nn.functional.pixel_unshuffle(grid, self.square)  # (N, V · square², S, S)
        return self.layers(squares.permute(0, 2, 3, 1))


class AnswersPictures:
    """The end of a model that answers in text what it is asked of pictures; stands in front of GenerationMixin."""

    def answered(
        self, outputs: Any, labels: torch.Tensor | None, logits_to_keep: int | torch.Tensor, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocabulary), and the model's own loss where `labels` are given, from what the text model made.

        Args:
            outputs: Of the text model, with `last_hidden_state` (B, L, H).
            labels: Tokens to predict (B, L).
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            kwargs: For the loss.
        """
        model: Any = self
        logits = model.get_output_embeddings()(outputs.last_hidden_state[:, kept_tokens(logits_to_keep)])
        loss = None
        if labels is not None:
            loss = model.loss_function(logits, labels, logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: object) -> dict[str, Any]:
        """Pictures are shown with the prompt, and not with the tokens that follow it."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]
        if not kwargs.get("is_first_iteration", True) and kwargs.get("use_cache", True):
            inputs["pixel_values"] = None
        return inputs


@model_register.register("deepseek_vl2")
class DeepseekVLV2ForCausalLM(_Parts, AnswersPictures, GenerationMixin):
    """The whole model.

    Args:
        config: As released.
    """

    config: DeepseekVLV2Config
    config_class = DeepseekVLV2Config
    main_input_name = "input_ids"

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__(config)
        text = config.language_config
        self.vision = DeepseekVLV2Vision(config.vision_config)
        self.projector = Projector(**config.projector_config)
        self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
        self.view_seperator = nn.Parameter(torch.empty(text.hidden_size))  # spelled so in the release
        head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.language = nn.ModuleDict({"model": _decoder(text), "lm_head": head})
        self.post_init()

    @override
    def get_input_embeddings(self) -> nn.Module:
        return self.get_decoder().embed_tokens  # type: ignore[return-value]

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        self.get_decoder().embed_tokens = value

    @override
    def get_output_embeddings(self) -> nn.Module:
        return self.language["lm_head"]

    def get_decoder(self) -> nn.Module:
        """The text model without its head."""
        return self.language["model"]

    def get_towers(self) -> list[Tower]:
        """The SigLIP tower; one tile and the same as a whole picture are the least it sees."""
        return [Tower("image", "vision", "pixel_values", "language.model", _run_idle)]

    def get_image_features(self, pixel_values: torch.Tensor, images_spatial_crop: torch.Tensor) -> torch.Tensor:
        """What stands in the places of picture tokens.

        Args:
            pixel_values: (N, channels, side, side); of each picture the whole, then its tiles row by row.
            images_spatial_crop: (pictures, 2) tiles along the width, and along the height.

        Returns:
            (tokens, H), picture by picture: rows of patches, each with `image_newline` at its end; between the
            whole picture and the tiles, joined to one, stands `view_seperator`.
        """
        features = self.projector(self.vision(pixel_values))
        written: list[torch.Tensor] = []
        at = 0
        for across, down in host_values(images_spatial_crop):
            tiles = features[at + 1 : at + 1 + across * down].unflatten(0, (down, across))
            joined = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (down · S, across · S, H)
            views = [self._with_line_ends(features[at]), self.view_seperator[None], self._with_line_ends(joined)]
            if self.config.global_view_pos == "tail":
                views.reverse()
            written += views
            at += 1 + across * down
        return torch.cat(written)

    def _with_line_ends(self, grid: torch.Tensor) -> torch.Tensor:
        ends = self.image_newline.expand(len(grid), 1, -1)
        return torch.cat([grid, ends], dim=1).flatten(0, 1)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        images_spatial_crop: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
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
            input_ids: Tokens.
            pixel_values: As of `get_image_features`, of all pictures of the batch.
            images_spatial_crop: As of `get_image_features`.
            mm_token_type_ids: (B, L), 1 where a token stands for a part of a picture.
            attention_mask: As transformers' text models take it; so are the remaining arguments.
            position_ids: Places of the tokens.
            past_key_values: Cache.
            inputs_embeds: In place of tokens.
            labels: Tokens to predict, for the model's own loss.
            use_cache: Whether the cache is filled.
            logits_to_keep: How many of the last tokens have logits, or which; 0: all.
            kwargs: For the text model.
        """
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            assert images_spatial_crop is not None and mm_token_type_ids is not None
            features = self.get_image_features(pixel_values, images_spatial_crop)
            inputs_embeds = with_media(inputs_embeds, mm_token_type_ids == IMAGE, features)
        outputs = self.get_decoder()(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return self.answered(outputs, labels, logits_to_keep, **kwargs)


def _decoder(config: Any) -> nn.Module:
    if config.model_type == "deepseek_ocr2_text":
        return DeepseekVLV2TextModel._from_config(config)
    return AutoModel.from_config(config)


_OWN = (DeepseekVLV2Vision, UnusedPool, DeepseekVLV2ForCausalLM)


def _run_idle(model: Any) -> torch.Tensor:
    vision, device = model.config.vision_config, current_device()
    pixels = torch.zeros(2, vision.num_channels, *[vision.image_size] * 2, device=device, dtype=model.vision.dtype)
    return model.get_image_features(pixels, torch.ones(1, 2, dtype=torch.long, device=device))


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    AutoConfig.register(DeepseekVLV2Config.model_type, DeepseekVLV2Config, exist_ok=True)
    AutoModelForImageTextToText.register(DeepseekVLV2Config, DeepseekVLV2ForCausalLM, exist_ok=True)
    AutoProcessor.register(DeepseekVLV2Config, DeepseekVLV2Processor, exist_ok=True)
    block = r"blocks\.(\d+)\."
    rules = [
        WeightRenaming(rf"{block}norm1\.", r"blocks.\1.layer_norm1."),
        WeightRenaming(rf"{block}norm2\.", r"blocks.\1.layer_norm2."),
        WeightRenaming(rf"{block}attn\.proj\.", r"blocks.\1.self_attn.out_proj."),
    ]
    for kind in ("weight", "bias"):
        parts = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
        rules.append(WeightConverter(f"attn.qkv.{kind}", parts, operations=[Chunk(dim=0)]))
    register_checkpoint_conversion_mapping(DeepseekVLV2Vision.__name__, rules, overwrite=True)
    experts = get_checkpoint_conversion_mapping("deepseek_v2")
    register_checkpoint_conversion_mapping(DeepseekVLV2TextModel.__name__, experts, overwrite=True)
