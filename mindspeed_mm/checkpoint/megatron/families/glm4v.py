"""GLM-4.1V.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/glm.py`. That converter knows no tensor parallelism; what
is cut here is what the model's modules cut. The encoder's attention and the merger are plain modules: every rank holds
them whole.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.checkpoint.keymap import renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    BLOCK,
    LAYER,
    PROJECTOR,
    VISION,
    attention_rules,
    end_rules,
    gated_mlp_cuts,
    gated_mlp_rules,
    has_tied_head,
    norm_rules,
    text_config,
    text_cuts,
)
from mindspeed_mm.checkpoint.megatron.family import TEXT, Config, MegatronFamily, MegatronModel

_TEXT, _VISUAL, _ENCODER = "model.language_model.", "model.visual.", "image_encoder.encoder."
_TOWER = replace(
    VISION,
    first=(*VISION.first, f"{_ENCODER}post_conv_layernorm.", f"{_ENCODER}embeddings.position_embedding."),
    last=(*VISION.last, f"{_ENCODER}blocks.final_layernorm.", f"{_ENCODER}downsample."),
)

_TEXT_LAYER_NAMES = {
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
    "post_self_attn_layernorm": "post_self_attn_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
}
"""Hub → Megatron, in a layer of the language model."""
_VISION_NAMES = {
    "patch_embed.proj": f"{_ENCODER}patch_embed.proj",
    "post_conv_layernorm": f"{_ENCODER}post_conv_layernorm",
    "embeddings.position_embedding": f"{_ENCODER}embeddings.position_embedding",
    "post_layernorm": f"{_ENCODER}blocks.final_layernorm",
    "downsample": f"{_ENCODER}downsample",
    "merger.proj": f"{PROJECTOR}proj",
    "merger.post_projection_norm": f"{PROJECTOR}post_projection_norm",
    "merger.gate_proj": f"{PROJECTOR}gate_proj",
    "merger.up_proj": f"{PROJECTOR}up_proj",
    "merger.down_proj": f"{PROJECTOR}down_proj",
    "blocks.{n}.norm1": f"{BLOCK}input_layernorm",
    "blocks.{n}.norm2": f"{BLOCK}pre_mlp_layernorm",
    "blocks.{n}.attn.qkv": f"{BLOCK}self_attention.qkv",
    "blocks.{n}.attn.proj": f"{BLOCK}self_attention.proj",
}
"""Hub → Megatron, in the picture encoder."""


def _describe(config: Config) -> MegatronModel:
    text = text_config(config)
    return MegatronModel(
        towers=(TEXT, _TOWER),
        depths={"text": text["num_hidden_layers"], "vision": config["vision_config"]["depth"]},
        rules=[
            *end_rules(_TEXT, "lm_head"),
            *norm_rules(_TEXT),
            *attention_rules(text, _TEXT),
            *gated_mlp_rules(f"{_VISUAL}blocks.{{n}}.mlp.", f"{BLOCK}mlp."),
            *renamings(_TEXT_LAYER_NAMES, f"{_TEXT}layers.{{n}}.", LAYER),
            *renamings(_VISION_NAMES, _VISUAL),
        ],
        cuts={**text_cuts(text), **gated_mlp_cuts(f"{BLOCK}mlp.")},
        tied_head=has_tied_head(config),
        vocabulary=text["vocab_size"],
    )


GLM_4V = MegatronFamily("GLM-4.1V", ("glm4v",), _describe)
