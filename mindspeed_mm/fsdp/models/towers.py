"""Towers: the parts of a model that see images or video or hear sound, and the smallest input of zeros that runs them.

A sharded tower is gathered by all ranks together, so a rank whose batch lacks the modality runs it on such an input.
Zeros and never noise: what is multiplied by zero afterwards must be finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.fsdp.utils.device import current_device


@dataclass(frozen=True)
class Tower:
    """One modality of a model."""

    name: str
    """The modality: image, video or audio."""
    module: str
    """Name of the tower's module; several modalities may share one."""
    key: str
    """The batch key that feeds it."""
    decoder: str
    """Name of the module that takes `inputs_embeds`."""
    run: Callable[[nn.Module], Any]
    """Runs the tower of a model on the smallest legal input of zeros, returning what it hands to the decoder."""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        """Every tensor that the tower hands to the decoder, for the smallest legal input of zeros."""
        return flat_tensors(self.run(model))


def find_towers(model: nn.Module) -> list[Tower]:
    """The towers of a model. A model's own `get_towers() -> list[Tower]` wins; else known shapes of transformers."""
    own = getattr(model, "get_towers", None)
    if own is not None:
        return list(own())
    return [*_patch_towers(model), *_image_towers(model), *_audio_towers(model)]


def flat_tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a model output, nested however, each once."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        found = {id(tensor): tensor for item in output for tensor in flat_tensors(item)}
        return list(found.values())
    return []


def _patch_towers(model: nn.Module) -> list[Tower]:
    """Qwen-VL and GLM-4V style: flat patches of many images, with their grids. One merged patch is the least."""
    inner = getattr(model, "model", None)
    config = getattr(getattr(model, "config", None), "vision_config", None)
    parts = ("visual", "language_model", "get_image_features")
    sizes = ("spatial_merge_size", "patch_size", "temporal_patch_size", "in_channels")
    if not all(hasattr(inner, part) for part in parts) or not all(hasattr(config, size) for size in sizes):
        return []

    def run(whole: nn.Module, feature: str) -> Any:
        vision: Any = whole.config.vision_config
        merge = vision.spatial_merge_size
        numbers = vision.in_channels * _product(vision.temporal_patch_size) * _area(vision.patch_size)
        pixels = torch.zeros(merge * merge, numbers, device=current_device(), dtype=whole.model.visual.dtype)
        grid = torch.tensor([[1, merge, merge]], device=current_device())
        return getattr(whole.model, feature)(pixels, grid, return_dict=True)

    towers = [
        Tower("image", "model.visual", "pixel_values", "model.language_model", lambda m: run(m, "get_image_features"))
    ]
    if hasattr(inner, "get_video_features"):
        towers.append(
            Tower(
                "video",
                "model.visual",
                "pixel_values_videos",
                "model.language_model",
                lambda m: run(m, "get_video_features"),
            )
        )
    return towers


def _image_towers(model: nn.Module) -> list[Tower]:
    """LLaVA, InternVL and Gemma3 style: images of one fixed size, and nothing else."""
    inner = getattr(model, "model", None)
    config = getattr(getattr(model, "config", None), "vision_config", None)
    parts = ("vision_tower", "language_model", "get_image_features")
    if not all(hasattr(inner, part) for part in parts) or not hasattr(config, "image_size"):
        return []
    arguments = inspect.signature(inner.get_image_features).parameters.values()  # type: ignore[union-attr]
    if any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD and a.name != "pixel_values" for a in arguments):
        return []

    def run(whole: nn.Module) -> Any:
        vision: Any = whole.config.vision_config
        size = vision.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(
            1, vision.num_channels, height, width, device=current_device(), dtype=whole.model.vision_tower.dtype
        )
        return whole.model.get_image_features(pixels, return_dict=True)

    return [Tower("image", "model.vision_tower", "pixel_values", "model.language_model", run)]


def _audio_towers(model: nn.Module) -> list[Tower]:
    """Qwen-Omni and Qwen-ASR style: spectra, called with a mask of their real frames. One window of frames is enough;
    a tower without windows takes all of its frames at once."""
    inner = getattr(model, "model", None)
    config = getattr(getattr(model, "config", None), "audio_config", None)
    parts = ("audio_tower", "language_model", "get_audio_features")
    if not all(hasattr(inner, part) for part in parts) or not hasattr(config, "num_mel_bins"):
        return []
    names = list(inspect.signature(inner.get_audio_features).parameters)[:2]  # type: ignore[union-attr]
    if names not in (["input_features", "feature_attention_mask"], ["input_features", "input_features_mask"]):
        return []

    def run(whole: nn.Module) -> Any:
        audio: Any = whole.config.audio_config
        frames = 2 * getattr(audio, "n_window", getattr(audio, "max_source_positions", 0))
        dtype = whole.model.audio_tower.dtype
        features = torch.zeros(1, audio.num_mel_bins, frames, device=current_device(), dtype=dtype)
        mask = torch.ones(1, frames, device=current_device(), dtype=torch.long)
        return whole.model.get_audio_features(features, mask, return_dict=True)

    return [Tower("audio", "model.audio_tower", "input_features", "model.language_model", run)]


def _product(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _area(size: int | Sequence[int]) -> int:
    return size * size if isinstance(size, int) else size[0] * size[-1]
