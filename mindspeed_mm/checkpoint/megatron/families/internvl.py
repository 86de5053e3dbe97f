"""InternVL 2.5 and 3: the original folders (InternVLChat, over Qwen2, Llama or InternLM2) and transformers' (`-HF`).

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/internvl.py`, which knows the original folders alone. The
encoder's [Q|K|V] keeps its order; each third is cut by heads, which the ranks need not divide evenly.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import Concat
from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    LAYER,
    has_tied_head,
    mlp_cuts,
    text_cuts,
    text_rules,
)
from mindspeed_mm.checkpoint.megatron.family import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TEXT,
    Config,
    MegatronFamily,
    MegatronModel,
    PipelineTower,
    TensorCut,
)

_EMBEDDINGS, _PROJECTOR = "image_encoder.encoder.embeddings.", "image_encoder.projector."
_LAYER = "image_encoder.encoder.encoder.layers.{n}."
_QKV = f"{_LAYER}self_attention.linear_qkv.{{p}}"
VISION = PipelineTower(
    name="vision",
    prefix="image_encoder.",
    layers="image_encoder.encoder.encoder.layers.",
    first=(_EMBEDDINGS,),
    last=(_PROJECTOR,),
)

_ORIGINAL = {
    "vision_model.embeddings.class_embedding": f"{_EMBEDDINGS}class_embedding",
    "vision_model.embeddings.position_embedding": f"{_EMBEDDINGS}position_embedding",
    "vision_model.embeddings.patch_embedding.{p}": f"{_EMBEDDINGS}patch_embedding.{{p}}",
    "vision_model.encoder.layers.{n}.ls1": f"{_LAYER}ls1",
    "vision_model.encoder.layers.{n}.ls2": f"{_LAYER}ls2",
    "vision_model.encoder.layers.{n}.norm1.{p}": f"{_LAYER}input_layernorm.{{p}}",
    "vision_model.encoder.layers.{n}.norm2.{p}": f"{_LAYER}pre_mlp_layernorm.{{p}}",
    "vision_model.encoder.layers.{n}.attn.qkv.{p}": _QKV,
    "vision_model.encoder.layers.{n}.attn.proj.{p}": f"{_LAYER}self_attention.linear_proj.{{p}}",
    "vision_model.encoder.layers.{n}.attn.q_norm.{p}": f"{_LAYER}self_attention.q_layernorm.{{p}}",
    "vision_model.encoder.layers.{n}.attn.k_norm.{p}": f"{_LAYER}self_attention.k_layernorm.{{p}}",
    "vision_model.encoder.layers.{n}.mlp.fc1.{p}": f"{_LAYER}mlp.linear_fc1.{{p}}",
    "vision_model.encoder.layers.{n}.mlp.fc2.{p}": f"{_LAYER}mlp.linear_fc2.{{p}}",
    "mlp1.0.{p}": f"{_PROJECTOR}norm.{{p}}",
    "mlp1.1.{p}": f"{_PROJECTOR}linear_fc1.{{p}}",
    "mlp1.3.{p}": f"{_PROJECTOR}linear_fc2.{{p}}",
}
"""Hub → Megatron: picture encoder and projector of the original folders."""

_HF = {
    "vision_tower.embeddings.cls_token": f"{_EMBEDDINGS}class_embedding",
    "vision_tower.embeddings.position_embeddings": f"{_EMBEDDINGS}position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection.{p}": f"{_EMBEDDINGS}patch_embedding.{{p}}",
    "vision_tower.encoder.layer.{n}.lambda_1": f"{_LAYER}ls1",
    "vision_tower.encoder.layer.{n}.lambda_2": f"{_LAYER}ls2",
    "vision_tower.encoder.layer.{n}.layernorm_before.{p}": f"{_LAYER}input_layernorm.{{p}}",
    "vision_tower.encoder.layer.{n}.layernorm_after.{p}": f"{_LAYER}pre_mlp_layernorm.{{p}}",
    "vision_tower.encoder.layer.{n}.attention.projection_layer.{p}": f"{_LAYER}self_attention.linear_proj.{{p}}",
    "vision_tower.encoder.layer.{n}.attention.q_norm.{p}": f"{_LAYER}self_attention.q_layernorm.{{p}}",
    "vision_tower.encoder.layer.{n}.attention.k_norm.{p}": f"{_LAYER}self_attention.k_layernorm.{{p}}",
    "vision_tower.encoder.layer.{n}.mlp.fc1.{p}": f"{_LAYER}mlp.linear_fc1.{{p}}",
    "vision_tower.encoder.layer.{n}.mlp.fc2.{p}": f"{_LAYER}mlp.linear_fc2.{{p}}",
    "multi_modal_projector.layer_norm.{p}": f"{_PROJECTOR}norm.{{p}}",
    "multi_modal_projector.linear_1.{p}": f"{_PROJECTOR}linear_fc1.{{p}}",
    "multi_modal_projector.linear_2.{p}": f"{_PROJECTOR}linear_fc2.{{p}}",
}
"""The same of transformers' folders; queries, keys and values stand apart there."""

_INTERNLM2 = {
    "tok_embeddings.weight": EMBEDDING,
    "norm.weight": FINAL_NORM,
    "layers.{n}.attention_norm.weight": f"{LAYER}input_layernorm.weight",
    "layers.{n}.ffn_norm.weight": f"{LAYER}pre_mlp_layernorm.weight",
    "layers.{n}.attention.wqkv.{p}": f"{LAYER}self_attention.linear_qkv.{{p}}",
    "layers.{n}.attention.wo.{p}": f"{LAYER}self_attention.linear_proj.{{p}}",
    "layers.{n}.feed_forward.w2.{p}": f"{LAYER}mlp.linear_fc2.{{p}}",
}
"""Hub → Megatron in InternLM2, whose fused tensor already has a group's queries, its key and its value by turns."""


def _describe(config: Config) -> MegatronModel:
    original = config["model_type"] == "internvl_chat"
    section = "llm_config" if original else "text_config"
    text, vision = config[section], config["vision_config"]
    if original:
        rules = renamings(_ORIGINAL, end="")
    else:
        rules = [*renamings(_HF, end=""), _hf_qkv_rule(vision)]
    # Not padded: the first ranks hold one word more, where the ranks do not divide the vocabulary.
    whole_words = TensorCut(0, uneven=True)
    return MegatronModel(
        towers=(TEXT, VISION),
        depths={"text": text["num_hidden_layers"], "vision": vision["num_hidden_layers"]},
        rules=[*rules, *_text_rules(text)],
        cuts={**text_cuts(text), EMBEDDING: whole_words, HEAD: whole_words, **_vision_cuts(vision)},
        tied_head=has_tied_head(config, section),
        vocabulary=text["vocab_size"],
    )


def _hf_qkv_rule(vision: Config) -> KeyRule:
    at = "vision_tower.encoder.layer.{n}.attention."
    parts = [f"{at}q_proj.{{p}}", f"{at}k_proj.{{p}}", f"{at}v_proj.{{p}}"]
    return KeyRule(parts, _QKV, (Concat(0, (vision["hidden_size"],) * 3),))


def _text_rules(text: Config) -> list[KeyRule]:
    if text.get("model_type") != "internlm2":
        return text_rules(text, "language_model.model.", "language_model.lm_head")
    hub = "language_model.model."
    gate, up = f"{hub}layers.{{n}}.feed_forward.w1.{{p}}", f"{hub}layers.{{n}}.feed_forward.w3.{{p}}"
    return [
        *renamings(_INTERNLM2, hub, end=""),
        KeyRule("language_model.output.weight", HEAD),
        KeyRule([gate, up], f"{LAYER}mlp.linear_fc1.{{p}}", (Concat(0),)),
    ]


def _vision_cuts(vision: Config) -> dict[str, TensorCut]:
    heads = vision["num_attention_heads"]
    return {
        _QKV: TensorCut(0, parts=3, units=heads, uneven=True),
        f"{_LAYER}self_attention.linear_proj.weight": TensorCut(1, units=heads, uneven=True),
        **mlp_cuts(f"{_LAYER}mlp."),
    }


INTERNVL = MegatronFamily("InternVL", ("internvl_chat", "internvl"), _describe)
