"""What launch scripts call the layers that get adapters, and what these are called in the models of the libraries."""

from __future__ import annotations

from collections.abc import Sequence

_LANGUAGE = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's fused layers → the layers that they fuse."""
_WAN = {
    "proj_q": ("to_q",),
    "proj_k": ("to_k",),
    "proj_v": ("to_v",),
    "proj_qkv": ("to_q", "to_k", "to_v"),
    "proj_out": ("to_out.0",),
    "ffn.0": ("ffn.net.0.proj",),
    "ffn.2": ("ffn.net.2",),
}
"""Layers of generators → their names in diffusers."""


def adapter_targets(words: Sequence[str], is_generator: bool) -> list[str]:
    """Names of layers as the libraries have them; other words stay what they are."""
    table = _WAN if is_generator else _LANGUAGE
    names: dict[str, None] = {}
    for word in words:
        names |= dict.fromkeys(table.get(word, (word,)))
    return list(names)
