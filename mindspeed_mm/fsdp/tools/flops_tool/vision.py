"""Patches of images and videos in a batch, as the towers of transformers cut them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.tools.flops_tool import units
from mindspeed_mm.fsdp.utils.settings import setting_of

VisionLengths = Callable[[Batch], dict[str, list[int]]]
_GRIDS = ("image_grid_thw", "video_grid_thw")
_MARKERS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")


def side_of(config: object, *names: str) -> int | None:
    """The first of these settings that a tower has, each one number or one for every dimension, of which the first
    counts; None where it has none."""
    for name in names:
        sides = setting_of(config, Sequence, name)
        side = sides[0] if sides else setting_of(config, int, name)
        if side:
            return int(side)
    return None


def vision_lengths(model: nn.Module) -> VisionLengths | None:
    """How a model's vision tower divides what it sees.

    Returns:
        (batch) → patches of each image or frame, patches of each window, tokens that the decoder gets. None: the tower
        is several with patches of their own, and what each sees is not known.
    """
    config = setting_of(model.config, object, "vision_config")
    patch = side_of(config, "patch_size")
    if patch is None or hasattr(model.config, "high_res_vision_config"):
        return None
    markers: set[int] = set()
    for name in _MARKERS:
        token = setting_of(model.config, int, name)
        if token is not None:
            markers.add(token)
    extra = int(any(name.endswith(("class_embedding", "cls_token")) for name, _ in model.named_parameters()))

    def lengths(batch: Batch) -> dict[str, list[int]]:
        if any(name in batch for name in _GRIDS):
            return _by_grids(batch, config, patch)
        if "pixel_values" not in batch and "pixel_values_videos" not in batch:
            return {}
        cuts = _by_pixels(batch, patch)
        patches = [each + extra for each in cuts]
        return {units.CUTS: cuts, units.PATCHES: patches, units.MEDIA: [_placeholders(batch, markers) or sum(cuts)]}

    return lengths


def _by_grids(batch: Batch, config: object, patch: int) -> dict[str, list[int]]:
    """Qwen-VL, GLM-V, Kimi: attention stays in a frame, or in a window of it."""
    merge = side_of(config, "spatial_merge_size", "merge_kernel_size") or 1
    window_pixels = setting_of(config, int, "window_size")
    side = 0
    if window_pixels and hasattr(config, "fullatt_block_indexes"):
        side = window_pixels // merge // patch
    frames: list[int] = []
    windows: list[int] = []
    tokens = 0
    for name in _GRIDS:
        if name not in batch:
            continue
        for time, height, width in batch[name].tolist():
            frames += [height * width] * time
            tokens += time * height * width // merge**2
            if side:
                windows += [*windows_of(height // merge, width // merge, side, merge)] * time
    return {units.CUTS: frames, units.PATCHES: frames, units.WINDOWS: windows, units.MEDIA: [tokens]}


def windows_of(height: int, width: int, side: int, merge: int) -> Iterable[int]:
    """Patches of each window of a frame; those at the borders are smaller.

    Args:
        height: Of the frame, in merged squares of patches.
        width: As above.
        side: Of a window, in merged squares.
        merge: Patches along a side of a square.
    """
    rows, columns = _cut(height, side), _cut(width, side)
    return [row * column * merge**2 for row, column in product(rows, columns)]


def _cut(whole: int, side: int) -> list[int]:
    """Lengths of the pieces of a side; the last one is what is left."""
    return [min(side, whole - start) for start in range(0, whole, side)]


def _by_pixels(batch: Batch, patch: int) -> list[int]:
    """Towers that take whole pictures, or patches with the place of each."""
    found: list[int] = []
    for name, places in (("pixel_values", "image_position_ids"), ("pixel_values_videos", "video_position_ids")):
        if name not in batch:
            continue
        shape = batch[name].shape
        if places in batch:
            found += (batch[places] >= 0).all(dim=-1).sum(dim=-1).reshape(-1).tolist()
        elif "image_sizes" in batch and len(shape) == 4:
            found += [(height // patch) * (width // patch) for height, width in batch["image_sizes"].tolist()]
        else:
            *counts, _, height, width = shape
            found += [(height // patch) * (width // patch)] * math.prod(counts)
    return found


def _placeholders(batch: Batch, markers: set[int]) -> int:
    ids, marks = batch.get("input_ids"), batch.get("mm_token_type_ids")
    if not markers and marks is not None:  # a model that is told where its media stand
        return int((marks > 0).sum())
    if ids is None:
        return 0
    return sum(int((ids == marker).sum()) for marker in markers)
