"""Image patches in the layout of the Qwen-VL image processors, cut straight from bytes.

The image processor of transformers gives the same numbers to the bit; for small images it spends ten times as long on
finding out what it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError

_PROCESSORS = frozenset({"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"})
_KEY = "data.dataset_param.preprocess_parameters"


@dataclass(frozen=True)
class PatchGrid:
    """Sizes and constants of a Qwen-VL image processor. P patches; a patch has 3 · T · p · p numbers."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    resample: Any
    mean: torch.Tensor
    """(3,) in units of bytes."""
    std: torch.Tensor

    def cut(self, image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Size an RGB image to whole blocks of patches and cut it.

        Returns:
            (P, 3 · p · p) bytes in the order of merge blocks, and the grid (time, height, width) in patches.

        Raises:
            DataError: The aspect ratio is beyond what the processor takes.
        """
        pixels_HWC = self._resized(image)
        p, m = self.patch_size, self.merge_size
        rows, columns = pixels_HWC.shape[0] // p, pixels_HWC.shape[1] // p
        blocks = pixels_HWC.reshape(rows // m, m, p, columns // m, m, p, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        return blocks.reshape(rows * columns, 3 * p * p), (1, rows, columns)

    def normalise(self, patches: Sequence[np.ndarray]) -> torch.Tensor:
        """Join the patches of several images: (P, 3 · T · p · p) numbers, each frame repeated T times."""
        bytes_ = torch.from_numpy(np.concatenate(patches) if len(patches) > 1 else patches[0])
        area = self.patch_size**2
        frames = bytes_.view(-1, 3, area).to(torch.float32)
        frames.sub_(self.mean[:, None]).div_(self.std[:, None])  # the processor's two operations, in its order
        repeated = frames.unsqueeze(2).expand(-1, 3, self.temporal_patch_size, area)
        return repeated.reshape(len(frames), 3 * self.temporal_patch_size * area)

    def _resized(self, image: Image.Image) -> np.ndarray:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # loaded with the processor

        factor = self.patch_size * self.merge_size
        try:
            height, width = smart_resize(
                image.height, image.width, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels
            )
        except ValueError as error:
            raise DataError(
                f"an image of {image.width} × {image.height} pixels is refused: {error}",
                way_out="Crop it or drop the row.",
            ) from error
        pixels = np.asarray(image)
        return pixels if (image.height, image.width) == (height, width) else self._interpolated(pixels, height, width)

    def _interpolated(self, pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
        from torchvision.transforms.v2 import functional as transforms  # loaded with the processor

        chw = torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).contiguous()
        resized = transforms.resize(chw, [height, width], interpolation=self.resample, antialias=True)
        return resized.permute(1, 2, 0).contiguous().numpy()


def build_patch_grid(processor: Any, preprocess: Any) -> PatchGrid | None:
    """The grid of a processor, or None when its image processor is of another kind or does not do all its steps.

    Args:
        processor: The model's processor.
        preprocess: `preprocess_parameters`: the pixel limits narrow those of the processor.
    """
    images = processor.image_processor
    if type(images).__name__ not in _PROCESSORS or not getattr(processor, "image_token_id", None):
        return None
    if not (images.do_resize and images.do_rescale and images.do_normalize):
        return None
    shortest, longest = pixel_limits(images.size, preprocess)
    per_byte = 1.0 / images.rescale_factor
    return PatchGrid(
        patch_size=images.patch_size,
        merge_size=images.merge_size,
        temporal_patch_size=images.temporal_patch_size,
        min_pixels=shortest,
        max_pixels=longest,
        resample=_interpolation(images.resample),
        mean=torch.tensor(images.image_mean) * per_byte,
        std=torch.tensor(images.image_std) * per_byte,
    )


def pixel_limits(size: Any, preprocess: Any) -> tuple[int, int]:
    """Least and most pixels of an image: the processor's own limits, narrowed by the configuration.

    A least size that the user did not write is left to the processor: inference with the exported folder sizes images
    by the processor alone, and must see what training saw.
    """
    shortest, longest = int(size["shortest_edge"]), int(size["longest_edge"])
    longest = min(longest, preprocess.image_max_pixels)
    if "image_min_pixels" in preprocess.model_fields_set:
        shortest = max(shortest, preprocess.image_min_pixels)
    if shortest > longest:
        raise ConfigError(
            f"images would need at least {shortest} and at most {longest} pixels",
            key=f"{_KEY}.image_max_pixels",
            way_out="Raise image_max_pixels or lower image_min_pixels.",
        )
    return shortest, longest


def _interpolation(resample: Any) -> Any:
    from transformers.image_utils import pil_torch_interpolation_mapping  # loaded with the processor

    return pil_torch_interpolation_mapping.get(resample, resample)
