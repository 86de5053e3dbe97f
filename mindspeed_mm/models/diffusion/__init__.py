"""Generators around their transformers: the adapter of a model folder, and the noise that it is trained with."""

from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.noise_paths import DiscretePath, FlowPath, NoisePath

__all__ = ["DiffusionAdapter", "DiffusionModel", "DiscretePath", "FlowPath", "NoisePath", "find_adapter"]


class DiffusionModel:
    """A name that MindSpeed-MM's scripts import. What it stands for there, noise and sampling in one object, is decided
    by the model's family here: making one raises `ConfigError`, which names what to use."""

    def __init__(self, config: Any = None) -> None:
        raise ConfigError(
            "noise and sampling are not built as a part: they belong to the model's family",
            key="diffusion",
            way_out="SoRAModel with pretrain_sora.py trains by this section (training.diffusion of a YAML); "
            "mindspeed_mm.models.diffusion.FlowPath gives noisy latents and targets; mm infer samples.",
        )
