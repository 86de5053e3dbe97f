"""Qwen2-VL, VideoAlign's reward model on it, and Qwen2.5-VL.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/{qwen2vl,videoalign,qwen2_5vl}.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    BLOCK,
    VISION,
    attention_cuts,
    block_rules,
    fused_qkv_rule,
    gated_mlp_cuts,
    gated_mlp_rules,
    has_tied_head,
    merger_rules,
    mlp_cuts,
    text_config,
    text_cuts,
    text_rules,
)
from mindspeed_mm.checkpoint.megatron.family import TEXT, Config, MegatronFamily, MegatronModel

_MLP, _HUB_MLP = f"{BLOCK}mlp.", "visual.blocks.{n}.mlp."


REWARD_MODEL, REWARD_HEAD = "Qwen2VLRewardModelBT", "rm_head.weight"
"""VideoAlign's, in `architectures`: it has a head of scores, of `output_dim` rows, in place of the one of words."""


def _qwen2_vl(config: Config, *, canonical: bool = False) -> MegatronModel:
    plain = renamings({"fc1": "linear_fc1", "fc2": "linear_fc2"}, _HUB_MLP, _MLP)
    found = _model(config, config["vision_config"]["embed_dim"], plain, canonical)
    text = replace(TEXT, last=(*TEXT.last, REWARD_HEAD))
    found = replace(found, towers=(text, VISION), rules=[*found.rules, KeyRule(REWARD_HEAD, REWARD_HEAD)])
    if REWARD_MODEL not in (config.get("architectures") or ()):
        return found
    return replace(found, tied_head=False, in_place_of_head=(REWARD_HEAD,))


def _qwen2_5_vl(config: Config, *, canonical: bool = False) -> MegatronModel:
    gated = gated_mlp_rules(_HUB_MLP, _MLP, canonical=canonical)
    return _model(config, config["vision_config"]["hidden_size"], gated, canonical, gated=True)


def _model(
    config: Config, vision_width: int, mlp_rules: list[KeyRule], canonical: bool, *, gated: bool = False
) -> MegatronModel:
    text, vision = text_config(config), config["vision_config"]
    return MegatronModel(
        towers=(TEXT, VISION),
        depths={"text": text["num_hidden_layers"], "vision": vision["depth"]},
        rules=[
            *text_rules(text, "model.", "lm_head", canonical=canonical),
            *block_rules("visual."),
            fused_qkv_rule("visual.", vision_width, vision["num_heads"], canonical=canonical),
            *mlp_rules,
            *merger_rules("visual."),
        ],
        cuts={
            **text_cuts(text),
            **attention_cuts(vision["num_heads"], canonical=canonical),
            **(gated_mlp_cuts(_MLP) if gated else mlp_cuts(_MLP)),
        },
        tied_head=has_tied_head(config),
        vocabulary=text["vocab_size"],
    )


QWEN2_VL = MegatronFamily("Qwen2-VL", ("qwen2_vl",), _qwen2_vl, partial(_qwen2_vl, canonical=True))
QWEN2_5_VL = MegatronFamily("Qwen2.5-VL", ("qwen2_5_vl",), _qwen2_5_vl, partial(_qwen2_5_vl, canonical=True))
