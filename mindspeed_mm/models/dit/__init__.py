"""Diffusion transformers: diffusers' classes, built as a configuration names them."""

from mindspeed_mm.fsdp.models.diffusion.transformer import ExpertPair, build_transformer, transformer_weights

__all__ = ["ExpertPair", "build_transformer", "transformer_weights"]
