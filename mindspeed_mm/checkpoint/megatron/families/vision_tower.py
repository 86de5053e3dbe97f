"""The picture encoder of the Qwen kind, which Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni and Qwen3-VL share, as MindSpeed-MM's
`image_encoder` names and cuts it.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import Interleave, Split
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.megatron.cut import TensorCut
from mindspeed_mm.checkpoint.megatron.families.text_decoder import mlp_cuts
from mindspeed_mm.checkpoint.megatron.family import PipelineTower

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
