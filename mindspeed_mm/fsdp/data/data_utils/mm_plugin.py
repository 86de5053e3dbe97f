"""How media become token ids and tensors: one plugin for each kind of processor.

A plugin turns one image into the ids that take the place of its placeholder and the tensors that the model's tower
wants, and joins the tensors of a batch. `register_mm_plugin` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.qwen_patches import PatchGrid, build_patch_grid
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

MM_PLUGINS = Registry("data.dataset_param.preprocess_parameters.mm_plugin")


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """One image, encoded."""

    token_ids: np.ndarray
    """What replaces the image's placeholder token."""
    tensors: dict[str, Any]
    """What the plugin's `collate` joins."""


class MediaPlugin(Protocol):
    """Encodes the media of one processor."""

    image_token_id: int | None
    """The placeholder token that the chat template writes for an image; None where the model takes no images."""

    def encode_image(self, image: Image.Image) -> ImageFeatures:
        """Encode an RGB image. Raises `DataError` for a size that the processor refuses."""

    def collate(self, images: Sequence[ImageFeatures]) -> dict[str, torch.Tensor]:
        """Join the tensors of a batch's images, in order, under the names that the model's `forward` takes."""


def register_mm_plugin(name: str) -> Callable[[type], type]:
    """Decorator that files a plugin class under a processor's class name; it is called with (processor, preprocess)."""
    return MM_PLUGINS.register(name)


def build_mm_plugin(processor: Any, preprocess: Any) -> MediaPlugin:
    """The plugin of a processor: by its class name, else by what it can do.

    Args:
        processor: Processor or tokenizer.
        preprocess: `preprocess_parameters`.
    """
    name = type(processor).__name__
    if name in MM_PLUGINS:
        return MM_PLUGINS.get(name)(processor, preprocess)
    if tokenizer_of(processor) is processor:
        return TextOnlyPlugin()
    grid = build_patch_grid(processor, preprocess)
    return QwenVLPlugin(processor, grid) if grid is not None else ProcessorPlugin(processor)


class TextOnlyPlugin:
    """Of a text model: it takes no media."""

    image_token_id: int | None = None

    def encode_image(self, image: Image.Image) -> ImageFeatures:
        """Refuse."""
        raise DataError("the row has an image, but the model takes text only")

    def collate(self, images: Sequence[ImageFeatures]) -> dict[str, torch.Tensor]:
        """Nothing to join."""
        return {}


class QwenVLPlugin:
    """Qwen2-VL to Qwen3.5 and their kin: patches cut directly, equal to the processor's own to the bit.

    Args:
        processor: The model's processor.
        grid: How its image processor sizes and cuts images.
    """

    def __init__(self, processor: Any, grid: PatchGrid) -> None:
        self.image_token_id: int | None = processor.image_token_id
        self._grid = grid

    def encode_image(self, image: Image.Image) -> ImageFeatures:
        """Patches as bytes; they become numbers for the whole batch at once."""
        patches, grid_thw = self._grid.cut(image)
        tokens = len(patches) // self._grid.merge_size**2
        return ImageFeatures(
            np.full(tokens, self.image_token_id, dtype=np.int64), {"patches": patches, "grid_thw": grid_thw}
        )

    def collate(self, images: Sequence[ImageFeatures]) -> dict[str, torch.Tensor]:
        """`pixel_values` (patches of all images, numbers of a patch) and `image_grid_thw` (images, 3)."""
        if not images:
            return {}
        return {
            "pixel_values": self._grid.normalise([image.tensors["patches"] for image in images]),
            "image_grid_thw": torch.tensor([image.tensors["grid_thw"] for image in images], dtype=torch.int64),
        }


class ProcessorPlugin:
    """Any other processor: it is asked for the tensors of an image and for the text that takes its place.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = tokenizer_of(processor)
        self.image_token_id: int | None = getattr(processor, "image_token_id", None)
        if self.image_token_id is None or not hasattr(processor, "replace_image_token"):
            raise ConfigError(
                f"{type(processor).__name__} does not say how an image becomes tokens",
                key="model.model_name_or_path",
                way_out="Write a plugin for it: `register_mm_plugin`.",
            )

    def encode_image(self, image: Image.Image) -> ImageFeatures:
        """Ask the processor."""
        try:
            features = dict(self._processor.image_processor([image], return_tensors="pt"))
        except ValueError as error:
            raise DataError(f"the processor refuses an image of {image.width} × {image.height}: {error}") from error
        text = self._processor.replace_image_token(features, 0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ImageFeatures(np.asarray(ids, dtype=np.int64), features)

    def collate(self, images: Sequence[ImageFeatures]) -> dict[str, torch.Tensor]:
        """Join along the first axis, that of images or patches."""
        if not images:
            return {}
        unused = set(getattr(self._processor, "unused_input_names", ()))
        try:
            return {
                name: torch.cat([torch.as_tensor(image.tensors[name]) for image in images])
                for name in images[0].tensors
                if name not in unused
            }
        except RuntimeError as error:
            sizes = {name: tuple(value.shape) for name, value in images[0].tensors.items()}
            raise DataError(f"images of a batch do not join (the first: {sizes}): {error}") from error
