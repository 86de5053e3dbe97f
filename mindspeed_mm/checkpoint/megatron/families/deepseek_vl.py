"""DeepSeek-VL2, with latent attention and routed experts, and the first DeepSeek-VL, over Llama. Every rank holds their
picture encoders whole.

Names of VL2: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/deepseekvl2.py`. It has no first DeepSeek-VL: those
names are ours, in its manner.
"""

from __future__ import annotations

from dataclasses import replace

from mindspeed_mm.checkpoint.key_ops import Concat
from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    LAYER,
    end_rules,
    gated_mlp_cuts,
    gated_mlp_rules,
    has_tied_head,
    norm_rules,
    text_cuts,
    text_rules,
)
from mindspeed_mm.checkpoint.megatron.family import (
    EMBEDDING,
    HEAD,
    TEXT,
    Config,
    MegatronFamily,
    MegatronModel,
    PipelineTower,
    TensorCut,
)
from mindspeed_mm.core.errors import ModelFolderError

_ENCODER, _PROJECTOR = "image_encoder.encoder.", "image_encoder.projector."
_EVERYWHERE = ("image_newline", "view_seperator", "tile_indicators")
VISION = PipelineTower(
    name="vision",
    prefix="image_encoder.",
    layers=f"{_ENCODER}blocks.",
    first=(f"{_ENCODER}patch_embed.", f"{_ENCODER}pos_embed"),
    last=(f"{_ENCODER}norm.", f"{_ENCODER}attn_pool.", _PROJECTOR),
    everywhere=_EVERYWHERE,
)

_MLP, _HUB_MLP = f"{LAYER}mlp.", "language.model.layers.{n}.mlp."
_ATTENTION = f"{LAYER}self_attention."
_LATENT = {
    "o_proj": "linear_proj",
    "kv_b_proj": "linear_kvb",
    "kv_a_layernorm": "k_layernorm",
    "q_b_proj": "linear_qb",
    "q_a_layernorm": "q_layernorm",
}
"""Hub → Megatron, in the attention."""


_SIGLIP = replace(
    VISION,
    layers=f"{_ENCODER}encoder.layers.",
    first=(f"{_ENCODER}embeddings.",),
    last=(f"{_ENCODER}post_layernorm.", f"{_ENCODER}head.", _PROJECTOR),
    everywhere=(),
)


def _describe(config: Config) -> MegatronModel:
    if config["model_type"] == "deepseek_vl_v2":
        return _vl2(config)
    return _vl(config)


def _vl(config: Config) -> MegatronModel:
    text = config["text_config"]
    return MegatronModel(
        towers=(TEXT, _SIGLIP),
        depths={"text": text["num_hidden_layers"], "vision": config["vision_config"]["num_hidden_layers"]},
        rules=[
            *text_rules(text, "model.language_model.", "lm_head"),
            KeyRule("model.vision_model.{rest*}", f"{_ENCODER}{{rest*}}"),
            KeyRule("model.aligner.{rest*}", f"{_PROJECTOR}{{rest*}}"),
        ],
        cuts=text_cuts(text),
        tied_head=has_tied_head(config),
        vocabulary=text["vocab_size"],
    )


def _vl2(config: Config) -> MegatronModel:
    text, vision = config["language_config"], config["vision_config"]
    heads, depth, dense = text["num_attention_heads"], text["num_hidden_layers"], text.get("first_k_dense_replace") or 0
    return MegatronModel(
        towers=(TEXT, VISION),
        depths={"text": depth, "vision": vision["layers"]},
        rules=[*_vl2_text_rules(text), *_vl2_vision_rules()],
        cuts={
            EMBEDDING: TensorCut(0, padded=True),
            HEAD: TensorCut(0, padded=True),
            f"{_ATTENTION}linear_qb.{{p}}": TensorCut(0, units=heads),
            f"{_ATTENTION}linear_kvb.{{p}}": TensorCut(0, units=heads),
            f"{_ATTENTION}linear_proj.weight": TensorCut(1, units=heads),
            **gated_mlp_cuts(_MLP),
            **gated_mlp_cuts(f"{_MLP}shared_experts."),
            **gated_mlp_cuts(f"{_MLP}experts.local_experts.{{e}}."),
        },
        tied_head=bool(text.get("tie_word_embeddings")),
        vocabulary=text["vocab_size"],
        experts=text["n_routed_experts"],
        parts_of_layers={
            "mlp.linear_fc": range(dense),
            "mlp.router": range(dense, depth),
            "mlp.shared_experts": range(dense, depth),
            "mlp.experts": range(dense, depth),
        },
    )


def _vl2_text_rules(text: Config) -> list[KeyRule]:
    hub = "language.model.layers.{n}.self_attn."
    queries = "q_a_proj" if text.get("q_lora_rank") else "q_proj"
    return [
        *end_rules("language.model.", "language.lm_head"),
        *norm_rules("language.model."),
        KeyRule(
            [f"{hub}{queries}.weight", f"{hub}kv_a_proj_with_mqa.weight"],
            f"{_ATTENTION}linear_qkv.weight",
            (Concat(0, _latent_sizes(text)),),
        ),
        *renamings(_LATENT, hub, _ATTENTION, ".weight"),
        KeyRule(f"{_HUB_MLP}gate.weight", f"{_MLP}router.weight"),
        KeyRule(f"{_HUB_MLP}gate.e_score_correction_bias", f"{_MLP}router.expert_bias"),
        *gated_mlp_rules(_HUB_MLP, _MLP),
        *gated_mlp_rules(f"{_HUB_MLP}shared_experts.", f"{_MLP}shared_experts."),
        *gated_mlp_rules(f"{_HUB_MLP}experts.{{e}}.", f"{_MLP}experts.local_experts.{{e}}."),
    ]


def _latent_sizes(text: Config) -> tuple[int, int]:
    """Rows of the queries (or of their latent) and of the latent of keys and values with the rotated key behind it."""
    if not text.get("kv_lora_rank"):
        raise ModelFolderError(
            "is not set: this model has no latent attention, and its Megatron-style names are not known",
            key="kv_lora_rank",
        )
    queries = text.get("q_lora_rank") or text["num_attention_heads"] * (
        text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    )
    return queries, text["kv_lora_rank"] + text["qk_rope_head_dim"]


def _vl2_vision_rules() -> list[KeyRule]:
    return [
        KeyRule("vision.{rest*}", f"{_ENCODER}{{rest*}}"),
        KeyRule("projector.{rest*}", f"{_PROJECTOR}{{rest*}}"),
        *(KeyRule(name, name) for name in _EVERYWHERE),
    ]


DEEPSEEK_VL = MegatronFamily("DeepSeek-VL", ("deepseek_vl_v2", "deepseek_vl"), _describe)
