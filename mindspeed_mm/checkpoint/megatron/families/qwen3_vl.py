"""Qwen3-VL, dense and with routed experts.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/qwen3vl_megatron.py`. A deepstack merger is part of the
layer of the picture encoder that it reads from, so it moves over the pipeline with that layer.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.checkpoint.key_ops import SwapTo, Unstack, in_order_of_module
from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    BLOCK,
    LAYER,
    PROJECTOR,
    VISION,
    attention_cuts,
    block_rules,
    fused_qkv_rule,
    gated_mlp_cuts,
    has_tied_head,
    mlp_cuts,
    text_cuts,
    text_rules,
)
from mindspeed_mm.checkpoint.megatron.family import TEXT, Config, MegatronFamily, MegatronModel

_TEXT, _VISUAL = "model.language_model.", "model.visual."
_EXPERTS, _LOCAL = f"{_TEXT}layers.{{n}}.mlp.experts.", f"{LAYER}mlp.experts.local_experts.{{e}}."
_TOWER = replace(VISION, first=(*VISION.first, "image_encoder.encoder.pos_embed."))

_LINEARS = {"linear_fc1": "linear_fc1", "linear_fc2": "linear_fc2"}


def _describe(config: Config) -> MegatronModel:
    text, vision = config["text_config"], config["vision_config"]
    experts = int(text.get("num_local_experts") or text.get("num_experts") or 0)  # transformers 5 writes the first
    rules = text_rules(text, _TEXT, "lm_head")
    if experts:
        rules += _expert_rules(text, experts, in_order_of_module(config.get("transformers_version")))
    rules += _vision_rules(vision)
    return MegatronModel(
        towers=(TEXT, _TOWER),
        depths={"text": text["num_hidden_layers"], "vision": vision["depth"]},
        rules=rules,
        cuts={
            **text_cuts(text),
            **gated_mlp_cuts(_LOCAL),
            **attention_cuts(vision["num_heads"]),
            **mlp_cuts(f"{BLOCK}mlp."),
            **mlp_cuts(f"{BLOCK}deepstack_layer.encoder."),
        },
        tied_head=has_tied_head(config),
        vocabulary=text["vocab_size"],
        experts=experts,
        parts_of_layers={"deepstack_layer.": vision.get("deepstack_visual_indexes") or ()},
    )


def _expert_rules(text: Config, e: int, as_module: bool | None) -> list[KeyRule]:
    # E experts, I their inner width, H the model's: the module's (E, 2I, H) is (E, H, 2I) in the released folders
    i, h = text["moe_intermediate_size"], text["hidden_size"]
    return [
        KeyRule(f"{_TEXT}layers.{{n}}.mlp.gate.weight", f"{LAYER}mlp.router.weight"),
        KeyRule(
            f"{_EXPERTS}gate_up_proj", f"{_LOCAL}linear_fc1.weight", (SwapTo((e, 2 * i, h), as_module), Unstack(0))
        ),
        KeyRule(f"{_EXPERTS}down_proj", f"{_LOCAL}linear_fc2.weight", (SwapTo((e, h, i), as_module), Unstack(0))),
    ]


def _vision_rules(vision: Config) -> list[KeyRule]:
    rules = [
        *block_rules(_VISUAL),
        fused_qkv_rule(_VISUAL, vision["hidden_size"], vision["num_heads"]),
        KeyRule(f"{_VISUAL}pos_embed.weight", "image_encoder.encoder.pos_embed.weight"),
        *renamings(_LINEARS, f"{_VISUAL}blocks.{{n}}.mlp.", f"{BLOCK}mlp."),
        *_merger_rules(f"{_VISUAL}merger.", PROJECTOR),
    ]
    for number, layer in enumerate(vision.get("deepstack_visual_indexes") or ()):
        own = f"{_TOWER.layers}{layer}.deepstack_layer."
        rules += _merger_rules(f"{_VISUAL}deepstack_merger_list.{number}.", own)
    return rules


def _merger_rules(hub: str, own: str) -> list[KeyRule]:
    return [
        KeyRule(f"{hub}norm.{{p}}", f"{own}layernorm.{{p}}"),
        *renamings(_LINEARS, hub, f"{own}encoder."),
    ]


QWEN3_VL = MegatronFamily("Qwen3-VL", ("qwen3_vl", "qwen3_vl_moe"), _describe)
