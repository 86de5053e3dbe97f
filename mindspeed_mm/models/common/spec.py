"""The specification of a model: its blocks, ties, towers and output head, read off the model itself."""

from mindspeed_mm.fsdp.models.structure.spec import ModelSpec, find_blocks, resolve_spec

__all__ = ["ModelSpec", "find_blocks", "resolve_spec"]
