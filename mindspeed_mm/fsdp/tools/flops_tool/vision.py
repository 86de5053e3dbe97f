"""Patches of images and videos in a batch, as the towers of transformers cut them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.tools.flops_tool import units

VisionLengths = Callable[[Batch], dict[str, list[int]]]
_GRIDS = ("image_grid_thw", "video_grid_thw")


def vision_lengths(model: nn.Module) -> VisionLengths | None:
    """How a model's vision tower divides what it sees.

    Returns:
        (batch) → patches of each image or frame, patches of each window, tokens that the decoder gets. None: the tower
        is several with patches of their own, and what each sees is not known.
    """
    config: Any = getattr(model.config, "vision_config", None)  # type: ignore[union-attr]
    if not hasattr(config, "patch_size") or hasattr(model.config, "high_res_vision_config"):
        return None
    markers = {int(token) for name in ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
               if isinstance(token := getattr(model.config, name, None), int)}  # fmt: skip
    extra = int(any(name.endswith(("class_embedding", "cls_token")) for name, _ in model.named_parameters()))

    def lengths(batch: Batch) -> dict[str, list[int]]:
        if any(name in batch for name in _GRIDS):
            return _by_grids(batch, config)
        if "pixel_values" not in batch and "pixel_values_videos" not in batch:
            return {}
        cuts = _by_pixels(batch, config)
        patches = [each + extra for each in cuts]
        return {units.CUTS: cuts, units.PATCHES: patches, units.MEDIA: [_placeholders(batch, markers) or sum(cuts)]}

    return lengths


def _by_grids(batch: Batch, config: Any) -> dict[str, list[int]]:
    """Qwen-VL, GLM-V, Kimi: attention stays in a frame, or in a window of it."""
    merge = _first(getattr(config, "spatial_merge_size", None) or getattr(config, "merge_kernel_size", 1))
    window = getattr(config, "window_size", None)
    side = window // merge // _first(config.patch_size) if window and hasattr(config, "fullatt_block_indexes") else 0
    frames, windows, tokens = [], [], 0
    for time, height, width in (row for name in _GRIDS if name in batch for row in batch[name].tolist()):
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
    rows, columns = (
        [min(side, whole - start) for start in range(0, whole, side)] for whole in (height, width)
    )  # fmt: skip
    return [row * column * merge**2 for row, column in product(rows, columns)]


def _by_pixels(batch: Batch, config: Any) -> list[int]:
    """Towers that take whole pictures, or patches with the place of each."""
    found: list[int] = []
    for name, places in (("pixel_values", "image_position_ids"), ("pixel_values_videos", "video_position_ids")):
        if name not in batch:
            continue
        shape = batch[name].shape
        if places in batch:
            found += (batch[places] >= 0).all(dim=-1).sum(dim=-1).reshape(-1).tolist()
            continue
        patch = _first(config.patch_size)
        if "image_sizes" in batch and len(shape) == 4:
            found += [(height // patch) * (width // patch) for height, width in batch["image_sizes"].tolist()]
            continue
        *counts, _, height, width = shape
        images = 1
        for count in counts:
            images *= count
        found += [(height // patch) * (width // patch)] * images
    return found


def _placeholders(batch: Batch, markers: set[int]) -> int:
    ids, marks = batch.get("input_ids"), batch.get("mm_token_type_ids")
    if not markers and marks is not None:  # a model that is told where its media stand
        return int((marks > 0).sum())
    return 0 if ids is None else sum(int((ids == marker).sum()) for marker in markers)


def _first(size: Any) -> int:
    return int(size[0] if isinstance(size, (list, tuple)) else size)
