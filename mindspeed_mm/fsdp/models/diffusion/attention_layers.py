"""How diffusers calls the linear layers of an attention."""

from __future__ import annotations

_OWN = ("to_q", "to_k", "to_v", "to_out.0")
_OF_CAPTIONS = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Of captions that join in an attention."""


def layers_of(*attentions: str, with_captions: bool = False) -> tuple[str, ...]:
    """Patterns of the layers of some attentions, such as LoRA adapts.

    Args:
        attentions: Patterns of the attentions.
        with_captions: Also the layers of captions that join in.
    """
    layers = (*_OWN, *_OF_CAPTIONS) if with_captions else _OWN
    patterns: list[str] = []
    for attention in attentions:
        patterns += [f"{attention}.{layer}" for layer in layers]
    return tuple(patterns)
