"""The attention function `mm_context`, registered with transformers: attention over a spread sequence where the call
brings a share of one, and `mm_varlen` where it does not. Plain layers go through ring and Ulysses; those that do more
than plain softmax attention (sliding windows, sinks, a softcap), which neither computes, gather the keys.

There, ranks hold the queries of their tokens only, so the scores of a layer are spread as ever; keys and values of the
whole sequence are on every rank while it runs. A query's keys are an interval of its own document: no mask of the
sequence is ever built, only that of a run of queries and the keys that it reaches.

Shapes: B rows, H heads, K key-value heads (K divides H), T tokens of this rank, L tokens of all ranks, D head width, Dv
width of values, t queries and s keys of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.ops.attention import AttentionError, check_window, varlen_attention, varlen_mask
from mindspeed_mm.fsdp.ops.context_attention.block_kernels import NEVER
from mindspeed_mm.fsdp.ops.context_attention.layer import check_lengths
from mindspeed_mm.fsdp.ops.context_attention.layout import Interval, SequenceLayout
from mindspeed_mm.fsdp.ops.context_attention.share import ContextShare
from mindspeed_mm.fsdp.ops.host_values import outside_graphs

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
    others: JsonObject,
) -> AttentionRule:
    """What a layer computes; a window that is no shorter than the longest document is left out.

    Raises:
        AttentionError: It asks for a mask of its own, dropout, or a window that goes both ways, or is a sliding layer
            that brings no window.
    """
    causal = others.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    window, scale = others.get("sliding_window"), others.get("scaling")
    if causal:
        check_window(module, window)
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


# --- layers whose keys are gathered -----------------------------------------------------------------------------------


LONGEST_RUN = 512
"""Queries at a time of a layer with a shorter window: they reach few keys beside their own."""


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """What an attention layer computes: which keys a query sees, and how scores become weights."""

    causal: bool
    """A token sees itself and those before it in its document; otherwise the whole document."""
    scale: float
    """Factor on the scores."""
    window: int | None = None
    """Tokens that one sees, itself included; only where `causal`."""
    sinks: Tensor | None = None
    """(H,) learned logits that take part in the softmax and carry no value."""
    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap)."""

    @property
    def is_plain(self) -> bool:
        """Whether it is causal or full attention and nothing else."""
        return self.window is None and self.sinks is None and self.softcap is None


def gathered_attention(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, share: ContextShare, rule: AttentionRule
) -> Tensor:
    """Exact self-attention of a spread sequence by any rule, (B, T, H, Dv).

    Every rank of the context group calls it. Gradients of keys and values are summed over ranks; those of parameters
    (sinks) are those of own queries, a part of the sum.

    Raises:
        LayoutError: A tensor does not have the tokens that the layout gives this rank.
    """
    for tensor in (q_BTHD, k_BTKD):
        check_lengths(tensor, share.layout, share.groups)
    kv_BLKD = share.gather(torch.cat([k_BTKD, v_BTKD], dim=-1), 1, sum_gradients=True)
    k_BKLD, v_BKLD = kv_BLKD.transpose(1, 2).split([k_BTKD.shape[-1], v_BTKD.shape[-1]], dim=-1)
    q_BHTD, place, outputs = q_BTHD.transpose(1, 2), 0, []
    for (start, stop), (first, last) in reaches(share.layout, share.groups.ring_rank, share.groups.ulysses_rank, rule):
        run = q_BHTD[:, :, place : place + stop - start]
        seen = seen_keys((start, stop), (first, last), rule, run.device)
        outputs.append(attend(run, k_BKLD[:, :, first:last], v_BKLD[:, :, first:last], seen, rule))
        place += stop - start
    if not outputs:  # no query here: an empty product keeps this rank in the others' backward pass
        nothing = q_BHTD[..., :1] * v_BKLD[:, :1, :1]
        if rule.sinks is not None:
            nothing = nothing + rule.sinks.view(1, -1, 1, 1)
        outputs.append(nothing)
    return torch.cat(outputs, dim=2).transpose(1, 2)


def reaches(
    layout: SequenceLayout, ring_rank: int, ulysses_rank: int, rule: AttentionRule
) -> Iterator[tuple[Interval, Interval]]:
    """Runs of a rank's queries, in its order, and the keys that each reaches, as places in the sequence. Pure."""
    for document, start, stop, _ in layout.segments(ring_rank, ulysses_rank):
        first, last = layout.borders[document : document + 2]
        if not rule.causal:
            yield (start, stop), (first, last)
            continue
        if rule.window is None:
            yield (start, stop), (first, stop)
            continue
        # Runs as long as the window or longer: each reaches back over one window, however long the document is.
        step = max(rule.window, LONGEST_RUN)
        for run in range(start, stop, step):
            end = min(run + step, stop)
            yield (run, end), (max(first, run + 1 - rule.window), end)


def seen_keys(queries: Interval, keys: Interval, rule: AttentionRule, device: torch.device) -> Tensor | None:
    """(t, s) bool: which keys of an interval each query sees; None where it is all of them."""
    if not rule.causal:
        return None
    distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)[None]
    if rule.window is None:
        return distance >= 0
    return (distance >= 0) & (distance < rule.window)


def attend(q_BHtD: Tensor, k_BKsD: Tensor, v_BKsD: Tensor, seen: Tensor | None, rule: AttentionRule) -> Tensor:
    """(B, H, t, Dv); by torch's fused attention where the rule has a mask only, else written out."""
    if rule.sinks is None and rule.softcap is None:
        groups = q_BHtD.shape[1] // k_BKsD.shape[1]
        k, v = (tensor.repeat_interleave(groups, dim=1) for tensor in (k_BKsD, v_BKsD))
        return F.scaled_dot_product_attention(q_BHtD, k, v, attn_mask=seen, scale=rule.scale)
    exact = torch.promote_types(q_BHtD.dtype, torch.float32)
    q_BKGtD = q_BHtD.unflatten(1, (k_BKsD.shape[1], -1)).to(exact)
    scores = torch.einsum("bkgtd,bksd->bkgts", q_BKGtD, k_BKsD.to(exact)) * rule.scale
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    if seen is not None:
        scores = scores.masked_fill(~seen, NEVER)
    if rule.sinks is not None:
        sinks = rule.sinks.to(exact).view(1, *q_BKGtD.shape[1:3], 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    probabilities = scores.softmax(-1)[..., : k_BKsD.shape[2]]
    return torch.einsum("bkgts,bksd->bkgtd", probabilities, v_BKsD.to(exact)).flatten(1, 2).to(q_BHtD.dtype)
