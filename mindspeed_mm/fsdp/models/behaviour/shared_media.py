"""Media of models that see: a picture that several rows show is encoded once, and features take the places of tokens.

Towers that take flat patches with their grids are given the patches once, and their features are handed on as often as
rows show them. The grids that the model counts its features by stay those of all rows. A tower sees from them which
part of the patches that they describe was given: that of the first of several equal blocks of rows.
"""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.ops.forward_stack import Args, CallArguments, Kwargs
from mindspeed_mm.fsdp.ops.host_values import host_values, sent_with_values
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

_PATCHES = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""Patches of many media → their grids."""


class RepeatedMedia:
    """Hooks on the towers of models that go through the same batches.

    Args:
        models: Sharded or not; stages of a pipeline, too.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._encodes_once = False
        for module in chain.from_iterable(model.modules() for model in models):
            if _takes_grids(module):
                RepeatingTower(module)
                self._encodes_once = True

    def repeat(self, batch: Batch) -> Batch:
        """A batch with its shared media as the model takes them: once where its towers repeat features, else as often
        as rows show them."""
        repeated = {}
        for key in batch.get("shared_media", ()):
            is_once = self._encodes_once and key in _PATCHES and _PATCHES[key] in batch
            if not is_once:
                repeated[key] = _repeated(batch[key], batch["media_copies"])
        return batch | repeated


class RepeatingTower:
    """The hooks of one tower."""

    def __init__(self, tower: nn.Module) -> None:
        self._pixels = _parameters(tower)[0]
        self._copies = 1
        """How often the features of the call that goes through the tower now are handed on."""
        tower.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        tower.register_forward_hook(self._after)

    def _before(self, _: nn.Module, args: Args, kwargs: Kwargs) -> CallArguments | None:
        """Grids of the patches that are given."""
        self._copies = 1
        given = {**dict(zip((self._pixels, "grid_thw"), args, strict=False)), **kwargs}
        pixels, grids = given[self._pixels], given["grid_thw"]
        listed = host_values(grids)
        copies = _patches(listed) // max(len(pixels), 1)
        own = listed[: len(listed) // max(copies, 1)]
        if copies < 2 or len(own) * copies != len(listed) or _patches(own) != len(pixels):
            return None
        self._copies = copies
        given["grid_thw"] = sent_with_values([list(grid) for grid in own], grids)
        del given[self._pixels]
        return (pixels,), given

    def _after(self, _: nn.Module, _args: object, output: object) -> Any:
        """Repeat the tower's features for all blocks of rows; None leaves the output as it is."""
        if self._copies == 1:
            return None

        def repeated(tensor: Tensor) -> Tensor:
            if tensor.dim() > 1:
                return torch.cat([tensor] * self._copies)
            return tensor

        if isinstance(output, dict):
            return type(output)(**tree_map_only(Tensor, repeated, dict(output)))
        return tree_map_only(Tensor, repeated, output)


def _takes_grids(tower: nn.Module) -> bool:
    """Whether a module is called with flat patches of many media, then their grids, and merges squares of patches."""
    if attribute_at(tower, "config.spatial_merge_size") is None:
        return False
    return _parameters(tower)[1:2] == ["grid_thw"]


def _patches(grids: list[Any]) -> int:
    return sum(int(t) * int(h) * int(w) for t, h, w in grids)


def _parameters(tower: nn.Module) -> list[str]:
    """Of the class: what stands in place of the instance's forward may take anything."""
    return list(inspect.signature(type(tower).forward).parameters)[1:]


def _repeated(value: object, copies: int) -> object:
    if isinstance(value, Tensor):
        if value.dim():
            return torch.cat([value] * copies)
        return value
    if isinstance(value, list):
        return value * copies
    return value


def with_media(embeds_BLD: torch.Tensor, places_BL: torch.Tensor, seen_D: torch.Tensor) -> torch.Tensor:
    """Embeddings whose tokens of media are replaced, in order.

    Args:
        embeds_BLD: Embeddings of all tokens.
        places_BL: Which tokens stand for parts of media.
        seen_D: (…, D), one row for each of them.

    Raises:
        DataError: There are more or fewer rows than places. torch alone would take the first of too many, and shift the
            rest.
    """
    places, rows = int(places_BL.sum()), seen_D.shape[:-1].numel()
    if places != rows:
        raise DataError(
            f"the processor wrote {places:,} tokens for the media of a batch, of which the model makes {rows:,}",
            key="model.model_name_or_path",
            way_out="Take configuration and processor of one model: compare patch sizes, tiles and the ratio of "
            "patches to tokens.",
        )
    return embeds_BLD.masked_scatter(places_BL[..., None], seen_D.to(embeds_BLD.dtype))
