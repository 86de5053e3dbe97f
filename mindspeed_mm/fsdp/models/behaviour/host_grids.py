"""Towers of transformers work out positions, weights and borders from the grids of patches on the host, which knew the
grids before they went to the device: each reading of them there would make the host wait for all that is queued.

Replaces, in the files of a model's own classes, the functions `get_vision_*` that they took from
`transformers.vision_utils` (5.18 and later; before, there is nothing to replace).
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_any, tree_map_only

from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, Kwargs
from mindspeed_mm.fsdp.ops.host_values import has_values, host_values
from mindspeed_mm.fsdp.utils.device import copied_to
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, has_all

_LIBRARY = "transformers.vision_utils"
_BORDERS = "get_vision_attention_seqlens"
"""Without flash attention, each layer reads its borders on the host: there they stay."""


def read_grids_on_host(model: nn.Module) -> None:
    """Let a model's towers compute what follows from a grid without waiting for the device. May be called again."""
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name, function in list(vars(file).items()):
            if name.startswith("get_vision_") and attribute_at(function, "__module__") == _LIBRARY:
                setattr(file, name, _on_host(function))


def _on_host(function: Forward) -> Forward:
    if has_all(function, "__wrapped__"):
        return function

    @functools.wraps(function)
    def call(grid_thw: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others = (args, {name: value for name, value in kwargs.items() if name != "kwargs"})
        if not has_values(grid_thw) or tree_any(lambda leaf: isinstance(leaf, torch.Tensor), others):
            return function(grid_thw, *args, **kwargs)
        grids = torch.tensor(host_values(grid_thw), dtype=grid_thw.dtype)
        results = function(grids, *args, **kwargs)
        if function.__name__ == _BORDERS and not _wants_flash(args, kwargs):
            return results
        return tree_map_only(torch.Tensor, lambda tensor: copied_to(tensor, grid_thw.device), results)

    return call


def _wants_flash(args: Args, kwargs: Kwargs) -> bool:
    config = args[0] if args else kwargs["config"]
    return "flash" in str(attribute_at(config, "_attn_implementation", ""))
