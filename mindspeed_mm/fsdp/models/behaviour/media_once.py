"""A picture that two rows show is encoded once: towers that take flat patches with their grids are given the patches
once, and their features are handed on twice.

The grids that the model counts its features by stay those of all rows. A tower sees from them that it was given the
first half of the patches that they tell of.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.ops.forward_stack import CallArguments
from mindspeed_mm.fsdp.ops.host_values import host_values, sent_with_values

_PATCHES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Patches of many media → their grids."""


class RepeatedMedia:
    """Hooks on the towers of models that go through the same batches.

    Args:
        models: Sharded or not; stages of a pipeline, too.
    """

    def __init__(self, *models: nn.Module) -> None:
        towers = [tower for model in models for tower in model.modules() if _takes_grids(tower)]
        self._encodes_once = bool(towers)
        for tower in towers:
            TowerOfHalf(tower)

    def repeat(self, batch: Batch) -> Batch:
        """A batch of pairs with its shared media as the model takes them: once where its towers hand features on
        twice, else twice."""
        twice = {}
        for key in batch.get("shared_media", ()):
            is_once = self._encodes_once and key in _PATCHES and _PATCHES[key] in batch
            if not is_once:
                twice[key] = _twice(batch[key])
        return batch | twice


class TowerOfHalf:
    """The hooks of one tower."""

    def __init__(self, tower: nn.Module) -> None:
        self._pixels = _parameters(tower)[0]
        self._rows = 0
        """Patches of the call that goes through the tower now, where its features are handed on twice."""
        tower.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        tower.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | None:
        """Grids of the patches that are given."""
        self._rows = 0
        given = {**dict(zip((self._pixels, "grid_thw"), args, strict=False)), **kwargs}
        pixels, grids = given[self._pixels], given["grid_thw"]
        listed = host_values(grids)
        patches = sum(int(t) * int(h) * int(w) for t, h, w in listed)
        if 2 * len(pixels) != patches:
            return None
        self._rows = len(pixels)
        given["grid_thw"] = sent_with_values([list(grid) for grid in listed[: len(listed) // 2]], grids)
        del given[self._pixels]
        return (pixels,), given

    def _after(self, _: nn.Module, _args: Any, output: Any) -> Any:
        """Features of both halves."""
        if not self._rows:
            return None

        def doubled(value: Any) -> Any:
            return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() > 1 else value

        if isinstance(output, dict):
            return type(output)(**{name: tree_map(doubled, value) for name, value in output.items()})
        return tree_map(doubled, output)


def _takes_grids(tower: nn.Module) -> bool:
    """Whether a module is called with flat patches of many media, then their grids, and merges squares of patches."""
    if not hasattr(getattr(tower, "config", None), "spatial_merge_size"):
        return False
    return _parameters(tower)[1:2] == ["grid_thw"]


def _parameters(tower: nn.Module) -> list[str]:
    """Of the class: what stands in place of the instance's forward may take anything."""
    return list(inspect.signature(type(tower).forward).parameters)[1:]


def _twice(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.dim() else value
    return value + value if isinstance(value, list) else value
