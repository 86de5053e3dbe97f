"""What families share: the language model of the Llama kind (`text_decoder`), and the picture encoder of the Qwen kind
(`image_encoder`), which Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni and Qwen3-VL have; as MindSpeed-MM names, merges and cuts
them.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/{qwen2vl,qwen2_5vl}.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm.checkpoint.key_ops import Concat, Interleave, Split
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.megatron.family import EMBEDDING, FINAL_NORM, HEAD, Config, PipelineTower, TensorCut
from mindspeed_mm.core.json_file import JsonObject

# --- the language model -----------------------------------------------------------------------------------------------


LAYER = "text_decoder.decoder.layers.{n}."
_QKV = ("q_proj.{p}", "k_proj.{p}", "v_proj.{p}")


def text_rules(config: Config, hub: str, head: str, *, canonical: bool = False) -> list[KeyRule]:
    """All tensors of a decoder without experts.

    Args:
        config: Of the language model.
        hub: What its names on the hub begin with: `model.`.
        head: The head's name on the hub, without `.weight`.
        canonical: Queries, keys and values, and gates and ups, stay apart.
    """
    return [
        *end_rules(hub, head),
        *norm_rules(hub),
        *attention_rules(config, hub, canonical=canonical),
        *gated_mlp_rules(f"{hub}layers.{{n}}.mlp.", f"{LAYER}mlp.", canonical=canonical),
    ]


def end_rules(hub: str, head: str) -> list[KeyRule]:
    """Embedding, final norm and head."""
    return [
        KeyRule(f"{hub}embed_tokens.weight", EMBEDDING),
        KeyRule(f"{hub}norm.weight", FINAL_NORM),
        KeyRule(f"{head}.weight", HEAD),
    ]


def norm_rules(hub: str) -> list[KeyRule]:
    """The norms before attention and before the MLP."""
    return [
        KeyRule(f"{hub}layers.{{n}}.input_layernorm.weight", f"{LAYER}input_layernorm.weight"),
        KeyRule(f"{hub}layers.{{n}}.post_attention_layernorm.weight", f"{LAYER}pre_mlp_layernorm.weight"),
    ]


def attention_rules(config: Config, hub: str, *, canonical: bool = False) -> list[KeyRule]:
    """Queries, keys and values become one tensor: of each group of a key, its queries, the key, its values."""
    layer, own = f"{hub}layers.{{n}}.self_attn.", f"{LAYER}self_attention."
    rules = [
        KeyRule(f"{layer}o_proj.{{p}}", f"{own}linear_proj.{{p}}"),
        KeyRule(f"{layer}q_norm.weight", f"{own}q_layernorm.weight"),
        KeyRule(f"{layer}k_norm.weight", f"{own}k_layernorm.weight"),
    ]
    if canonical:
        return [*rules, *_kept(_QKV, layer, own)]
    interleave = Interleave(0, key_value_heads(config), head_sizes(config))
    return [*rules, KeyRule([layer + name for name in _QKV], f"{own}linear_qkv.{{p}}", (interleave,))]


def gated_mlp_rules(hub: str, own: str, *, canonical: bool = False) -> list[KeyRule]:
    """Gate and up become one tensor, [gate; up].

    Args:
        hub: What the names on the hub begin with, up to and with `mlp.`.
        own: What Megatron's begin with.
        canonical: They stay apart.
    """
    names = ["gate_proj.{p}", "up_proj.{p}"]
    down = KeyRule(f"{hub}down_proj.{{p}}", f"{own}linear_fc2.{{p}}")
    if canonical:
        return [*_kept(names, hub, own), down]
    return [KeyRule([f"{hub}{name}" for name in names], f"{own}linear_fc1.{{p}}", (Concat(0),)), down]


def _kept(names: Sequence[str], hub: str, own: str) -> list[KeyRule]:
    return [KeyRule(f"{hub}{name}", f"{own}{name}") for name in names]


def text_cuts(config: Config) -> dict[str, TensorCut]:
    """Of all tensors that `text_rules` makes, canonical or not."""
    # A group of a key with its queries is the unit: a rank's queries need their key.
    attention, by_group = f"{LAYER}self_attention.", TensorCut(0, units=key_value_heads(config))
    return {
        EMBEDDING: TensorCut(0, padded=True),
        HEAD: TensorCut(0, padded=True),
        f"{attention}linear_qkv.{{p}}": by_group,
        f"{attention}q_proj.{{p}}": by_group,
        f"{attention}k_proj.{{p}}": by_group,
        f"{attention}v_proj.{{p}}": by_group,
        f"{attention}linear_proj.weight": TensorCut(1, units=key_value_heads(config)),
        **gated_mlp_cuts(f"{LAYER}mlp."),
    }


def gated_mlp_cuts(own: str) -> dict[str, TensorCut]:
    """Of all tensors that `gated_mlp_rules` makes, canonical or not."""
    return {
        f"{own}linear_fc1.{{p}}": TensorCut(0, parts=2),
        f"{own}gate_proj.{{p}}": TensorCut(0),
        f"{own}up_proj.{{p}}": TensorCut(0),
        f"{own}linear_fc2.weight": TensorCut(1),
    }


def mlp_cuts(own: str) -> dict[str, TensorCut]:
    """Of an MLP without gate: `linear_fc1` by columns, `linear_fc2` by rows.

    Args:
        own: What Megatron's names begin with, with the dot.
    """
    return {f"{own}linear_fc1.{{p}}": TensorCut(0), f"{own}linear_fc2.weight": TensorCut(1)}


def key_value_heads(config: Config) -> int:
    """Groups of a key with its queries."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def head_sizes(config: Config) -> tuple[int, int, int]:
    """Rows of queries, keys and values."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    keys = width * key_value_heads(config)
    return width * config["num_attention_heads"], keys, keys


def text_config(config: Config, section: str = "text_config") -> JsonObject:
    """Of the language model: a section of its own, or the numbers at the top as older folders have them."""
    return {**config, **(config.get(section) or {})}


def has_tied_head(config: Config, section: str = "text_config") -> bool:
    """Whether the head is the embedding: the model's word counts before its language model's."""
    own = config.get("tie_word_embeddings")
    if own is None:
        own = (config.get(section) or {}).get("tie_word_embeddings")
    return bool(own)


# --- the picture encoder ----------------------------------------------------------------------------------------------


BLOCK = "image_encoder.encoder.blocks.layers.{n}."
PROJECTOR = "image_encoder.projector."

VISION = PipelineTower(
    name="vision",
    prefix="image_encoder.",
    layers="image_encoder.encoder.blocks.layers.",
    first=("image_encoder.encoder.patch_embed.",),
    last=(PROJECTOR,),
)


def block_rules(hub: str) -> list[KeyRule]:
    """Patches, norms and output projections.

    Args:
        hub: What the tower's names on the hub begin with: `visual.`.
    """
    return [
        KeyRule(f"{hub}patch_embed.proj.{{p}}", "image_encoder.encoder.patch_embed.proj.{p}"),
        KeyRule(f"{hub}blocks.{{n}}.norm1.{{p}}", f"{BLOCK}input_layernorm.{{p}}"),
        KeyRule(f"{hub}blocks.{{n}}.norm2.{{p}}", f"{BLOCK}pre_mlp_layernorm.{{p}}"),
        KeyRule(f"{hub}blocks.{{n}}.attn.proj.{{p}}", f"{BLOCK}self_attention.linear_proj.{{p}}"),
    ]


def fused_qkv_rule(hub: str, width: int, heads: int, *, canonical: bool = False) -> KeyRule:
    """[Q|K|V] of the hub becomes each head's query, key and value; canonical keeps the hub's order."""
    sizes = (width,) * 3
    ops = () if canonical else (Split(0, sizes), Interleave(0, heads, sizes))
    return KeyRule(f"{hub}blocks.{{n}}.attn.qkv.{{p}}", f"{BLOCK}self_attention.linear_qkv.{{p}}", ops)


def merger_rules(hub: str) -> list[KeyRule]:
    """The merger of Qwen2-VL and its successors up to Qwen2.5-Omni."""
    return [
        KeyRule(f"{hub}merger.ln_q.{{p}}", f"{PROJECTOR}layernorm.{{p}}"),
        KeyRule(f"{hub}merger.mlp.0.{{p}}", f"{PROJECTOR}encoder.linear_fc1.{{p}}"),
        KeyRule(f"{hub}merger.mlp.2.{{p}}", f"{PROJECTOR}encoder.linear_fc2.{{p}}"),
    ]


def attention_cuts(heads: int, *, canonical: bool = False) -> dict[str, TensorCut]:
    """Of the attention and the projector. Canonical: MindSpeed-MM cuts [Q|K|V] as if it were any matrix."""
    return {
        f"{BLOCK}self_attention.linear_qkv.{{p}}": TensorCut(0, units=None if canonical else heads),
        f"{BLOCK}self_attention.linear_proj.weight": TensorCut(1, units=heads),
        **mlp_cuts(f"{PROJECTOR}encoder."),
    }
