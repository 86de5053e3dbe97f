"""How media become token ids and tensors: one plugin for each kind of processor.

A plugin turns an item into the ids that take the place of its placeholder and the tensors that the model's tower wants,
and joins the tensors of a batch. `register_mm_plugin` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.media_features import ItemSize, MediaFeatures, MediaPlugin, Placeholder
from mindspeed_mm.fsdp.data.data_utils.qwen_patches import PatchGrid, build_patch_grid
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, MediaItem, MediaKind
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

MM_PLUGINS = Registry("data.dataset_param.preprocess_parameters.mm_plugin")
ImageFeatures = MediaFeatures


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


def encode_media(plugin: MediaPlugin, media: MediaLoader, item: MediaItem) -> MediaFeatures:
    """Load and encode an item of a row.

    Raises:
        DataError: The file is missing, refused or broken, or the model does not take its kind.
    """
    if item.kind == "image":
        return plugin.encode_image(media.load_image(item.source))
    if item.kind == "video":
        return plugin.encode_video(media.load_video(item.source))
    return plugin.encode_audio(media.load_audio(item.source))


def measure_media(plugin: MediaPlugin, media: MediaLoader, item: MediaItem) -> ItemSize | None:
    """The size of an item, from its file's header alone; None where it must be encoded to know.

    Raises:
        DataError: What `encode_media` would raise, as far as a header tells.
    """
    return None


def no_such_media(kind: str) -> DataError:
    """The error of a row with a medium that the model does not take."""
    article = "a" if kind == "video" else "an"
    return DataError(
        f"the row has {article} {kind}, but the model takes none", way_out="Drop the row or take another model."
    )


class TextOnlyPlugin:
    """Of a text model: it takes no media."""

    placeholders: Mapping[str, Placeholder] = {}
    image_token_id: int | None = None

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Refuse."""
        raise DataError("the row has an image, but the model takes text only")

    def encode_video(self, clip: Any) -> MediaFeatures:
        """Refuse."""
        raise DataError("the row has a video, but the model takes text only")

    def encode_audio(self, sound: Any) -> MediaFeatures:
        """Refuse."""
        raise DataError("the row has an audio, but the model takes text only")

    def measure(self, kind: MediaKind, header: Any) -> ItemSize | None:
        """Refuse."""
        raise no_such_media(kind)

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """Nothing to join."""
        return {}

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """None."""
        return {}


class QwenVLPlugin:
    """Qwen2-VL to Qwen3.5 and their kin: patches cut directly, equal to the processor's own to the bit.

    Args:
        processor: The model's processor.
        grid: How its image processor sizes and cuts images.
    """

    def __init__(self, processor: Any, grid: PatchGrid) -> None:
        self.image_token_id: int | None = processor.image_token_id
        self.placeholders: Mapping[str, Placeholder] = placeholders_of(processor)
        self._processor, self._grid = processor, grid

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Patches as bytes; they become numbers for the whole batch at once."""
        patches, grid_thw = self._grid.cut(image)
        tokens = len(patches) // self._grid.merge_size**2
        ids = np.full(tokens, self.image_token_id, dtype=np.int64)
        return MediaFeatures("image", ids, {"patches": patches, "grid_thw": grid_thw})

    def encode_video(self, clip: Any) -> MediaFeatures:
        """Not built yet."""
        raise no_such_media("video")

    def encode_audio(self, sound: Any) -> MediaFeatures:
        """Refuse."""
        raise no_such_media("audio")

    def measure(self, kind: MediaKind, header: Any) -> ItemSize | None:
        """Not built yet."""
        return None

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """`pixel_values` (patches of all images, numbers of a patch) and `image_grid_thw` (images, 3)."""
        if not media:
            return {}
        return {
            "pixel_values": self._grid.normalise([image.tensors["patches"] for image in media]),
            "image_grid_thw": torch.tensor([image.tensors["grid_thw"] for image in media], dtype=torch.int64),
        }

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """`mm_token_type_ids`, as the processor marks them."""
        return token_marks_of(self._processor, input_ids)


class ProcessorPlugin:
    """Any other processor: it is asked for the tensors of an image and for the text that takes its place.

    Args:
        processor: The model's processor.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer = tokenizer_of(processor)
        self.placeholders: Mapping[str, Placeholder] = placeholders_of(processor)
        self.image_token_id: int | None = getattr(processor, "image_token_id", None)
        if self.image_token_id is None or not hasattr(processor, "replace_image_token"):
            raise ConfigError(
                f"{type(processor).__name__} does not say how an image becomes tokens",
                key="model.model_name_or_path",
                way_out="Write a plugin for it: `register_mm_plugin`.",
            )

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Ask the processor."""
        try:
            features = dict(self._processor.image_processor([image], return_tensors="pt"))
        except ValueError as error:
            raise DataError(f"the processor refuses an image of {image.width} × {image.height}: {error}") from error
        text = self._processor.replace_image_token(features, 0)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return MediaFeatures("image", np.asarray(ids, dtype=np.int64), features)

    def encode_video(self, clip: Any) -> MediaFeatures:
        """Not built yet."""
        raise no_such_media("video")

    def encode_audio(self, sound: Any) -> MediaFeatures:
        """Not built yet."""
        raise no_such_media("audio")

    def measure(self, kind: MediaKind, header: Any) -> ItemSize | None:
        """A processor does not tell."""
        return None

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """Join along the first axis, that of images or patches."""
        if not media:
            return {}
        unused = set(getattr(self._processor, "unused_input_names", ()))
        try:
            return {
                name: torch.cat([torch.as_tensor(image.tensors[name]) for image in media])
                for name in media[0].tensors
                if name not in unused
            }
        except RuntimeError as error:
            sizes = {name: tuple(value.shape) for name, value in media[0].tensors.items()}
            raise DataError(f"images of a batch do not join (the first: {sizes}): {error}") from error

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """As the processor marks them."""
        return token_marks_of(self._processor, input_ids)


def placeholders_of(processor: Any) -> dict[str, Placeholder]:
    """Kind of media → the token that stands for an item in a processor's chat template."""
    found: dict[str, Placeholder] = {}
    for kind in MEDIA_KINDS:
        text = getattr(processor, f"{kind}_token", None)
        if text is not None:
            found[kind] = Placeholder(int(tokenizer_of(processor).convert_tokens_to_ids(text)), text)
    return found


def token_marks_of(processor: Any, input_ids: np.ndarray) -> dict[str, np.ndarray]:
    """`mm_token_type_ids` (or `token_type_ids`, as Gemma3 calls them), where the processor's model takes them."""
    names = getattr(processor, "model_input_names", ())
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names and getattr(processor, "return_mm_token_type_ids", False):
            return {name: np.asarray(processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int32)}
    return {}
