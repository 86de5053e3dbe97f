"""The one door through which a module's `forward` is replaced on the instance, and the way to give one other helpers.

Nothing is wrapped, so no parameter changes its name, and hooks (those of sharding among them) stay outside of every
replacement. What was replaced is recorded on the module: `describe_forwards` shows it, and a replacement that would
stand on the wrong side of another one is refused. The records are plain attributes: a deep copy of a module takes its
own along, bound to the copy.

A `forward` finds helpers such as `apply_rotary_pos_emb` in its module's globals. `rebind_globals` gives the forward on
the instance a copy of these with other entries: no library is patched, and other models keep theirs.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum, auto
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from mindspeed_mm.fsdp.utils.model_parts import attribute_at

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
CallArguments = tuple[Args, Kwargs]
"""What a forward is called with, by position and by name."""
Forward = Callable[..., Any]
_ATTRIBUTE = "_mm_forwards"


class ForwardKind(IntEnum):
    """What replaces a forward, the innermost first: each may stand around those above it, in the order in which
    `fsdp/plan/apply.py` applies them."""

    ADAPTER = auto()
    """Low-rank adapters on fused experts."""
    QUANTIZED = auto()
    """Frozen weights kept in 4 or 8 bits."""
    KERNEL = auto()
    """Other kernels in place of a layer's own operations."""
    LOW_PRECISION = auto()
    """Matrix products in 8 bits."""
    PACKING = auto()
    """Layers with a state, document by document. Inside of what splits layers: borders are those of whole rows."""
    HEAD_LOSS = auto()
    """An output head that returns a loss; what splits the vocabulary hands it this rank's part."""
    TENSOR = auto()
    """Parameters as this rank has them, and the collectives around them."""
    SEQUENCE = auto()
    """Whole parameters used on this rank's tokens."""
    EXPERT = auto()
    """A plugin's own forward for experts that are spread over ranks."""
    COMPILE = auto()
    """Inside of the memory features, whose Python code is not traced."""
    KEPT_RESULTS = auto()
    """Inside of what is computed again, which asks it for what it kept."""
    WEIGHTS = auto()
    """Brings weights from the host. Inside of what is computed again: the backward pass needs them once more."""
    RECOMPUTE = auto()
    """Computed again in the backward pass."""
    COMPILE_RECOMPUTED = auto()
    """Compiled together with what computes it again, which asks of single operations whether to keep them."""
    OFFLOAD = auto()
    """Outside of recomputation: what travels is the input that a recomputed module keeps."""
    SLICES = auto()
    """Outside of all others, which then work on a slice at a time."""
    SIMULATION = auto()
    """Books instead of copies, in a forecast."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Replacement:
    """One forward that was put in the place of another one."""

    kind: ForwardKind
    own: Forward | None
    """What the instance had before; None where the class's forward was in use."""


def replace_forward(module: nn.Module, kind: ForwardKind, forward: Forward) -> Forward:
    """Let a module compute by another forward.

    Args:
        module: Its instance is changed, its class is not.
        kind: What the new forward does.
        forward: Called with the module's arguments, without the module.

    Returns:
        The forward that was in use, bound to the module.

    Raises:
        RuntimeError: What was replaced before belongs outside of this.
    """
    stack = forwards_of(module)
    if stack and kind < stack[-1].kind:
        raise RuntimeError(
            f"the forward of {type(module).__name__} cannot be replaced for '{kind}' any more: it was replaced for "
            f"'{stack[-1].kind}', which belongs around '{kind}'"
        )
    before: Forward = module.forward
    vars(module)[_ATTRIBUTE] = (*stack, Replacement(kind, vars(module).get("forward")))
    module.forward = forward  # type: ignore[method-assign]
    return before


def forwards_of(module: nn.Module) -> tuple[Replacement, ...]:
    """What was replaced on a module, the innermost first."""
    found: tuple[Replacement, ...] = vars(module).get(_ATTRIBUTE, ())
    return found


def undo_forwards(model: nn.Module, first: ForwardKind) -> None:
    """Take off a model's replacements of a kind and of all that belong around it."""
    for module in model.modules():
        stack = forwards_of(module)
        kept = tuple(replacement for replacement in stack if replacement.kind < first)
        if len(kept) < len(stack):
            _set_own_forward(module, stack[len(kept)].own)
            vars(module)[_ATTRIBUTE] = kept


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """While inside, modules compute by these forwards, whatever was replaced on them before."""
    own = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, before in own.items():
            _set_own_forward(module, before)


def describe_forwards(model: nn.Module) -> str:
    """How many modules of which class have which replacements, the innermost first; empty where none was made."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        if stack := forwards_of(module):
            kinds = ", ".join(str(replacement.kind) for replacement in stack)
            counts[kinds, type(module).__name__.removeprefix("FSDP")] += 1
    return "; ".join(f"{count} {name} ({kinds})" for (kinds, name), count in counts.items())


def _set_own_forward(module: nn.Module, own: Forward | None) -> None:
    if own is None:
        vars(module).pop("forward", None)
    else:
        module.forward = own  # type: ignore[method-assign]


def called_globals(module: nn.Module) -> set[str]:
    """Names of globals that a module's forward reads; none where something else stands in its place."""
    return set(attribute_at(_forward_of(module), "__code__.co_names", ()))


def global_of(module: nn.Module, name: str) -> Any:
    """What a module's forward finds under a name; None where it finds nothing."""
    return _forward_of(module).__globals__.get(name)


def rebind_globals(module: nn.Module, others: Mapping[str, Forward]) -> None:
    """Let a module's forward find other functions under these names; call it once on a module."""
    own = _forward_of(module)
    # The copy is of the file's globals as they are now: others may have been put there since the last one.
    now = tuple(id(own.__globals__.get(name)) for name in own.__code__.co_names)
    function = _shared_function(own, tuple(sorted(others.items())), now)
    replace_forward(module, ForwardKind.KERNEL, MethodType(function, module))


@functools.lru_cache(maxsize=256)
def _shared_function(
    function: FunctionType, others: tuple[tuple[str, Forward], ...], _globals: tuple[int, ...]
) -> FunctionType:
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
