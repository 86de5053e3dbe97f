"""Another function in the place of one that a library's `forward` calls, for one module alone.

A `forward` finds helpers such as `apply_rotary_pos_emb` in its module's globals. The forward on the instance gets a
copy of these with other entries: no library is patched, and other models keep theirs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from mindspeed_mm.fsdp.ops.forward_stack import Forward, ForwardKind, replace_forward
from mindspeed_mm.fsdp.utils.model_parts import attribute_at


def called_globals(module: nn.Module) -> set[str]:
    """Names of globals that a module's forward reads; none where something else stands in its place."""
    return set(attribute_at(_forward_of(module), "__code__.co_names", ()))


def global_of(module: nn.Module, name: str) -> Any:
    """What a module's forward finds under a name; None where it finds nothing."""
    return _forward_of(module).__globals__.get(name)


def rebind_globals(module: nn.Module, others: Mapping[str, Forward]) -> None:
    """Let a module's forward find other functions under these names; call it once on a module."""
    function = _shared_function(_forward_of(module), tuple(sorted(others.items())))
    replace_forward(module, ForwardKind.KERNEL, MethodType(function, module))


@functools.lru_cache(maxsize=256)
def _shared_function(function: FunctionType, others: tuple[tuple[str, Forward], ...]) -> FunctionType:
    """One for all modules that are given the same functions: layers that share it share their compiled graphs."""
    return function_with(function, dict(others))


def function_with(function: FunctionType, others: Mapping[str, object]) -> FunctionType:
    """A function that finds other things under these names of its globals."""
    # Without its name the compiler takes these globals, and not the module's of that name.
    names = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    # Code of its own, too: the compiler keeps its graphs by code, and puts their names among the globals that it met.
    code = function.__code__.replace()
    other = FunctionType(code, names | dict(others), function.__name__, function.__defaults__, function.__closure__)
    other.__kwdefaults__ = function.__kwdefaults__
    other.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return other


def _forward_of(module: nn.Module) -> FunctionType:
    """The function below decorators that only look after other libraries' hooks."""
    function: FunctionType = inspect.unwrap(attribute_at(module.forward, "__func__", module.forward))
    return function
