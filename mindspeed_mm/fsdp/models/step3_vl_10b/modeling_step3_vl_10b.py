"""Step3-VL-10B: a perception encoder (arXiv:2504.13181) with 2-D rotary places, two convolutions that take the grid of
patches to a quarter of its sides, a projector, and a Qwen3 text model. A picture is seen whole and in crops.

transformers' Step-3.7 has the same tower and the same order of features; its text model is another. What is written
here joins that tower to Qwen3, and says how the released settings and weights are named.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model, Step3p7Config, Step3p7ForConditionalGeneration, Step3p7VisionConfig
from transformers.models.step3p7.modeling_step3p7 import (
    Step3p7Model,
    Step3p7ModelOutputWithPast,
    Step3p7PreTrainedModel,
    Step3p7VisionModel,
)

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.step3_vl_10b.processing_step3_vl_10b import Step3VLProcessor, StepVLImageProcessor
from mindspeed_mm.fsdp.ops.host_values import host_values
from mindspeed_mm.fsdp.utils.register import model_register

_AS_BUILT = {
    "use_cls_token": False,
    "use_abs_posemb": True,
    "use_rope2d": True,
    "use_ln_pre": True,
    "use_ln_post": False,
    "rope_theta_rescale_factor": 1.0,
}
"""Setting of the released tower → its only value that is built."""


class StepVLConfig(Step3p7Config):
    """The released settings: `vision_config` of the tower, `text_config` of a Qwen3 model, `projector_bias` and
    `image_token_id`.

    Raises:
        ValueError: The tower's settings ask for what no released model has.
    """

    model_type = "step_robotics"
    sub_configs_defaults: ClassVar[JsonObject] = {
        "vision_config": Step3p7VisionConfig,
        "text_config": Qwen3Config,
    }

    def __post_init__(self, **kwargs: object) -> None:
        if isinstance(self.vision_config, dict):
            for name, built in _AS_BUILT.items():
                if self.vision_config.get(name, built) != built:
                    raise ValueError(f"vision_config.{name} is {self.vision_config[name]!r}; known is {built!r} only")
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = bool(self.text_config.tie_word_embeddings)


class StepVLModel(Step3p7Model):
    """The model without its head.

    Args:
        config: As released.
    """

    config: StepVLConfig

    def __init__(self, config: StepVLConfig) -> None:
        # Past `Step3p7Model.__init__`, which would build Step-3.7's text model.
        Step3p7PreTrainedModel.__init__(self, config)
        vision, text = config.vision_config, config.text_config
        self.vision_model = Step3p7VisionModel(vision)
        self.language_model = Qwen3Model(text)
        self.multi_modal_projector = nn.Linear(4 * vision.hidden_size, text.hidden_size, bias=config.projector_bias)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_local: torch.Tensor | None = None,
        num_local_patches: list[int] | torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Step3p7ModelOutputWithPast:
        """Hidden states (B, L, H) of tokens (B, L).

        Args:
            input_ids: Tokens; each `image_token_id` is a place of a feature.
            pixel_values: (pictures, 3, side, side), each picture whole.
            pixel_values_local: (crops, 3, side, side), those of one picture behind those of the one before it.
            num_local_patches: (pictures,) crops of each; left out: none has any.
            attention_mask: 1 on real tokens, or as the text model takes it.
            position_ids: Places of tokens.
            past_key_values: A cache.
            inputs_embeds: In the stead of `input_ids`.
            use_cache: Whether to hand a cache on.
            kwargs: For attention.
        """
        features = None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            counts = num_local_patches
            if isinstance(counts, torch.Tensor):
                counts = host_values(counts)
            seen = self.get_image_features(pixel_values, pixel_values_local, counts, return_dict=True)
            features = torch.cat(seen.pooler_output).to(inputs_embeds)
            places = self.get_placeholder_mask(input_ids, inputs_embeds, features)
            inputs_embeds = inputs_embeds.masked_scatter(places, features)
        outputs = self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        return Step3p7ModelOutputWithPast(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            image_hidden_states=features,
        )


@model_register.register("step3_vl_10b")
class StepVLForConditionalGeneration(Step3p7ForConditionalGeneration):
    """The whole model.

    Args:
        config: As released.
    """

    config: StepVLConfig
    config_class = StepVLConfig
    _no_split_modules: ClassVar[list[str]] = ["Step3p7VisionEncoderLayer", "Qwen3DecoderLayer"]

    def __init__(self, config: StepVLConfig) -> None:
        # Past the constructor of the class above, which would build its own model.
        Step3p7PreTrainedModel.__init__(self, config)
        self.model = StepVLModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


def tell_transformers() -> None:
    """Let transformers' Auto classes find the model, its processor, and how its released weights are named. The names
    inside the tower are Step-3.7's, which transformers knows."""
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    AutoConfig.register(StepVLConfig.model_type, StepVLConfig, exist_ok=True)
    AutoModelForImageTextToText.register(StepVLConfig, StepVLForConditionalGeneration, exist_ok=True)
    AutoImageProcessor.register(StepVLConfig, fast_image_processor_class=StepVLImageProcessor, exist_ok=True)
    AutoProcessor.register(StepVLConfig, Step3VLProcessor, exist_ok=True)
    rules: list[object] = [WeightRenaming(rf"^{released}\.", f"{own}.") for released, own in _NAMES.items()]
    register_checkpoint_conversion_mapping(StepVLConfig.model_type, rules, overwrite=True)


_NAMES = {
    "vision_model": "model.vision_model",
    "vit_large_projector": "model.multi_modal_projector",
    r"model\.embed_tokens": "model.language_model.embed_tokens",
    r"model\.layers": "model.language_model.layers",
    r"model\.norm": "model.language_model.norm",
}
"""Beginning of a released name → of the name here."""
