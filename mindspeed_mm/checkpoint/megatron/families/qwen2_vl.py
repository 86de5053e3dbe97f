"""Qwen2-VL and Qwen2.5-VL, and the language model that they share with kin.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/{qwen2vl,qwen2_5vl}.py`.
"""

from __future__ import annotations

from typing import Any

from mindspeed_mm.checkpoint.keymap import Concat, Interleave, KeyRule, Split
from mindspeed_mm.checkpoint.megatron.cut import TensorCut
from mindspeed_mm.checkpoint.megatron.family import TEXT, Config, MegatronFamily, MegatronModel, PipelineTower

VISION = PipelineTower(
    name="vision",
    prefix="image_encoder.",
    layers="image_encoder.encoder.blocks.layers.",
    first=("image_encoder.encoder.patch_embed.",),
    last=("image_encoder.projector.",),
)


def text_rules(config: Config, hub: str, head: str, canonical: bool) -> list[KeyRule]:
    """Of a decoder of the Llama kind.

    Args:
        config: Of the language model.
        hub: What its names on the hub begin with: `model.`.
        head: The head's name on the hub, without `.weight`.
        canonical: Queries, keys and values, and gates and ups, stay apart.
    """
    layer, own = f"{hub}layers.{{n}}.", "text_decoder.decoder.layers.{n}."
    rules = [
        KeyRule(f"{hub}embed_tokens.weight", "text_decoder.embedding.word_embeddings.weight"),
        KeyRule(f"{hub}norm.weight", "text_decoder.decoder.final_layernorm.weight"),
        KeyRule(f"{head}.weight", "text_decoder.output_layer.weight"),
        KeyRule(f"{layer}input_layernorm.weight", f"{own}input_layernorm.weight"),
        KeyRule(f"{layer}post_attention_layernorm.weight", f"{own}pre_mlp_layernorm.weight"),
        KeyRule(f"{layer}self_attn.o_proj.{{p}}", f"{own}self_attention.linear_proj.{{p}}"),
        KeyRule(f"{layer}self_attn.q_norm.weight", f"{own}self_attention.q_layernorm.weight"),
        KeyRule(f"{layer}self_attn.k_norm.weight", f"{own}self_attention.k_layernorm.weight"),
        KeyRule(f"{layer}mlp.down_proj.{{p}}", f"{own}mlp.linear_fc2.{{p}}"),
    ]
    queries = [f"{layer}self_attn.{part}_proj.{{p}}" for part in "qkv"]
    gate_up = [f"{layer}mlp.{part}_proj.{{p}}" for part in ("gate", "up")]
    if canonical:
        rules += [
            KeyRule(name, f"{own}self_attention.linear_{part}.{{p}}") for name, part in zip(queries, "qkv", strict=True)
        ]
        rules += [
            KeyRule(name, f"{own}mlp.linear_fc1_{part}.{{p}}")
            for name, part in zip(gate_up, ("gate", "up"), strict=True)
        ]
        return rules
    interleave = Interleave(0, key_value_heads(config), head_sizes(config))
    rules.append(KeyRule(queries, f"{own}self_attention.linear_qkv.{{p}}", (interleave,)))
    rules.append(KeyRule(gate_up, f"{own}mlp.linear_fc1.{{p}}", (Concat(0),)))
    return rules


def text_cuts(config: Config) -> dict[str, TensorCut]:
    """Of a decoder of the Llama kind."""
    own, groups = "text_decoder.decoder.layers.{n}.", key_value_heads(config)
    return {
        "text_decoder.embedding.word_embeddings.weight": TensorCut(0, padded=True),
        "text_decoder.output_layer.weight": TensorCut(0, padded=True),
        f"{own}self_attention.linear_qkv.{{p}}": TensorCut(0, units=groups),
        **{f"{own}self_attention.linear_{part}.{{p}}": TensorCut(0, units=groups) for part in "qkv"},
        f"{own}self_attention.linear_proj.weight": TensorCut(1, units=groups),
        f"{own}mlp.linear_fc1.{{p}}": TensorCut(0, parts=2),
        **{f"{own}mlp.linear_fc1_{part}.{{p}}": TensorCut(0) for part in ("gate", "up")},
        f"{own}mlp.linear_fc2.weight": TensorCut(1),
    }


def key_value_heads(config: Config) -> int:
    """Groups of a key with its queries."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def head_sizes(config: Config) -> tuple[int, int, int]:
    """Rows of queries, keys and values."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width * config["num_attention_heads"], width * key_value_heads(config), width * key_value_heads(config)


def text_config(config: Config) -> dict[str, Any]:
    """Of the language model: a section of its own, or the numbers at the top as older folders have them."""
    return {**config, **(config.get("text_config") or {})}


def _describe(config: Config, canonical: bool) -> MegatronModel:
    text, vision = text_config(config), config["vision_config"]
    gated = config["model_type"] == "qwen2_5_vl"
    width = vision["hidden_size"] if gated else vision["embed_dim"]
    heads = vision["num_heads"]
    hub, own = "visual.blocks.{n}.", "image_encoder.encoder.blocks.layers.{n}."
    rules = [
        *text_rules(text, "model.", "lm_head", canonical),
        KeyRule("visual.patch_embed.proj.{p}", "image_encoder.encoder.patch_embed.proj.{p}"),
        KeyRule("visual.merger.ln_q.{p}", "image_encoder.projector.layernorm.{p}"),
        KeyRule("visual.merger.mlp.0.{p}", "image_encoder.projector.encoder.linear_fc1.{p}"),
        KeyRule("visual.merger.mlp.2.{p}", "image_encoder.projector.encoder.linear_fc2.{p}"),
        KeyRule(f"{hub}norm1.{{p}}", f"{own}input_layernorm.{{p}}"),
        KeyRule(f"{hub}norm2.{{p}}", f"{own}pre_mlp_layernorm.{{p}}"),
        KeyRule(f"{hub}attn.proj.{{p}}", f"{own}self_attention.linear_proj.{{p}}"),
        KeyRule(
            f"{hub}attn.qkv.{{p}}",
            f"{own}self_attention.linear_qkv.{{p}}",
            (Split(0, (width,) * 3), Interleave(0, heads, (width,) * 3)),
        ),
    ]
    if gated:
        rules.append(
            KeyRule(
                [f"{hub}mlp.{part}_proj.{{p}}" for part in ("gate", "up")], f"{own}mlp.linear_fc1.{{p}}", (Concat(0),)
            )
        )
        rules.append(KeyRule(f"{hub}mlp.down_proj.{{p}}", f"{own}mlp.linear_fc2.{{p}}"))
    else:
        rules.append(KeyRule(f"{hub}mlp.fc{{i}}.{{p}}", f"{own}mlp.linear_fc{{i}}.{{p}}"))
    cuts = text_cuts(text) | {
        f"{own}self_attention.linear_qkv.{{p}}": TensorCut(0, units=heads),
        f"{own}self_attention.linear_proj.weight": TensorCut(1, units=heads),
        f"{own}mlp.linear_fc1.{{p}}": TensorCut(0, parts=2 if gated else 1),
        f"{own}mlp.linear_fc2.weight": TensorCut(1),
        "image_encoder.projector.encoder.linear_fc1.{p}": TensorCut(0),
        "image_encoder.projector.encoder.linear_fc2.weight": TensorCut(1),
    }
    return MegatronModel(
        towers=(TEXT, VISION),
        depths={"text": text["num_hidden_layers"], "vision": vision["depth"]},
        rules=rules,
        cuts=cuts,
        tied_head=bool(config.get("tie_word_embeddings")),
        vocabulary=text["vocab_size"],
    )


QWEN2_VL = MegatronFamily("Qwen2-VL", ("qwen2_vl",), _describe)
QWEN2_5_VL = MegatronFamily("Qwen2.5-VL", ("qwen2_5_vl",), _describe)
