"""Towers of transformers work out positions, weights and borders from the grids of patches on the host, which knew the
grids before they went to the device: each reading of them there would make the host wait for all that is queued.

Replaces, in the files of a model's own classes, the functions `get_vision_*` that they took from
`transformers.vision_utils` (5.18 and later; before, there is nothing to replace). What patches get by the grid of their
picture alone is kept: pictures of a data set share a few sizes, and the library works each picture out anew, by dozens
of small operations. And the attention of their blocks is called once for all pictures, with the borders between them:
by itself it would be called picture by picture, as for all kernels whose names do not say "flash".
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_any, tree_map_only

from mindspeed_mm.fsdp.ops.attention import ATTENTION_NAME
from mindspeed_mm.fsdp.ops.context_attention.language import CONTEXT_ATTENTION_NAME
from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, Kwargs
from mindspeed_mm.fsdp.ops.host_values import has_values, host_values, moved_with_values
from mindspeed_mm.fsdp.utils.device import copied_to
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_LIBRARY = "transformers.vision_utils"
_BORDERS = "get_vision_attention_seqlens"
"""Where attention is called picture by picture, each layer reads its borders on the host: there they stay."""
_OF_A_GRID: Mapping[str, AbstractSet[str]] = {
    "get_vision_position_ids": {"position_ids"},
    "get_vision_interpolation_indices_and_weights": {"interp_indices", "interp_weights"},
}
"""Functions that give a row for each patch, made of its picture's grid alone, and the arguments of a tower that bring
these rows along."""
MOST_KEPT_PATCHES = 2**16
"""Of the grids that are kept for a function: a few megabytes."""
_ASKS_FOR_FLASH = "is_flash_attention_requested"
_TAKE_BORDERS = (ATTENTION_NAME, CONTEXT_ATTENTION_NAME)


def read_grids_on_host(model: nn.Module) -> None:
    """Let a model's towers compute what follows from a grid without waiting for the device. May be called again."""
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, function in list(vars(file).items()):
            if name.startswith("get_vision_") and attribute_at(function, "__module__") == _LIBRARY:
                setattr(file, name, _on_host(function))


def attend_to_pictures_at_once(model: nn.Module) -> None:
    """Let a model's towers hand the borders of all pictures to our attention functions. May be called again."""
    for kind in {type(module) for module in model.modules()}:
        function: Any = inspect.unwrap(kind.forward)  # below decorators of the library
        code = attribute_at(function, "__code__")
        if code is None or _ASKS_FOR_FLASH not in code.co_names or "cu_seqlens" not in code.co_varnames:
            continue
        by_library = function.__globals__[_ASKS_FOR_FLASH]
        if not isinstance(by_library, functools.partial):
            function.__globals__[_ASKS_FOR_FLASH] = functools.partial(_takes_borders, by_library)


def _on_host(function: Forward) -> Forward:
    if has_all(function, "__wrapped__"):
        return function
    kept = KeptRows(function)

    @functools.wraps(function)
    def call(grid_thw: torch.Tensor, *args: object, **kwargs: Any) -> Any:
        settings = {name: value for name, value in kwargs.items() if name != "kwargs"}
        has_tensors = tree_any(lambda leaf: isinstance(leaf, torch.Tensor), (args, settings))
        if has_tensors or not (has_values(grid_thw) or _lies_on_host(grid_thw)):
            return function(grid_thw, *args, **kwargs)
        given, of_caller = _OF_A_GRID.get(function.__name__), kwargs.get("kwargs") or {}
        if given is not None and type(grid_thw) is torch.Tensor and not given & of_caller.keys():
            results = kept.of(host_values(grid_thw), grid_thw.dtype, args, settings)
        elif has_values(grid_thw):
            results = function(torch.tensor(host_values(grid_thw), dtype=grid_thw.dtype), *args, **kwargs)
        else:
            return function(grid_thw, *args, **kwargs)
        if function.__name__ == _BORDERS and not _wants_borders(args, kwargs):
            return results
        return tree_map_only(torch.Tensor, lambda tensor: _sent(tensor, grid_thw.device), results)

    return call


def _lies_on_host(tensor: torch.Tensor) -> bool:
    """Whether its numbers can be read at once; those of simulated tensors are not there."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


class KeptRows:
    """Rows that a function of the library makes for the patches of pictures, kept by grid.

    Args:
        function: Of grids (pictures, 3) and settings; gives (patches, …), or several of these.
    """

    def __init__(self, function: Forward) -> None:
        self._function = function
        self._rows: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        self._patches = 0

    def of(self, grids: Sequence[Sequence[int]], dtype: torch.dtype, args: Args, settings: Kwargs) -> Any:
        """What the function gives of these grids, in new tensors on the host. Those that are new are asked for in one
        call, and each once."""
        if not grids:  # the library says what it says of none
            return self.made(grids, dtype, args, settings)
        how = (dtype, torch.get_default_dtype(), args, *sorted(settings.items()))
        asked = [(how, *grid) for grid in grids]
        found = {key: self._rows[key] for key in asked if key in self._rows}
        missing = {key: tuple(grid) for key, grid in zip(asked, grids, strict=True) if key not in found}
        if missing:
            made = self.made([*missing.values()], dtype, args, settings)
            sizes = [math.prod(grid) for grid in missing.values()]
            parts = zip(*(rows.split(sizes) for rows in _as_tuple(made)), strict=True)
            found |= zip(missing, parts, strict=True)
            self._keep({key: found[key] for key in missing}, sum(sizes))
        joined = tuple(torch.cat(rows) for rows in zip(*(found[key] for key in asked), strict=True))
        if len(joined) == 1:
            return joined[0]
        return joined

    def made(self, grids: Sequence[Sequence[int]], dtype: torch.dtype, args: Args, settings: Kwargs) -> Any:
        """What the function gives of these grids, worked out anew; whoever changes how torch computes swaps `of` for
        this."""
        lines = [tuple(grid) for grid in grids]
        return self._function(torch.tensor(lines, dtype=dtype, device="cpu").view(-1, 3), *args, **settings)

    def _keep(self, rows: dict[Hashable, tuple[torch.Tensor, ...]], patches: int) -> None:
        """Begin anew where there would be too many. More than that at once are not kept, nor what has no numbers, in
        the simulation of a forecast."""
        if self._patches + patches > MOST_KEPT_PATCHES:
            self._rows, self._patches = {}, 0
        has_numbers = all(type(tensor) is torch.Tensor for tensor in chain.from_iterable(rows.values()))
        if has_numbers and patches <= MOST_KEPT_PATCHES:
            self._rows |= rows
            self._patches += patches


def _as_tuple(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    if isinstance(made, torch.Tensor):
        return (made,)
    return made


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    is_borders = tensor.dtype == torch.int32 and tensor.dim() == 1
    if is_borders:
        return moved_with_values(tensor, device)
    return copied_to(tensor, device)


def _wants_borders(args: Args, kwargs: Kwargs) -> bool:
    config = args[0] if args else kwargs["config"]
    return _takes_borders(lambda config: "flash" in str(attribute_at(config, "_attn_implementation", "")), config)


def _takes_borders(by_library: Forward, config: object) -> bool:
    return attribute_at(config, "_attn_implementation") in _TAKE_BORDERS or bool(by_library(config))
