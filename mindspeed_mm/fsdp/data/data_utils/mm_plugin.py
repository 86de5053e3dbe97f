"""How media become token ids and tensors: one plugin for each kind of processor.

A plugin turns an item into the ids that take the place of its placeholder and the tensors that the model's tower wants,
and joins the tensors of a batch. `register_mm_plugin` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader, PixelBudget
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import (
    ItemSize,
    MediaFeatures,
    MediaPlugin,
    Placeholder,
)
from mindspeed_mm.fsdp.data.data_utils.plugins.own_plugins import DrawingPlugin, build_drawing_plugin, build_qwen_plugin
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import ProcessorPlugin
from mindspeed_mm.fsdp.data.data_utils.rows.grounding import with_objects
from mindspeed_mm.fsdp.data.data_utils.sample import MediaItem, MediaKind, Sample, options_of
from mindspeed_mm.fsdp.utils.processor import check_media_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

MM_PLUGINS = Registry("data.dataset_param.preprocess_parameters.mm_plugin")


def register_mm_plugin(name: str) -> Callable[[type], type]:
    """Decorator that files a plugin class under a processor's class name; it is called with (processor, preprocess)."""
    return MM_PLUGINS.register(name)


def build_mm_plugin(processor: Processor, preprocess: Any) -> MediaPlugin:
    """The plugin of a processor: by its class name, else by what it can do.

    Args:
        processor: Processor or tokenizer.
        preprocess: `preprocess_parameters`.
    """
    name = type(processor).__name__
    if name in MM_PLUGINS:
        return MM_PLUGINS.get(name)(processor, preprocess)
    # A tokenizer alone, no processor: a text model.
    if tokenizer_of(processor) is processor:
        return TextOnlyPlugin(Path(str(getattr(processor, "name_or_path", ""))))
    known = build_qwen_plugin(processor, preprocess) or build_drawing_plugin(processor, preprocess)
    return known or ProcessorPlugin(processor, preprocess)


def may_draw(processor: Processor, plugin: MediaPlugin) -> bool:
    """Whether encoding media may draw random numbers: code from outside may, unless its class says of itself
    `is_deterministic = True`."""
    return type(processor).__name__ in MM_PLUGINS and vars(type(plugin)).get("is_deterministic") is not True


def encode_media(
    plugin: MediaPlugin, media: MediaLoader, item: MediaItem, pictures: int = 1, *, drawn: bool = False
) -> MediaFeatures:
    """Load and encode an item of a row.

    Args:
        plugin: Of the model's processor.
        media: Opens the item.
        item: The item.
        pictures: How many pictures the row has: some processors show one otherwise among others.
        drawn: It stands in a turn of the model, which is trained on it.

    Raises:
        DataError: The file is missing, refused or broken, or the model does not take its kind; the kind is its key.
    """
    try:
        plugin = _within(plugin, item)
        if item.kind == "image":
            if drawn and isinstance(plugin, DrawingPlugin):
                return plugin.encode_drawn_image(media.load_image(item.source))
            if isinstance(plugin, ProcessorPlugin):
                plugin = plugin.among(pictures)
            return plugin.encode_image(media.load_image(item.source))
        if item.kind == "video":
            # A plugin from outside may say nothing about frames and their sound.
            sizes, hears = getattr(plugin, "frame_sizes", None), getattr(plugin, "hears_videos", False)
            sizes = sizes or _frame_budget(item, media)
            return plugin.encode_video(media.load_video(item.source, sizes, with_sound=hears))
        return plugin.encode_audio(media.load_audio(item.source))
    except DataError as error:
        raise _with_field(error, item) from error


def measure_media(plugin: MediaPlugin, media: MediaLoader, item: MediaItem) -> ItemSize | None:
    """The size of an item, from its file's header alone; None where it must be encoded to know.

    Raises:
        DataError: What `encode_media` would raise, as far as a header tells.
    """
    try:
        return _within(plugin, item).measure(item.kind, media.probe(item.kind, item.source))
    except DataError as error:
        raise _with_field(error, item) from error


def filled_boxes(sample: Sample, processor: Processor, plugin: MediaPlugin, media: MediaLoader) -> Sample:
    """The sample with the boxes of its row's `objects` written into its texts, as the model writes boxes.

    Raises:
        DataError: As `with_objects`, or a picture cannot be read.
    """

    def sizes_of(item: MediaItem) -> tuple[tuple[int, int], tuple[int, int]]:
        header: Any = media.probe("image", item.source)
        seen = getattr(_within(plugin, item), "image_size", None)  # a plugin's own may not tell
        size = (header.height, header.width)
        if seen is None:
            return size, size
        return size, seen(*size)

    if sample.objects is None and (sample.rejected is None or sample.rejected.objects is None):
        return sample
    return with_objects(sample, type(processor).__name__, sizes_of)


def _frame_budget(item: MediaItem, media: MediaLoader) -> PixelBudget | None:
    """The pixel bounds of frames that a row asks for of one video; None: those that are configured."""
    options, limits = options_of(item.source), media.limits
    if "min_pixels" not in options and "max_pixels" not in options:
        return None
    return PixelBudget(
        options.get("max_pixels", limits.video_max_pixels), options.get("min_pixels", limits.video_min_pixels)
    )


def _within(plugin: MediaPlugin, item: MediaItem) -> MediaPlugin:
    """The plugin that keeps the pixel bounds that a row asks for of one item: as it would be if they were configured.

    Raises:
        DataError: The plugin knows no bounds.
    """
    options = options_of(item.source)
    bounds = {f"{item.kind}_{name}": options[name] for name in ("min_pixels", "max_pixels") if name in options}
    if not bounds:
        return plugin
    if not isinstance(plugin, ProcessorPlugin):
        # Silently ignoring the bounds would train on another size than the row asks for.
        names = ", ".join(bounds)
        raise DataError(f"this model's plugin does not bound single items ({names})", way_out="Take the bounds out.")
    return plugin.within(bounds)


def _with_field(error: DataError, item: MediaItem) -> DataError:
    """The same error with the row's field, and a way out, where it has none."""
    problem = error.problems[0]
    key, way_out = problem.key or f"{item.kind}s", problem.way_out or "Replace the file or drop the row."
    return type(error)(problem.what, where=problem.where, key=key, way_out=way_out)


class TextOnlyPlugin:
    """The plugin of a text model, which takes no media.

    Args:
        folder: Of the model: a medium is refused by the name of the file that is missing, where the folder lacks its
            processor.
    """

    placeholders: Mapping[str, Placeholder] = {}

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def encode_image(self, image: Image.Image) -> MediaFeatures:
        """Refuse a picture: raise `DataError`, or `ModelFolderError` where the folder lacks the model's processor."""
        raise self._refusal("an image")

    def encode_video(self, clip: object) -> MediaFeatures:
        """Refuse a video, with the errors of `encode_image`."""
        raise self._refusal("a video")

    def encode_audio(self, sound: object) -> MediaFeatures:
        """Refuse a sound, with the errors of `encode_image`."""
        raise self._refusal("an audio")

    def measure(self, kind: MediaKind, header: object) -> ItemSize | None:
        """Refuse a medium of any kind, with the errors of `encode_image`."""
        raise self._refusal(f"{'a' if kind == 'video' else 'an'} {kind}")

    def _refusal(self, medium: str) -> DataError:
        if self._folder is not None:
            check_media_processor(self._folder)
        return DataError(
            f"the row has {medium}, but the model takes text only",
            way_out="Name a model that takes such media, or drop the row.",
        )

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        """Return no tensors: a batch of text has no media to join."""
        return {}

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Return no further inputs: a text model takes no marks of its tokens."""
        return {}
