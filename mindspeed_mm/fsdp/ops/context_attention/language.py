"""The attention function `mm_context`, registered with transformers: attention over a spread sequence where the call
brings a share of one, and `mm_varlen` where it does not. Plain layers go through ring and Ulysses; those with windows,
sinks or a softcap gather the keys.

Shapes: B rows, H heads, K key-value heads, T tokens of this rank, D head width, Dv width of values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mindspeed_mm.fsdp.ops.attention import AttentionError, varlen_attention, varlen_mask
from mindspeed_mm.fsdp.ops.context_attention.gathered import AttentionRule, gathered_attention
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from mindspeed_mm.fsdp.ops.graph_borders import outside_graphs

CONTEXT_ATTENTION_NAME = "mm_context"
"""Never with "flash" in it: transformers would look for a kernel of that name."""


def register_context_attention() -> str:
    """Register `mm_context` with transformers and return the name, for `set_attn_implementation`. May be called
    again."""
    # transformers takes a second to import, and whoever builds a model has it already.
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(CONTEXT_ATTENTION_NAME, attend_to_share)
    AttentionMaskInterface.register(CONTEXT_ATTENTION_NAME, varlen_mask)
    return CONTEXT_ATTENTION_NAME


@outside_graphs
def attend_to_share(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    mm_context: ContextShare | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the signature that transformers calls.

    Args:
        module: The attention module; its `is_causal` counts when the argument is not given.
        query: (B, H, T, D).
        key: (B, K, T, D).
        value: (B, K, T, Dv).
        attention_mask: From `varlen_mask`; documents are the layout's.
        mm_context: The share; None where the sequence is whole on this rank.
        others: As `varlen_attention` takes them.

    Returns:
        (B, T, H, Dv), and None in the place of the attention weights.

    Raises:
        AttentionError: The layer asks for something that depends on more than the scores of a document.
    """
    if mm_context is None:
        return varlen_attention(module, query, key, value, attention_mask, **others)
    rule = rule_of(module, query, attention_mask, mm_context, others)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if rule.is_plain:
        return mm_context.attend(q, k, v, causal=rule.causal, scale=rule.scale), None
    return gathered_attention(q, k, v, mm_context, rule), None


def rule_of(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    share: ContextShare,
    others: dict[str, Any],
) -> AttentionRule:
    """What a layer computes; a window that is no shorter than the longest document is left out.

    Raises:
        AttentionError: It asks for a mask of its own, dropout, or a window that goes both ways.
    """
    causal = others.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    window, scale = others.get("sliding_window"), others.get("scaling")
    if window is not None and window >= share.layout.longest_document:
        window = None
    asked = {
        "a mask of its own": attention_mask is not None and attention_mask.numel() > 0,
        "dropout": bool(others.get("dropout")),
        f"a window of {window} tokens to both sides": window is not None and not causal,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise AttentionError(
                f"a layer asks for attention with {what}, which a sequence spread over ranks does not have",
                key="parallel.ring_attention_size · parallel.ulysses_parallel_size",
                way_out="Set both sizes to 1.",
            )
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return AttentionRule(causal, scale, window, others.get("s_aux"), others.get("softcap"))
