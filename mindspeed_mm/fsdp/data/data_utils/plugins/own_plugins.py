"""Processors that are not only asked, as most are: Qwen2-VL to Qwen3.5, Qwen-Omni and their kin, whose patches are cut
directly and whose sizes come from headers; and those of models that draw with codes of their own, for whose tokenizer
pictures in answers are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageOps
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.data.data_utils.decoding.image_media import ImageHeader
from mindspeed_mm.fsdp.data.data_utils.decoding.video_clip import ClipHeader, VideoClip
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import ItemSize, MediaFeatures, tells_replacements
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin, video_metadata
from mindspeed_mm.fsdp.data.data_utils.plugins.qwen_patches import PatchGrid, build_image_grid, build_video_grid
from mindspeed_mm.fsdp.data.data_utils.sample import MediaKind
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.model_parts import setting_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor


_SECONDS_KEYS = ("second_per_grid_ts", "video_second_per_grid")
"""Seconds of a patch: as Qwen2.5-VL and as the omni models call it."""
_NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
_BYTES = "patches"
_GRID = "grid_thw"


class QwenVLPlugin(ProcessorPlugin):
    """Cuts pictures and clips itself, equal to the processor's own to the bit; asks it for the rest.

    Args:
        processor: The model's processor.
        preprocess: `preprocess_parameters`.
        grid: How its image processor sizes and cuts pictures; None: it is asked.

    Raises:
        ConfigError: The image processor cuts pictures in another way.
    """

    is_deterministic = True

    def __init__(self, processor: Processor, preprocess: Any, grid: PatchGrid | None = None) -> None:
        super().__init__(processor, preprocess)
        if grid is None:
            grid = build_image_grid(processor, preprocess)
        if grid is None:
            raise ConfigError(
                f"{type(self).__name__} is for processors that cut pictures as Qwen-VL's do, and "
                f"{type(processor).__name__} does not",
                key="training.plugin",
                way_out="Derive the media plugin from ProcessorPlugin.",
            )
        self._image_grid = grid
        self._video_grid = None
        if "video" in self.placeholders:
            self._video_grid = build_video_grid(processor, preprocess)
        self.frame_sizes = self._video_grid
        inputs = setting_of(processor, Sequence, "model_input_names") or ()
        self._seconds_key = next((key for key in _SECONDS_KEYS if key in inputs), None)
        self._is_run = self._video_grid is not None and self._is_run_of_tokens(self._video_grid)

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width at which the model sees a picture of this size. Raises `DataError` for one it refuses."""
        return self._image_grid.size(1, height, width)

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Patches as bytes; they become numbers for the whole batch at once."""
        patches, grid_thw = self._image_grid.cut_image(image)
        ids = np.full(self._image_grid.tokens_of(grid_thw), self.placeholders["image"].token_id, dtype=np.int64)
        return MediaFeatures("image", ids, {_BYTES: patches, _GRID: grid_thw})

    def encode_video(self, clip: VideoClip) -> MediaFeatures:
        """Patches as bytes, too. A video with its sound is left to the processor, which knows how they take turns."""
        if self._video_grid is None or clip.sound is not None:
            return super().encode_video(clip)
        clip = clip.at_least(self._frames_at_once)
        patches, grid_thw = self._video_grid.cut_frames(clip.frames, (clip.header.height, clip.header.width))
        ids, text = self._video_tokens(self._video_grid, grid_thw, clip.header)
        tensors = {_BYTES: patches, _GRID: grid_thw}
        if self._seconds_key is not None:
            tensors[self._seconds_key] = [self._video_grid.temporal_patch_size / clip.header.sampled_fps]
        return MediaFeatures("video", ids, tensors, text)

    def measure(self, kind: MediaKind, header: object) -> ItemSize | None:
        """Exactly, of pictures and of videos without sound."""
        if isinstance(header, ImageHeader):
            height, width = self._image_grid.size(1, header.height, header.width)
            grid_thw = self._image_grid.grid_of(1, height, width)
            return ItemSize(self._image_grid.tokens_of(grid_thw), grid_thw[1] * grid_thw[2])
        if not isinstance(header, ClipHeader) or self._video_grid is None or self.hears_videos:
            return super().measure(kind, header)
        header = header.at_least(self._frames_at_once)
        size = self._video_grid.size(len(header.indices), header.height, header.width)
        grid_thw = self._video_grid.grid_of(len(header.indices), *size)
        ids, text = self._video_tokens(self._video_grid, grid_thw, header)
        return ItemSize(len(ids), grid_thw[0] * grid_thw[1] * grid_thw[2], text)

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, Any]:
        """`pixel_values` (patches of all pictures, numbers of a patch), `image_grid_thw` (pictures, 3), the same of
        videos, and what else the processor gives."""
        batch: dict[str, Any] = {}
        for kind, grid in (("image", self._image_grid), ("video", self._video_grid)):
            items = [item for item in media if item.kind == kind and _BYTES in item.tensors]
            if items and grid is not None:
                pixels, grids = _NAMES[kind]
                # (P, 3 · T · p · p) float32 of all items, one after the other; their grids say where each ends.
                batch[pixels] = grid.normalise([item.tensors[_BYTES] for item in items])
                batch[grids] = torch.tensor([item.tensors[_GRID] for item in items], dtype=torch.int64)
        return batch | super().collate([_without_bytes(item) for item in media])

    def _video_tokens(
        self, grid: PatchGrid, grid_thw: tuple[int, int, int], header: ClipHeader
    ) -> tuple[np.ndarray, str | None]:
        """What replaces a video: a run of one token, or, where the model reads the times of frames, a text."""
        if self._is_run:
            return np.full(grid.tokens_of(grid_thw), self.placeholders["video"].token_id, dtype=np.int64), None
        made = self._features("video", self._replacement(grid_thw, header), {})
        return made.token_ids, made.text

    def _replacement(self, grid_thw: tuple[int, int, int], header: ClipHeader) -> str:
        inputs = {"video_grid_thw": torch.tensor([grid_thw]), "video_metadata": [video_metadata(header)]}
        return self._processor.replace_video_token(inputs, 0, load_audio_from_video=False)

    def _is_run_of_tokens(self, grid: PatchGrid) -> bool:
        if not tells_replacements(self._processor):
            return True
        deep, merge = grid.temporal_patch_size, grid.merge_size
        # The smallest clip is one merge block, a single token: a longer replacement writes more than tokens.
        least = ClipHeader(1, 1, tuple(range(deep)), 1.0, deep)
        return self._replacement((1, merge, merge), least) == self.placeholders["video"].text


def build_qwen_plugin(processor: Processor, preprocess: Any) -> QwenVLPlugin | None:
    """The plugin of a processor whose pictures are cut as Qwen-VL's are; None for others."""
    grid = build_image_grid(processor, preprocess)
    if grid is not None:
        return QwenVLPlugin(processor, preprocess, grid)
    return None


def _without_bytes(item: MediaFeatures) -> MediaFeatures:
    if _BYTES not in item.tensors:
        return item
    rest = {name: value for name, value in item.tensors.items() if name not in (_BYTES, _GRID)}
    return MediaFeatures(item.kind, item.token_ids, rest, item.text)


_PROCESSORS = frozenset({"JanusProcessor"})
_PIXELS = "drawn_pixel_values"


class DrawingPlugin(ProcessorPlugin):
    """As every processor's, and pictures that are drawn. Arguments as of `ProcessorPlugin`."""

    def encode_drawn_image(self, image: Image.Image) -> MediaFeatures:
        """A picture in the model's turn: the square in its middle, from -1 to 1. Its tokens are as many as those of a
        picture that is seen."""
        size = self._processor.image_processor.size
        square = ImageOps.fit(image, (size["width"], size["height"]), Image.Resampling.BICUBIC)
        made = self._asked("image", square, f"an image of {image.width} × {image.height}")
        # (3, H, W) from -1 to 1, as the model's own tokenizer of pictures takes them.
        pixels = torch.from_numpy(np.array(square, dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1
        return MediaFeatures(made.kind, made.token_ids, {_PIXELS: pixels[None]}, made.text)

    @override
    def collate(self, media: Sequence[MediaFeatures]) -> Batch:
        batch = super().collate(media)
        is_drawn = [_PIXELS in item.tensors for item in media]
        if any(is_drawn):
            return batch | {"drawn_images": torch.tensor(is_drawn)}
        return batch


def build_drawing_plugin(processor: Processor, preprocess: PreprocessParameters) -> DrawingPlugin | None:
    """The plugin of a processor whose model draws; None for others."""
    if type(processor).__name__ in _PROCESSORS:
        return DrawingPlugin(processor, preprocess)
    return None
