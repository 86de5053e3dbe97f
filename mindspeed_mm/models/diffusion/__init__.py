"""Generators around their transformers: the adapter of a model folder, and the noise that it is trained with."""

from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.noise_paths import DiscretePath, FlowPath, NoisePath

__all__ = ["DiffusionAdapter", "DiscretePath", "FlowPath", "NoisePath", "find_adapter"]
