"""Rotary positions: how many tokens they reach, and from where on rows of a batch change one another's."""

from mindspeed_mm.fsdp.utils.model_parts import longest_of, rope_border

__all__ = ["longest_of", "rope_border"]
