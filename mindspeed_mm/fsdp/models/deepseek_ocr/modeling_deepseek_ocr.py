"""DeepSeek-OCR (arXiv:2510.18234): pages through SAM and CLIP, which leave few tokens of them, into a DeepSeek language
model with routed experts.

transformers' Unlimited-OCR has the same encoder and the same tokens of a page; its text model looks back over a window,
DeepSeek-OCR's over everything. What is written here is that, and how the released settings are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationMixin,
    UnlimitedOcrConfig,
    UnlimitedOcrModel,
    UnlimitedOcrPreTrainedModel,
    UnlimitedOcrVisionConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrVisionModel

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.deepseek_ocr.processing_deepseek_ocr import DeepseekOCRProcessor
from mindspeed_mm.fsdp.models.deepseek_vl2.configuration_deepseek_vl2 import SAME_TYPE, build_language_config
from mindspeed_mm.fsdp.models.deepseek_vl2.modeling_deepseek_vl2 import AnswersPictures, DeepseekVLV2TextModel
from mindspeed_mm.fsdp.models.deepseek_vl2.processing_deepseek_vl2 import SAME_NAME
from mindspeed_mm.fsdp.models.structure.towers import Tower
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import model_register

_SIZES = {"heads": "num_attention_heads", "layers": "num_hidden_layers", "width": "hidden_size"}
"""Released name → name in transformers."""


class DeepseekOCRConfig(UnlimitedOcrConfig):
    """Released settings under the names of Unlimited-OCR.

    Args:
        language_config: Of the text model.
        vision_config: Sizes of SAM and of CLIP, both under `width`.
        projector_config: Says that the projector is one linear layer.
        image_token_id: The token that stands for a part of a page.
        kwargs: What every configuration has.
    """

    model_type = "deepseek_ocr"

    def __init__(
        self,
        *,
        language_config: Mapping[str, object] | None = None,
        vision_config: Any = None,
        projector_config: Mapping[str, object] | None = None,
        image_token_id: int = 128815,
        **kwargs: Any,
    ) -> None:
        if isinstance(vision_config, Mapping) and "sam_vit_b" in vision_config.get("width", ()):
            vision_config = _vision_config(vision_config)
        kwargs.setdefault("text_config", build_language_config({"use_mla": False} | dict(language_config or {})))
        kwargs.setdefault("tie_word_embeddings", False)
        self.projector_config = dict(projector_config or {})
        super().__init__(vision_config=vision_config, image_token_id=image_token_id, **kwargs)


def _vision_config(given: Mapping[str, Any]) -> UnlimitedOcrVisionConfig:
    sam, clip = dict(given["width"]["sam_vit_b"]), dict(given["width"]["clip-l-14-224"])
    sam |= {"mlp_dim": 4 * sam["width"], "image_size": given.get("image_size", 1024)}  # the release states neither
    clip |= {"intermediate_size": 4 * clip["width"]}
    return UnlimitedOcrVisionConfig(sam_config=_renamed(sam), encoder_config=_renamed(clip))


def _renamed(sizes: Mapping[str, object]) -> JsonObject:
    return {_SIZES.get(name, name): value for name, value in sizes.items()}


class DeepseekOCRModel(UnlimitedOcrModel):
    """Encoder, projector and text model, without the head.

    Args:
        config: As released.
    """

    def __init__(self, config: DeepseekOCRConfig) -> None:
        # Past `UnlimitedOcrModel.__init__`, which would build another text model.
        UnlimitedOcrPreTrainedModel.__init__(self, config)
        vision, text = config.vision_config, config.text_config
        clip = vision.encoder_config
        self.vocab_size = text.vocab_size
        self.vision_tower = UnlimitedOcrVisionModel(vision)
        patches = nn.Conv2d(clip.num_channels, clip.hidden_size, clip.patch_size, clip.patch_size, bias=False)
        # CLIP takes SAM's features in the place of patches; the release keeps what it had for them.
        self.vision_tower.vision_encoder.embeddings.patch_embedding = patches
        # Features of SAM and of CLIP stand side by side.
        features = vision.sam_config.downsample_channels[-1] + clip.hidden_size
        self.multi_modal_projector = nn.Linear(features, text.hidden_size)
        self.language_model = DeepseekVLV2TextModel._from_config(text)
        self.view_separator = nn.Parameter(torch.empty(text.hidden_size))
        self.image_newline = nn.Parameter(torch.empty(text.hidden_size))
        self.post_init()

    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        pixel_values_local: torch.Tensor | None = None,
        num_local_patches: Any = None,
        patches_grid: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As of transformers' class; counts and grids may be tensors, as they lie in a batch."""
        if isinstance(num_local_patches, torch.Tensor):
            num_local_patches = host_values(num_local_patches)
        if isinstance(patches_grid, torch.Tensor):
            patches_grid = host_values(patches_grid)
        return super().get_image_features(pixel_values, pixel_values_local, num_local_patches, patches_grid, **kwargs)


@model_register.register("deepseek_ocr")
class DeepseekOCRForCausalLM(UnlimitedOcrPreTrainedModel, AnswersPictures, GenerationMixin):
    """The whole model.

    Args:
        config: As released.
    """

    config: DeepseekOCRConfig
    config_class = DeepseekOCRConfig
    _no_split_modules = ("UnlimitedOcrEncoderLayer", "UnlimitedOcrSamVisionLayer", "DeepseekOcr2TextDecoderLayer")

    def __init__(self, config: DeepseekOCRConfig) -> None:
        super().__init__(config)
        self.model = DeepseekOCRModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def get_decoder(self) -> nn.Module:
        """The text model without its head."""
        return self.model.language_model

    def get_towers(self) -> list[Tower]:
        """SAM and CLIP, which see a page and then its tiles; a page without tiles is the least they see."""
        keys = {"image": "pixel_values", "tiles": "pixel_values_local"}
        return [Tower(name, "model.vision_tower", key, "model.language_model", _run_idle) for name, key in keys.items()]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_local: torch.Tensor | None = None,
        num_local_patches: torch.Tensor | None = None,
        patches_grid: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocabulary) of tokens (B, L); arguments as of transformers' Unlimited-OCR."""
        outputs = self.model(
            input_ids=input_ids,
            pixel_values=pixel_values,
            pixel_values_local=pixel_values_local,
            num_local_patches=num_local_patches,
            patches_grid=patches_grid,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return self.answered(outputs, labels, logits_to_keep, **kwargs)


def _run_idle(whole: Any) -> list[torch.Tensor]:
    sam, device = whole.config.vision_config.sam_config, current_device()
    pixels = torch.zeros(1, sam.num_channels, sam.image_size, sam.image_size, device=device, dtype=whole.dtype)
    return whole.model.get_image_features(pixels, return_dict=True).pooler_output


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    name = DeepseekOCRForCausalLM.__name__
    SAME_TYPE[name], SAME_NAME[name] = DeepseekOCRConfig, DeepseekOCRProcessor
    AutoModelForImageTextToText.register(DeepseekOCRConfig, DeepseekOCRForCausalLM, exist_ok=True)
    AutoProcessor.register(DeepseekOCRConfig, DeepseekOCRProcessor, exist_ok=True)
    rules = get_checkpoint_conversion_mapping("unlimited_ocr")
    register_checkpoint_conversion_mapping(name, rules, overwrite=True)
    experts = get_checkpoint_conversion_mapping("deepseek_v2")
    register_checkpoint_conversion_mapping(DeepseekVLV2TextModel.__name__, experts, overwrite=True)
