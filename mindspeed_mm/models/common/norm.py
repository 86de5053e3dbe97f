"""Norms: torch's, whose weights the engine initialises with 1 and does not decay."""

from torch.nn import GroupNorm, LayerNorm, RMSNorm

__all__ = ["GroupNorm", "LayerNorm", "RMSNorm"]
