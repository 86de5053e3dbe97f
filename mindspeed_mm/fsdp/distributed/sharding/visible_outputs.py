"""Makes sure that sharding sees the tensors which wrapped modules return.

`fully_shard` starts a module's backward pass from hooks on its output tensors, and finds them by `torch.utils._pytree`.
In an object that is not a pytree (a plain dataclass, a SimpleNamespace) it finds none: gradients would stay unreduced
and parameters gathered, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_mm.core.errors import ConfigError


def show_outputs(root: nn.Module, inner: Iterable[tuple[str, nn.Module]]) -> None:
    """Register the hooks; call it before `fully_shard`, whose own hooks must see what these return.

    Args:
        root: Its output is turned into a dict of its attributes when it hides tensors.
        inner: Modules wrapped below the root, by name; one that hides tensors is a `ConfigError` in its first forward
            pass, since whoever calls it expects the type that it returns.
    """
    root.register_forward_hook(_as_dict_when_hidden)
    for name, module in inner:
        _check_first_output(name, module)


def _as_dict_when_hidden(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return dict(vars(output)) if hides_tensors(output) else None


def _check_first_output(name: str, module: nn.Module) -> None:
    def check(_module: nn.Module, _inputs: Any, output: Any) -> None:
        handle.remove()
        hidden = next((leaf for leaf in tree_leaves(output) if hides_tensors(leaf)), None)
        if hidden is not None:
            raise ConfigError(
                f"{name} returns its tensors in a {type(hidden).__name__}, where sharding cannot see them",
                key="parallel.fsdp_plan.apply_modules",
                way_out="Return a tensor, tuple, dict or transformers ModelOutput, or register the class with "
                "torch.utils._pytree.register_dataclass.",
            )

    handle = module.register_forward_hook(check)


def hides_tensors(value: Any) -> bool:
    """Whether a value is a leaf to torch's pytree, yet holds tensors as attributes."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dict__"):
        return False
    leaves = tree_leaves(value)
    return leaves == [value] and any(isinstance(item, torch.Tensor) for item in vars(value).values())
