"""Kimi-VL (arXiv:2504.07491): MoonViT, which sees pictures in their own size, in front of a DeepSeek-V3 text model.

transformers' Kimi-K2.5 has the same tower, which sees videos as well: of one frame it adds nothing for time. What is
written here is how Kimi-VL's released settings and weights are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

from mindspeed_mm.fsdp.models.kimi_vl.processing_kimi_vl import KimiVLImageProcessor, KimiVLProcessor
from mindspeed_mm.fsdp.utils.register import model_register

_TEXT_DEFAULTS = {"num_nextn_predict_layers": 0}
"""What released files leave out, where transformers' class has another default."""


class KimiVLConfig(Kimi_K25Config):
    """Released settings under the names of Kimi-K2.5.

    Args:
        text_config: Of a DeepSeek-V3 model.
        vision_config: Of the tower; `init_pos_emb_height` and `_width` are the sides of its table of places.
        media_placeholder_token_id: The token that stands for a part of a picture.
        kwargs: What every configuration has.
    """

    model_type = "kimi_vl"

    def __init__(
        self,
        *,
        text_config: Any = None,
        vision_config: Any = None,
        media_placeholder_token_id: int = 163605,
        **kwargs: Any,
    ) -> None:
        if isinstance(vision_config, Mapping):
            vision_config = {name.removeprefix("init_"): value for name, value in vision_config.items()}
            vision_config["model_type"] = "kimi_k25_vision"
            kwargs.setdefault("projection_hidden_size", vision_config.get("hidden_size", 1152))
        if isinstance(text_config, Mapping):
            text_config = _TEXT_DEFAULTS | dict(text_config)
        self.media_placeholder_token_id = media_placeholder_token_id
        # -1: no token stands for a video.
        own = {"image_token_id": media_placeholder_token_id, "video_token_id": -1, "tie_word_embeddings": False}
        super().__init__(text_config=text_config, vision_config=vision_config, **own | kwargs)


@model_register.register("kimi_vl")
class KimiVLForConditionalGeneration(Kimi_K25ForConditionalGeneration):
    """Kimi-K2.5's class, on pictures only."""

    config: KimiVLConfig
    config_class = KimiVLConfig


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, PermuteForRope, WeightConverter, WeightRenaming

    AutoConfig.register(KimiVLConfig.model_type, KimiVLConfig, exist_ok=True)
    AutoModelForImageTextToText.register(KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True)
    AutoImageProcessor.register(KimiVLConfig, fast_image_processor_class=KimiVLImageProcessor, exist_ok=True)
    AutoProcessor.register(KimiVLConfig, KimiVLProcessor, exist_ok=True)
    rules: list[Any] = [WeightRenaming(f"^{released}", own) for released, own in _NAMES.items()]
    for kind in ("weight", "bias"):
        parts = [rf"\.attn\.{name}_proj\.{kind}" for name in "qkv"]
        # Rotary pairs are neighbours in the release, and halves of a head in transformers.
        turned = PermuteForRope(subconfig_key="vision_config", permute_layer_names=["q_proj", "k_proj"])
        rules.append(WeightConverter(rf"\.wqkv\.{kind}", parts, operations=[Chunk(dim=0), turned]))
    register_checkpoint_conversion_mapping(KimiVLConfig.model_type, rules, overwrite=True)


_BLOCK, _OWN_BLOCK = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"model.vision_tower.layers.\1."
_NAMES = {
    r"language_model\.model\.": "model.language_model.",
    r"language_model\.lm_head\.": "lm_head.",
    r"vision_tower\.patch_embed\.proj\.": "model.vision_tower.patch_embed.proj.",
    r"vision_tower\.patch_embed\.pos_emb\.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
    rf"{_BLOCK}norm0\.": f"{_OWN_BLOCK}norm1.",
    rf"{_BLOCK}norm1\.": f"{_OWN_BLOCK}norm2.",
    rf"{_BLOCK}mlp\.fc0\.": f"{_OWN_BLOCK}mlp.fc1.",
    rf"{_BLOCK}mlp\.fc1\.": f"{_OWN_BLOCK}mlp.fc2.",
    rf"{_BLOCK}wo\.": f"{_OWN_BLOCK}attn.proj.",
    rf"{_BLOCK}wqkv\.": f"{_OWN_BLOCK}wqkv.",
    r"vision_tower\.encoder\.final_layernorm\.": "model.vision_tower.final_layernorm.",
    r"multi_modal_projector\.pre_norm\.": "model.mm_projector.pre_norm.",
    r"multi_modal_projector\.linear_1\.": "model.mm_projector.in_proj.",
    r"multi_modal_projector\.linear_2\.": "model.mm_projector.out_proj.",
}
"""Released name → name in the class of Kimi-K2.5."""
