"""Makes sure that sharding sees the tensors which wrapped modules return.

`fully_shard` starts a module's backward pass from hooks on its output tensors, and finds them by `torch.utils._pytree`.
In an object that is not a pytree (a plain dataclass, a SimpleNamespace) it finds none: gradients would stay unreduced
and parameters gathered, without a word.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.utils.model_parts import has_all


class RootOutput:
    """What a root returns: where it hides tensors, a dict of its attributes while the hooks of sharding look at it, and
    the object itself for the caller.

    Make it before `fully_shard`, whose own hooks must see the dict, and call `give_back` afterwards.

    Args:
        root: The module that is wrapped last.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._hidden: Any = None
        root.register_forward_hook(self._show)

    def give_back(self) -> None:
        """From now on the caller gets the object again, with the tensors that sharding has seen."""
        self._root.register_forward_hook(self._restore)

    def _show(self, _module: nn.Module, _inputs: object, output: object) -> object:
        self._hidden = None
        if not hides_tensors(output):
            return None  # leaves the output as it is
        self._hidden = output
        return dict(vars(output))

    def _restore(self, _module: nn.Module, _inputs: object, shown: object) -> Any:
        if self._hidden is None:
            return None
        output, self._hidden = copy.copy(self._hidden), None
        vars(output).update(shown)
        return output


def check_outputs(inner: Iterable[tuple[str, nn.Module]]) -> None:
    """Have modules below the root checked: one that hides tensors is a `ConfigError` in its first forward pass, since
    whoever calls it expects the type that it returns.

    Args:
        inner: Modules that are wrapped, by name.
    """
    for name, module in inner:
        _check_first_output(name, module)


def _check_first_output(name: str, module: nn.Module) -> None:
    def check(_module: nn.Module, _inputs: object, output: object) -> None:
        handle.remove()
        for leaf in tree_leaves(output):
            if hides_tensors(leaf):
                raise ConfigError(
                    f"{name} returns its tensors in a {type(leaf).__name__}, where sharding cannot see them",
                    key="parallel.fsdp_plan.apply_modules",
                    way_out="Return a tensor, tuple, dict or transformers ModelOutput, or register the class with "
                    "torch.utils._pytree.register_dataclass.",
                )

    handle = module.register_forward_hook(check)


def hides_tensors(value: object) -> bool:
    """Whether a value is a leaf to torch's pytree, yet holds tensors as attributes."""
    if isinstance(value, torch.Tensor) or not has_all(value, "__dict__"):
        return False
    leaves = tree_leaves(value)
    return leaves == [value] and any(isinstance(item, torch.Tensor) for item in vars(value).values())
