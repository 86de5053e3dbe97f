"""Patches in the layout of the Qwen-VL processors, cut straight from bytes: of pictures and of clips.

The processors of transformers give the same numbers to the bit; for small pictures they spend ten times as long on
finding out what they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.byte_pixels import made_of
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import defaults_of
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.model_parts import setting_of

_IMAGE_PROCESSORS = frozenset({"Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"})
_OF_SOUND = frozenset({"seconds_per_chunk", "position_id_per_seconds", "use_audio_in_video"})
"""What the omni models' processors are told beside their videos, in transformers 5.17: it leaves the frames alone."""
_KEY = "data.dataset_param.preprocess_parameters"

Limits = Mapping[str, int]
"""`shortest_edge` and `longest_edge` as Qwen's processors mean them: least and most pixels."""
Resize = Callable[[int, int, int], tuple[int, int]]
"""(frames, height, width) → (height, width) in whole blocks of patches; raises `ValueError` for an aspect beyond."""


@dataclass(frozen=True)
class PatchGrid:
    """Sizes and constants of a Qwen-VL processor of pictures or of videos. P patches; a patch has 3 · T · p · p
    numbers. The sizes that it gives to frames make it the `FrameSizes` of its videos."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    target: Resize
    resample: object
    mean: torch.Tensor
    """(3,) in units of bytes."""
    std: torch.Tensor

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that pictures are brought to: whole blocks of patches within the limits.

        Raises:
            DataError: The aspect ratio is beyond what the processor takes.
        """
        try:
            return self.target(max(frames, self.temporal_patch_size), height, width)
        except ValueError as error:
            raise DataError(
                f"a size of {width} × {height} pixels is refused: {error}", way_out="Crop it or drop the row."
            ) from error

    def resize(self, picture: Image.Image, height: int, width: int) -> np.ndarray:
        """An RGB picture → (height, width, 3) uint8."""
        pixels = np.asarray(picture)
        if pixels.shape[:2] == (height, width):
            return pixels
        return self._interpolated(pixels, height, width)

    def grid_of(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """(time, height, width) in patches of pictures that are sized already."""
        return -(-frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def tokens_of(self, grid_thw: tuple[int, int, int]) -> int:
        """How many tokens a grid is."""
        return grid_thw[0] * grid_thw[1] * grid_thw[2] // self.merge_size**2

    def cut_image(self, image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Size an RGB picture and cut it. It is one frame, which `normalise` repeats.

        Returns:
            (P, 3 · p · p) bytes in the order of merge blocks, and the grid (time, height, width) in patches.
        """
        height, width = self.size(1, image.height, image.width)
        pixels_HWC = self.resize(image, height, width)
        return self._cut(pixels_HWC[None], 1), self.grid_of(1, height, width)

    def cut_frames(self, frames_THWC: np.ndarray, of_size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Size frames and cut them; the last is repeated until the patches are full.

        Args:
            frames_THWC: Frames, mostly of the right size already: a size is found once, from that of the video, for
                limits that are close together may size what is sized once more.
            of_size: Height and width of the video.

        Returns:
            (P, 3 · T · p · p) bytes in the order of merge blocks, and the grid (time, height, width) in patches.
        """
        count = len(frames_THWC)
        size = self.size(count, *of_size)
        if size != frames_THWC.shape[1:3]:
            frames_THWC = np.stack([self._interpolated(frame, *size) for frame in frames_THWC])
        missing = -count % self.temporal_patch_size
        if missing:
            frames_THWC = np.concatenate([frames_THWC, np.repeat(frames_THWC[-1:], missing, axis=0)])
        return self._cut(frames_THWC, self.temporal_patch_size), self.grid_of(count, *size)

    def normalise(self, patches: Sequence[np.ndarray]) -> torch.Tensor:
        """Join the patches of several items: (P, 3 · T · p · p) numbers; patches of one frame are repeated T times."""
        bytes_ = torch.from_numpy(np.concatenate(patches) if len(patches) > 1 else patches[0])
        numbers = 3 * self.temporal_patch_size * self.patch_size**2
        bytes_P3R = bytes_.view(len(bytes_), 3, -1)
        values = bytes_P3R.to(torch.float32)
        values.sub_(self.mean[:, None]).div_(self.std[:, None])  # the processor's two operations, in its order
        repeats = numbers // bytes_.shape[1]
        repeated = values.unsqueeze(2).expand(-1, 3, repeats, -1)
        return made_of(repeated.reshape(-1, numbers), bytes_P3R, repeats)

    def _cut(self, frames_THWC: np.ndarray, deep: int) -> np.ndarray:
        p, m = self.patch_size, self.merge_size
        count, height, width = frames_THWC.shape[:3]
        rows, columns = height // p, width // p
        blocks = frames_THWC.reshape(count // deep, deep, rows // m, m, p, columns // m, m, p, 3)
        return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(count // deep * rows * columns, 3 * deep * p * p)

    def _interpolated(self, pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
        from torchvision.transforms.v2 import functional as transforms  # loaded with the processor

        chw = torch.from_numpy(pixels_HWC.copy()).permute(2, 0, 1).contiguous()
        resized = transforms.resize(chw, [height, width], interpolation=self.resample, antialias=True)
        return resized.permute(1, 2, 0).contiguous().numpy()


def build_image_grid(processor: object, preprocess: PreprocessParameters) -> PatchGrid | None:
    """The grid of pictures, or None when the image processor is of another kind or does not do all its steps.

    Args:
        processor: The model's processor.
        preprocess: `preprocess_parameters`: the pixel limits narrow those of the processor.
    """
    images: Any = setting_of(processor, object, "image_processor")
    if type(images).__name__ not in _IMAGE_PROCESSORS or not setting_of(processor, object, "image_token"):
        return None
    if not _does_all_steps(images):
        return None
    least, most = pixel_limits(images.size, preprocess)
    factor = images.patch_size * images.merge_size
    return _grid(images, partial(_size_of_picture, factor=factor, least=least, most=most))


def build_video_grid(processor: object, preprocess: PreprocessParameters) -> PatchGrid | None:
    """The grid of videos, or None when the video processor is of another kind or does not do all its steps.

    Args:
        processor: The model's processor.
        preprocess: `preprocess_parameters`: the pixel limits of a frame narrow those of the processor.
    """
    videos: Any = setting_of(processor, object, "video_processor")
    build_target = {"Qwen2VLVideoProcessor": _frame_target, "Qwen3VLVideoProcessor": _clip_target}.get(
        type(videos).__name__
    )
    own = {name: value for name, value in defaults_of(processor, "videos_kwargs").items() if name not in _OF_SOUND}
    if build_target is None or not _does_all_steps(videos) or setting_of(videos, bool, "cap_pixels_per_frame"):
        return None
    if set(own) - {"size", "return_metadata"}:
        return None
    size = own.get("size") or videos.size
    return _grid(videos, build_target(videos, size, preprocess))


def _frame_target(videos: Any, size: Limits, preprocess: PreprocessParameters) -> Resize:
    """Qwen2-VL: the limits are of a frame."""
    least, most = frame_limits(size, preprocess, 1)
    return partial(_size_of_picture, factor=videos.patch_size * videos.merge_size, least=least, most=most)


def _clip_target(videos: Any, size: Limits, preprocess: PreprocessParameters) -> Resize:
    """Qwen3-VL: the limits are of all frames together."""
    factor, limits = videos.patch_size * videos.merge_size, dict(size)
    return partial(_size_of_clip, factor=factor, deep=videos.temporal_patch_size, limits=limits, preprocess=preprocess)


def _size_of_picture(frames: int, height: int, width: int, *, factor: int, least: int, most: int) -> tuple[int, int]:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize  # loaded with the processor

    del frames
    return smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)


def _size_of_clip(
    frames: int, height: int, width: int, *, factor: int, deep: int, limits: Limits, preprocess: PreprocessParameters
) -> tuple[int, int]:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize  # loaded with the processor

    least, most = frame_limits(limits, preprocess, frames)
    return smart_resize(frames, height, width, temporal_factor=deep, factor=factor, min_pixels=least, max_pixels=most)


def _does_all_steps(part: Any) -> bool:
    return bool(part.do_resize and part.do_rescale and part.do_normalize)


def _grid(part: Any, target: Resize) -> PatchGrid:
    per_byte = 1.0 / part.rescale_factor
    return PatchGrid(
        patch_size=part.patch_size,
        merge_size=part.merge_size,
        temporal_patch_size=part.temporal_patch_size,
        target=target,
        resample=_interpolation(part.resample),
        mean=torch.tensor(part.image_mean) * per_byte,
        std=torch.tensor(part.image_std) * per_byte,
    )


def pixel_limits(size: Limits, preprocess: PreprocessParameters) -> tuple[int, int]:
    """Least and most pixels of an image: the processor's own limits, narrowed by those that are configured.

    Raises:
        ConfigError: The least is above the most.
    """
    shortest = max(int(size["shortest_edge"]), preprocess.image_min_pixels or 0)
    longest = int(size["longest_edge"])
    if preprocess.image_max_pixels is not None:
        longest = min(longest, preprocess.image_max_pixels)
    if shortest > longest:
        raise ConfigError(
            f"images would need at least {shortest} and at most {longest} pixels",
            key=f"{_KEY}.image_max_pixels",
            way_out="Raise image_max_pixels or lower image_min_pixels.",
        )
    return shortest, longest


def frame_limits(size: Limits, preprocess: PreprocessParameters, frames: int) -> tuple[int, int]:
    """Least and most pixels of a video, by the same rule; the keys are of one frame.

    Where the processor's least is above the configured most, the processor's stands.

    Args:
        size: The processor's limits, of so many frames together.
        preprocess: `preprocess_parameters`.
        frames: That the processor's limits are of.

    Raises:
        ConfigError: The configured least is above the configured most.
    """
    least = max(int(size["shortest_edge"]), (preprocess.video_min_pixels or 0) * frames)
    most = int(size["longest_edge"])
    if preprocess.video_max_pixels is not None:
        most = min(most, preprocess.video_max_pixels * frames)
        if (preprocess.video_min_pixels or 0) > preprocess.video_max_pixels:
            raise ConfigError(
                f"frames would need at least {preprocess.video_min_pixels} and at most {preprocess.video_max_pixels} "
                "pixels",
                key=f"{_KEY}.video_max_pixels",
                way_out="Raise video_max_pixels or lower video_min_pixels.",
            )
    return least, max(least, most)


def _interpolation(resample: object) -> object:
    from transformers.image_utils import pil_torch_interpolation_mapping  # loaded with the processor

    return pil_torch_interpolation_mapping.get(resample, resample)
