"""The attention function `mm_varlen`, registered with transformers: packed rows without a dense mask, plain batches.

A packed row carries transformers' own names (`cu_seq_lens_q`, `max_length_q`, …) through the model's `**kwargs`;
documents never see each other. On an accelerator torch's variable-length flash kernel does the work where it can,
elsewhere a loop over documents: on a CPU it is faster than a dense mask at every size, and needs no T² memory.

Shapes: B rows, H heads, K key-value heads, T query tokens, S key tokens, D head width, Dv width of values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CellType

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.ops.flash_sinks import flash_with_sinks
from mindspeed_mm.fsdp.ops.forward_stack import Kwargs
from mindspeed_mm.fsdp.ops.host_values import facts_of_this_call, host_values, outside_graphs, read_facts
from mindspeed_mm.fsdp.ops.kernels_in_force import IN_FORCE, need_of
from mindspeed_mm.fsdp.ops.npu_attention import attend_npu, attend_npu_documents, fits_npu
from mindspeed_mm.fsdp.ops.windowed_attention import attend_in_blocks, pays_off, window_mask
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

ATTENTION_NAME = "mm_varlen"
"""Never with "flash" in it: transformers would look for a kernel of that name."""

_SINK_FEATURES = 8
"""Added to the width of heads: one would do, but fused kernels take widths that 8 divides."""

PADDING_KEY = "pad_tokens"
BORDER_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", PADDING_KEY)
"""What a packed row says of its documents; the last of them is `pad_tokens` long and only fills it up."""


def without_borders(kwargs: Kwargs) -> Kwargs:
    """Arguments without what a packed row says of its documents."""
    return {name: value for name, value in kwargs.items() if name not in BORDER_KEYS}


class AttentionError(MMError):
    """Attention was called in a way that would mix documents, or that it does not know."""


def register_attention() -> str:
    """Register `mm_varlen` with transformers and return the name, for `attn_implementation`. May be called again."""
    # transformers takes a second to import, and whoever builds a model has it already.
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, varlen_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, varlen_mask)
    return ATTENTION_NAME


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    two_way_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with the signature that transformers calls.

    Args:
        module: The attention module; its `is_causal` counts when the argument is not given.
        query: (B, H, T, D), B = 1 when packed.
        key: (B, K, S, D); K divides H.
        value: (B, K, S, Dv).
        attention_mask: From `varlen_mask`.
        dropout: Probability.
        scaling: Factor on the scores; default 1 / √D.
        is_causal: Whether a token sees only those before it.
        sliding_window: How many tokens it sees, itself included; None on full layers.
        s_aux: (H,) learned sink logits, which take part in the softmax and carry no value.
        cu_seq_lens_q: (documents + 1,) borders in the row, 0 first, T last. Given: the row is packed.
        cu_seq_lens_k: The same for keys.
        max_length_q: Longest document; None: read off the borders.
        max_length_k: The same for keys.
        two_way_window: How many tokens one sees before it, and how many behind it, itself included both times; where
            no order hides any.
        others: What models pass along and attention has no use for.

    Returns:
        (B, T, H, Dv), and None in the place of the attention weights.

    Raises:
        AttentionError: The borders belong to another row, come with a mask that they contradict, or are missing; a
            sliding layer brings no window; or a score transformation is asked for.
    """
    if others.get("softcap") is not None:
        raise AttentionError(f"{ATTENTION_NAME} has no softcap", way_out="Set model.attn_implementation: eager.")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    two_way = two_way_window is not None and not is_causal
    layer = _Layer(dropout, scaling, is_causal, two_way_window if two_way else sliding_window, s_aux, two_way)
    check_mask(attention_mask, packed=cu_seq_lens_q is not None)
    if is_causal and (attention_mask is None or attention_mask.numel() == 0):
        check_window(module, sliding_window)
    if cu_seq_lens_q is None:
        rows, tokens = len(query), query.shape[2]
        by_rows = layer.is_windowed(tokens, key.shape[2]) or (s_aux is not None and tokens == key.shape[2])
        if attention_mask is None and by_rows and layer.fits_flash(query, value):
            borders = torch.arange(0, (rows + 1) * tokens, tokens, device=query.device)
            return layer.attend_flash(query, key, value, borders, borders, tokens, tokens), None
        output = layer.attend(query, key, value, attention_mask)
        return output.transpose(1, 2).contiguous(), None
    if cu_seq_lens_k is None:
        cu_seq_lens_k = cu_seq_lens_q
    if layer.fits_flash(query, value):
        longest = (max_length_q or _longest(cu_seq_lens_q), max_length_k or _longest(cu_seq_lens_k))
        lengths = (cu_seq_lens_q, cu_seq_lens_k, *longest)
        return layer.attend_flash(query, key, value, *lengths), None
    output = layer.attend_documents(query, key, value, cu_seq_lens_q, cu_seq_lens_k)
    return output.transpose(1, 2).contiguous(), None


def varlen_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: object = None,
    **others: object,
) -> torch.Tensor | None:
    """The mask of a layer type, with the signature that transformers calls: None where the order of tokens says it all.

    A right-padded batch needs none either: under a causal order no token sees the padding after it, and what padding
    tokens compute is never read. Sliding layers bring their window to attention. Everything else gets transformers' own
    boolean mask (B, 1, T, S): left padding, decoding with a cache, two-way and chunked attention, composed masks.

    Returns:
        None; a mask; or the empty mark of a packed row, whose borders reach attention on another way.
    """
    causal = "allow_is_bidirectional_skip" not in others and not use_vmap and q_length == kv_length
    causal = causal and not _sees_ahead(others.get("mask_function"))
    windowed = local_size in (None, attribute_at(config, "sliding_window"))
    if causal and windowed:
        if attention_mask is None:
            # transformers forbids the skip when positions start again inside a row.
            if allow_is_causal_skip:
                return None
            return torch.empty(1, 1, 0, 0, dtype=torch.bool)
        if allow_is_causal_skip and is_right_padded(attention_mask):
            return None
    from transformers.masking_utils import sdpa_mask  # loaded by whoever calls this

    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        local_size=local_size,
        **others,
    )


def _sees_ahead(mask_function: object) -> bool:
    """Whether what transformers composed is the order of tokens or something else beside it, such as pictures whose
    tokens see each other both ways, and no documents: these would stand around the order of tokens."""
    from transformers.masking_utils import causal_mask_function  # loaded by whoever calls this

    if not attribute_at(mask_function, "__qualname__", "").startswith("or_masks."):
        return False
    closure: tuple[CellType, ...] = attribute_at(mask_function, "__closure__", ())
    return any(causal_mask_function in cell.cell_contents for cell in closure)


def is_right_padded(attention_mask: torch.Tensor) -> bool:
    """Whether every row of a (B, T) mask is ones, then zeros. Where the host did not say so, it waits for the mask."""
    return (facts_of_this_call(attention_mask) or read_facts(attention_mask)).is_right_padded


def check_borders(borders: list[int], tensor: torch.Tensor) -> None:
    """Raise `AttentionError` unless the borders span the tokens of (1, H, T, D): a tower that is handed the text's
    borders would otherwise cut its own tokens by them, and say nothing."""
    rows, tokens = tensor.shape[0], tensor.shape[2]
    if rows == 1 and borders[0] == 0 and borders[-1] == tokens:
        return
    raise AttentionError(
        f"document borders {borders[0]}…{borders[-1]} do not span a row of {tokens} tokens (rows: {rows})",
        way_out="A packed batch is one row. If a tower got the text's cu_seq_lens, take them out of its arguments.",
    )


def check_mask(attention_mask: torch.Tensor | None, *, packed: bool) -> None:
    """Raise `AttentionError` for a packed row without borders, and for borders beside a mask that knows none."""
    if attention_mask is None:
        return
    marked = attention_mask.numel() == 0
    if marked and not packed:
        raise AttentionError(
            "positions start again inside a row, but attention got no document borders",
            way_out="Give cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k beside position_ids. If the "
            "batch has them, the model loses them: its forward takes **kwargs and passes them down to attention.",
        )
    if packed and not marked:
        raise AttentionError(
            f"a packed row came with a mask of shape {tuple(attention_mask.shape)}",
            way_out="Leave attention_mask out of packed batches. Where the model makes this mask itself, set "
            "data.dataset_param.basic_parameters.packing to false.",
        )


def check_window(module: nn.Module, sliding_window: int | None) -> None:
    """Raise `AttentionError` for a layer that sees a window by its configuration, but is called without one.

    Where the order of tokens is the whole mask, the window comes as an argument only: without it the layer would see
    its whole document here, and its window under the masks of `sdpa`.

    Args:
        module: The attention module. `config.layer_types[layer_idx]` names its kind; without these nothing is known.
        sliding_window: What it was called with.
    """
    if sliding_window is not None or not attribute_at(module, "config.sliding_window"):
        return
    kinds, index = attribute_at(module, "config.layer_types", ()), attribute_at(module, "layer_idx", 0)
    if index >= len(kinds) or kinds[index] != "sliding_attention":
        return
    raise AttentionError(
        f"layer {index} is 'sliding_attention' in the configuration, but {type(module).__name__} calls attention "
        "without a window",
        key="model.attn_implementation",
        way_out="Pass sliding_window=config.sliding_window to the attention function in these layers. Without that, "
        "set model.attn_implementation: sdpa and data.dataset_param.basic_parameters.packing: false.",
    )


@dataclass(frozen=True)
class _Layer:
    """What one call of attention is asked to do, whatever kernel does it."""

    dropout: float
    scaling: float | None
    causal: bool
    window: int | None
    sinks: torch.Tensor | None
    two_way: bool = False
    """The window is of tokens before and behind."""

    @outside_graphs
    def attend_documents(
        self, q_1HTD: torch.Tensor, k_1KSD: torch.Tensor, v_1KSD: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
    ) -> torch.Tensor:
        """(1, H, T, Dv): every document on its own, those of equal length in one call, where all are without
        copies on the way in. The host knows the borders, or reads them in the first layer."""
        borders_q, borders_k = host_values(cu_q), host_values(cu_k)
        check_borders(borders_q, q_1HTD)
        check_borders(borders_k, k_1KSD)
        if self.sinks is None and fits_npu(q_1HTD, v_1KSD):
            return attend_npu_documents(q_1HTD, k_1KSD, v_1KSD, borders_q, borders_k, **self._for_npu(q_1HTD))
        lengths_q, lengths_k = np.diff(borders_q).tolist(), np.diff(borders_k).tolist()
        if len({*zip(lengths_q, lengths_k, strict=True)}) == 1 and lengths_q[0]:
            batch_q, batch_k, batch_v = (_by_document(row, len(lengths_q)) for row in (q_1HTD, k_1KSD, v_1KSD))
            output = self.attend(batch_q, batch_k, batch_v, None)
            joined = output.transpose(0, 1).reshape(1, output.shape[1], -1, output.shape[-1])
            # No view, as documents that are joined are none: compiled blocks would be compiled once more.
            return joined.clone(memory_format=torch.contiguous_format)
        # Not slices: the gradient of each of them would be as long as the row.
        q, k, v = (t.split(n, dim=2) for t, n in ((q_1HTD, lengths_q), (k_1KSD, lengths_k), (v_1KSD, lengths_k)))
        alike: dict[tuple[int, int], list[int]] = {}
        for number, lengths in enumerate(zip(lengths_q, lengths_k, strict=True)):
            if lengths[0]:
                alike.setdefault(lengths, []).append(number)
        outputs: dict[int, torch.Tensor] = {}
        for numbers in alike.values():
            batch_q, batch_k, batch_v = (_joined([documents[number] for number in numbers]) for documents in (q, k, v))
            outputs.update(zip(numbers, self.attend(batch_q, batch_k, batch_v, None).split(1), strict=True))
        return torch.cat([outputs[number] for number in sorted(outputs)], dim=2)

    def attend(
        self, q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """(B, H, T, Dv) by scaled dot-product attention. Fewer queries than keys are the last of them."""
        tokens, keys = q_BHTD.shape[2], k_BKSD.shape[2]
        causal = self.causal and tokens > 1 and mask is None
        if self.sinks is None and fits_npu(q_BHTD, v_BKSD):
            return attend_npu(q_BHTD, k_BKSD, v_BKSD, mask, **self._for_npu(q_BHTD) | {"causal": causal})
        window = keys if self.window is None else self.window
        cuts = keys > window and mask is None and (causal or self.two_way)
        if cuts and pays_off(keys, window, q_BHTD.device) and not self.dropout:
            return self._attend_in_blocks(q_BHTD, k_BKSD, v_BKSD, window)
        if cuts or (causal and keys > tokens):
            mask, causal = window_mask(tokens, keys, window, q_BHTD.device, two_way=self.two_way), False
        return self._attend(q_BHTD, k_BKSD, v_BKSD, mask, self.sinks, causal)

    @outside_graphs
    def _attend_in_blocks(
        self, q_BHTD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, window: int
    ) -> torch.Tensor:
        return attend_in_blocks(self._attend, q_BHTD, k_BKSD, v_BKSD, self.sinks, window, two_way=self.two_way)

    def _attend(
        self,
        q_BHTD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        mask: torch.Tensor | None,
        sinks_H: torch.Tensor | None,
        causal: bool = False,
    ) -> torch.Tensor:
        scale, groups = self._scale_of(q_BHTD), q_BHTD.shape[1] // k_BKSD.shape[1]
        if mask is not None or sinks_H is not None:
            k_BKSD, v_BKSD = k_BKSD.repeat_interleave(groups, dim=1), v_BKSD.repeat_interleave(groups, dim=1)
        if sinks_H is not None:
            return self._attend_with_sinks(q_BHTD, k_BKSD, v_BKSD, sinks_H, mask, causal, scale)
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=groups > 1 and mask is None,
        )

    def is_windowed(self, tokens: int, keys: int) -> bool:
        """Whether the window cuts a whole row short."""
        return (self.causal or self.two_way) and self.window is not None and tokens == keys > self.window

    def _scale_of(self, query: torch.Tensor) -> float:
        if self.scaling is None:
            return query.shape[-1] ** -0.5
        return self.scaling

    def _for_npu(self, query: torch.Tensor) -> JsonObject:
        scale = self._scale_of(query)
        dealt = {"causal": self.causal, "window": self.window, "two_way": self.two_way}
        return dealt | {"scale": scale, "dropout": self.dropout}

    def fits_flash(self, q_1HTD: torch.Tensor, v_1KSD: torch.Tensor) -> bool:
        """Whether the flash kernel in force takes this call by the borders of its documents."""
        if not q_1HTD.is_cuda or IN_FORCE.flash is None:
            return False
        return not IN_FORCE.flash.refuses(need_of(q_1HTD, v_1KSD, packed=True, dropout=self.dropout != 0.0))

    def attend_flash(
        self,
        q_BHTD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
    ) -> torch.Tensor:
        """(B, T, H, D) in one call, without reading the borders on the host. Rows stand one behind the other."""
        from torch.nn.attention.varlen import varlen_attn  # of use on an accelerator only

        groups, options = q_BHTD.shape[1] // k_BKSD.shape[1], {}
        if groups > 1 and takes_argument(varlen_attn, "enable_gqa"):
            options = {"enable_gqa": True}
        elif groups > 1:
            k_BKSD, v_BKSD = k_BKSD.repeat_interleave(groups, dim=1), v_BKSD.repeat_interleave(groups, dim=1)
        q_THD, k_THD, v_THD = (t.transpose(1, 2).flatten(0, 1) for t in (q_BHTD, k_BKSD, v_BKSD))
        window = (-1, -1)  # tokens before and behind that are seen; -1 is all of them
        if self.causal:
            window = (-1 if self.window is None else self.window - 1, 0)
        elif self.two_way and self.window is not None:
            window = (self.window - 1, self.window - 1)
        cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
        lengths = (cu_q, cu_k, max_q, max_k)
        if self.sinks is not None:
            output = flash_with_sinks(q_THD, k_THD, v_THD, self.sinks, lengths, window, self._scale_of(q_BHTD))
            return output.view(-1, q_BHTD.shape[2], *output.shape[1:])
        output = varlen_attn(q_THD, k_THD, v_THD, *lengths, scale=self.scaling, window_size=window, **options)
        return output.view(-1, q_BHTD.shape[2], *output.shape[1:])

    def _attend_with_sinks(
        self,
        q_BHTD: torch.Tensor,
        k_BHSD: torch.Tensor,
        v_BHSD: torch.Tensor,
        sinks_H: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        """Sinks by plain attention: a key in front whose score is the sink's logit and whose value is zero.

        Heads get more features, 1 in queries, 0 in keys and sink / scale in one of the key in front; values become as
        wide, as kernels want it. A query in front, dropped again, keeps the causal diagonal where it was.
        """
        batch, heads, _, width = q_BHTD.shape
        logits = (sinks_H.to(q_BHTD.dtype) / scale).view(1, heads, 1, 1).expand(batch, -1, -1, -1)
        q = F.pad(q_BHTD, (0, _SINK_FEATURES), value=1.0)
        k = torch.cat([F.pad(logits, (width, _SINK_FEATURES - 1)), F.pad(k_BHSD, (0, _SINK_FEATURES))], dim=2)
        is_as_wide = v_BHSD.shape[-1] == width
        v = F.pad(v_BHSD, (0, _SINK_FEATURES if is_as_wide else 0, 1, 0))
        if causal:
            q = F.pad(q, (0, 0, 1, 0))
        if mask is not None:
            seen = True if mask.dtype == torch.bool else 0.0
            mask = F.pad(mask, (1, 0), value=seen)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=causal, scale=scale
        )
        return output[:, :, int(causal) :, : v_BHSD.shape[-1]]


def _by_document(row_1HTD: torch.Tensor, documents: int) -> torch.Tensor:
    """(documents, H, T / documents, D): a row of documents of one length as a batch, without copying it."""
    return row_1HTD.squeeze(0).unflatten(1, (documents, -1)).transpose(0, 1)


def _joined(documents: list[torch.Tensor]) -> torch.Tensor:
    if len(documents) == 1:
        return documents[0]
    return torch.cat(documents)


def _longest(borders: torch.Tensor) -> int:
    return int(np.diff(host_values(borders)).max())


@cache
def takes_argument(function: Callable[..., object], name: str) -> bool:
    """Whether a function of torch has an argument of that name: releases that are supported differ, which is asked for,
    never told by a version. `varlen_attn` has `enable_gqa` since 2.13."""
    return name in inspect.signature(function).parameters
