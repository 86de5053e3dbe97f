"""An imagined batch: what a sample of so many tokens, images, frames and seconds of sound would be made of.

Only what lengths are read from is there, without values, so that the same code counts it as counts a real batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.tools.flops_tool.media_lengths import side_of
from mindspeed_mm.fsdp.tools.flops_tool.units import MEDIA, SOUND_TOKENS, Lengths
from mindspeed_mm.fsdp.utils.model_parts import setting_of

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
        ConfigError: The model does not take such a sample.
    """
    adapter = facts_of(model).adapter
    if adapter is not None:
        return _denoised(adapter, sample, samples)
    if sample.tokens < 1:
        raise ConfigError("a language model needs the length of a sample", key="--seq", way_out="Give it, in tokens.")
    ids = torch.zeros(samples, sample.tokens, dtype=torch.long)
    if not setting_of(model.config, bool, "is_encoder_decoder"):
        return {"input_ids": ids} | _seen(model, sample, samples) | _heard(model, sample, samples)
    batch: Batch = {"decoder_input_ids": ids, "input_ids": ids}
    positions, bins = (setting_of(model.config, int, name) for name in ("max_source_positions", "num_mel_bins"))
    if positions is not None and bins is not None:  # the encoder hears, a spectrum of twice as many frames
        batch["input_features"] = torch.empty(samples, bins, 2 * positions, device="meta")
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
    labels = samples * sample.tokens - of_media
    if sample.labels is not None:
        labels = samples * sample.labels
    return batch | {"_rows": torch.empty(labels, device="meta")}


def _denoised(adapter: DiffusionAdapter, sample: SampleShape, samples: int) -> Batch:
    if not sample.height:
        raise ConfigError("a generator needs the size of a sample", key="--image-size", way_out="Give HEIGHTxWIDTH.")
    size = MediaSize(sample.frames, sample.height, sample.width)
    adapter.require("vae")  # sizes follow from it
    adapter.geometry.check(size, key="--image-size")
    latents = adapter.geometry.latent_shape(size)
    tokens = (sample.tokens or adapter.text_tokens) + adapter.seen_tokens(latents, ())
    batch: Batch = {
        "latents": torch.empty(samples, *latents, device="meta"),
        "prompt_embeds": torch.empty(samples, tokens, 1, device="meta"),
    }
    others = adapter.further_shapes(size.frames, _FRAMES_OF_A_CLIP_PER_S) | adapter.condition_shapes(latents)
    for key, shape in others.items():
        batch[key] = torch.empty(samples, *shape, device="meta")
    if adapter.transformer_config.get("image_dim") is not None:
        vision = adapter.component_config("image_encoder")
        # The squares of a CLIP tower, and its class token.
        patches = (vision.get("image_size", 224) // vision.get("patch_size", 14)) ** 2 + 1
        batch["image_embeds"] = torch.empty(samples, patches, 1, device="meta")
    return batch


def _seen(model: nn.Module, sample: SampleShape, samples: int) -> Batch:
    count = samples * sample.images
    if not count:
        return {}
    vision = setting_of(model.config, object, "vision_config")
    if vision is None:
        raise ConfigError(
            "the model sees no images: its configuration has no vision_config, by which they are counted",
            key="--images",
            way_out="Leave it out.",
        )
    patch, merge = side_of(vision, "patch_size"), side_of(vision, "spatial_merge_size", "merge_kernel_size")
    if setting_of(model.config, int, "vit_max_num_patch_per_side") is not None:
        merge = 1  # BAGEL's pictures of any size, a token for each patch
    if patch is not None and merge is not None:
        height, width = (_squares(side, patch * merge) * merge for side in _sides(sample))
        times = -(-sample.frames // (side_of(vision, "temporal_patch_size") or 1))  # rounded up
        name = "image_grid_thw" if sample.frames == 1 else "video_grid_thw"
        return {name: torch.tensor([[times, height, width]] * count)}
    fold = setting_of(model.config, int, "downsample_factor")
    if patch is not None and fold is not None:  # LFM2-VL: flat patches of pictures of any size
        height, width = (_squares(side, patch * fold) * fold for side in _sides(sample))
        shapes = torch.tensor([[height, width]] * count * sample.frames)
        pixels = torch.empty(len(shapes), height * width, 3 * patch**2, device="meta")
        return {"pixel_values": pixels, "spatial_shapes": shapes}
    if setting_of(vision, str, "model_type") == "pixtral":
        height, width = _sides(sample)
        sizes = torch.tensor([[height, width]] * count)
        return {"pixel_values": torch.empty(count, 3, height, width, device="meta"), "image_sizes": sizes}
    sides = setting_of(vision, Sequence, "image_size")
    side = setting_of(vision, int, "image_size")
    if sides is not None:
        height, width = sides
    elif side is not None:
        height = width = side
    else:
        raise ConfigError("it is not known how this model represents an image", key="--images", way_out="Leave it out.")
    if sample.height and (sample.height, sample.width) != (height, width):
        raise ConfigError(
            f"the model takes images of {height}x{width}",
            key="--image-size",
            way_out="Leave it out, and count the tiles of an image as --images.",
        )
    return {"pixel_values": torch.empty(count * sample.frames, 3, height, width, device="meta")}


def _heard(model: nn.Module, sample: SampleShape, samples: int) -> Batch:
    if not sample.sound_s:
        return {}
    bins = setting_of(setting_of(model.config, object, "audio_config"), int, "num_mel_bins")
    if bins is None:
        raise ConfigError("the model takes no audio", key="--audio", way_out="Leave it out.")
    frames = round(sample.sound_s * FRAMES_PER_S)
    features = torch.empty(samples, bins, frames, device="meta")
    return {"input_features": features, "feature_attention_mask": torch.ones(samples, frames, dtype=torch.long)}


def _sides(sample: SampleShape) -> tuple[int, int]:
    if not sample.height:
        raise ConfigError("the model takes images of any size", key="--image-size", way_out="Give HEIGHTxWIDTH.")
    return sample.height, sample.width


def _squares(pixels: int, side: int) -> int:
    """Merged squares along a side, as processors round."""
    return max(1, round(pixels / side))
