"""Towers of transformers work out positions, weights and borders from the grids of patches on the host, which knew the
grids before they went to the device: each reading of them there would make the host wait for all that is queued.

Replaces, in the files of a model's own classes, the functions `get_vision_*` that they took from
`transformers.vision_utils` (5.18 and later; before, there is nothing to replace). And the attention of their blocks is
called once for all pictures, with the borders between them: by itself it would be called picture by picture, as for all
kernels whose names do not say "flash".
"""

from __future__ import annotations

import functools
import inspect
import sys
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

    @functools.wraps(function)
    def call(grid_thw: torch.Tensor, *args: object, **kwargs: object) -> Any:
        others = (args, {name: value for name, value in kwargs.items() if name != "kwargs"})
        if not has_values(grid_thw) or tree_any(lambda leaf: isinstance(leaf, torch.Tensor), others):
            return function(grid_thw, *args, **kwargs)
        grids = torch.tensor(host_values(grid_thw), dtype=grid_thw.dtype)
        results = function(grids, *args, **kwargs)
        if function.__name__ == _BORDERS and not _wants_borders(args, kwargs):
            return results
        return tree_map_only(torch.Tensor, lambda tensor: _sent(tensor, grid_thw.device), results)

    return call


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
