"""A batch that nobody has: what a sample of so many tokens, images, frames and seconds of sound would be made of.

Only what lengths are read from is there, without values, so that the same code counts it as counts a real batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.tools.flops_tool.units import MEDIA, SOUND_TOKENS, Lengths

FRAMES_PER_S = 100
"""Frames of a spectrum per second: one every 10 ms, as in Whisper and its descendants."""


_FRAMES_OF_A_CLIP_PER_S = 24.0


@dataclass(frozen=True)
class SampleShape:
    """What each sample of a batch is."""

    tokens: int = 0
    """With those that stand for media."""
    labels: int | None = None
    """None: all tokens but those of media."""
    images: int = 0
    height: int = 0
    width: int = 0
    frames: int = 1
    """Frames of each image; more than one make it a video."""
    sound_s: float = 0.0


def imagined_batch(model: nn.Module, sample: SampleShape, samples: int) -> Batch:
    """A batch of equal samples for a model.

    Raises:
        ConfigError: The sample is none that the model takes.
    """
    adapter = facts_of(model).adapter
    if adapter is not None:
        return _denoised(adapter, sample, samples)
    config: Any = model.config
    if sample.tokens < 1:
        raise ConfigError("a language model needs the length of a sample", key="--seq", way_out="Give it, in tokens.")
    if getattr(config, "is_encoder_decoder", False):
        ids = torch.zeros(samples, sample.tokens, dtype=torch.long)
        batch: Batch = {"decoder_input_ids": ids, "input_ids": ids}
        if hasattr(config, "max_source_positions"):
            frames = 2 * config.max_source_positions
            batch["input_features"] = torch.empty(samples, config.num_mel_bins, frames, device="meta")
    else:
        batch = {"input_ids": torch.zeros(samples, sample.tokens, dtype=torch.long)}
        batch |= _seen(model, sample, samples) | _heard(model, sample, samples)
    return batch


def with_labels(batch: Batch, lengths: Lengths, sample: SampleShape, samples: int) -> Batch:
    """The batch with rows for the output head.

    Raises:
        ConfigError: The media have more tokens than the sample.
    """
    if "latents" in batch:
        return batch
    of_media = int(sum(sum(lengths.get(name, ())) for name in (MEDIA, SOUND_TOKENS)))
    if of_media > samples * sample.tokens:
        raise ConfigError(
            f"the media of a sample are {of_media // samples} tokens, more than the sample has",
            key="--seq",
            way_out=f"Give at least {of_media // samples}, or smaller media.",
        )
    labels = samples * sample.labels if sample.labels is not None else samples * sample.tokens - of_media
    return batch | {"_rows": torch.empty(labels, device="meta")}


def _denoised(adapter: Any, sample: SampleShape, samples: int) -> Batch:
    if not sample.height:
        raise ConfigError("a generator needs the size of a sample", key="--image-size", way_out="Give HEIGHTxWIDTH.")
    size = MediaSize(sample.frames, sample.height, sample.width)
    adapter.require("vae")  # sizes follow from it
    adapter.geometry.check(size, key="--image-size")
    batch: Batch = {
        "latents": torch.empty(samples, *adapter.geometry.latent_shape(size), device="meta"),
        "prompt_embeds": torch.empty(samples, sample.tokens or adapter.text_tokens, 1, device="meta"),
    }
    batch |= {
        key: torch.empty(samples, *shape, device="meta")
        for key, shape in adapter.further_shapes(size.frames, _FRAMES_OF_A_CLIP_PER_S).items()
    }
    if adapter.transformer_config.get("image_dim") is not None:
        vision = adapter.component_config("image_encoder")
        patches = (vision.get("image_size", 224) // vision.get("patch_size", 14)) ** 2 + 1
        batch["image_embeds"] = torch.empty(samples, patches, 1, device="meta")
    return batch


def _seen(model: Any, sample: SampleShape, samples: int) -> Batch:
    count = samples * sample.images
    if not count:
        return {}
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        raise ConfigError("the model sees no images", key="--images", way_out="Leave it out.")
    patch = _first(vision.patch_size)
    merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_kernel_size", None)
    if merge is not None:
        height, width = (_squares(side, patch * _first(merge)) * _first(merge) for side in _sides(sample))
        times = -(-sample.frames // (getattr(vision, "temporal_patch_size", 1) or 1))
        name = "image_grid_thw" if sample.frames == 1 else "video_grid_thw"
        return {name: torch.tensor([[times, height, width]] * count)}
    if getattr(vision, "model_type", "") == "pixtral":
        height, width = _sides(sample)
        sizes = torch.tensor([[height, width]] * count)
        return {"pixel_values": torch.empty(count, 3, height, width, device="meta"), "image_sizes": sizes}
    side = getattr(vision, "image_size", None)
    if side is None:
        raise ConfigError("it is not known how this model represents an image", key="--images", way_out="Leave it out.")
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    if sample.height and (sample.height, sample.width) != (height, width):
        raise ConfigError(
            f"the model takes images of {height}x{width}",
            key="--image-size",
            way_out="Leave it out, and count the tiles of an image as --images.",
        )
    return {"pixel_values": torch.empty(count * sample.frames, 3, height, width, device="meta")}


def _heard(model: Any, sample: SampleShape, samples: int) -> Batch:
    if not sample.sound_s:
        return {}
    audio = getattr(model.config, "audio_config", None)
    if audio is None or not hasattr(audio, "num_mel_bins"):
        raise ConfigError("the model takes no audio", key="--audio", way_out="Leave it out.")
    frames = round(sample.sound_s * FRAMES_PER_S)
    features = torch.empty(samples, audio.num_mel_bins, frames, device="meta")
    return {"input_features": features, "feature_attention_mask": torch.ones(samples, frames, dtype=torch.long)}


def _sides(sample: SampleShape) -> tuple[int, int]:
    if not sample.height:
        raise ConfigError("the model takes images of any size", key="--image-size", way_out="Give HEIGHTxWIDTH.")
    return sample.height, sample.width


def _squares(pixels: int, side: int) -> int:
    """Merged squares along a side, as processors round."""
    return max(1, round(pixels / side))


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)
