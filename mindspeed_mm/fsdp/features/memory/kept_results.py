"""What a recomputed module keeps of its first pass, so that the second does not compute it again.

Two ways, chosen together. Results of *operations* (matrix products, attention kernels) are kept by their names: torch's
selective checkpoint sees each operation below autograd, its inputs are computed again. Results of *calls* are kept for
layers whose kernel is many operations, or none that torch sees (delta nets): the call's own activations stay in memory
and the second pass is handed what the first returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _is_compiling,
    create_selective_checkpoint_contexts,
)

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, ForwardKind, Kwargs, replace_forward
from mindspeed_mm.fsdp.utils.device import rng_state, set_rng_state
from mindspeed_mm.fsdp.utils.model_parts import attribute_at

Context = AbstractContextManager[object]
Contexts = Callable[[], tuple[Context, Context]]
"""Makes what the first and the second pass of one module run under."""
Operation: TypeAlias = "OpOverload[..., Any] | HigherOrderOperator"

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flex_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "flash_attn_3::_flash_attn_forward",
        "npu::npu_fusion_attention",
        "npu::npu_fusion_attention_v2",
    }
)
"""Kernels of attention, whoever calls them: transformers, diffusers, `mm_varlen` document by document, the rectangles
of a sequence that is spread over ranks."""
MATRIX_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
        "npu::npu_grouped_matmul",
    }
)
SELECTIVE = MATRIX_PRODUCTS | ATTENTION
"""What `features.recompute_plan.mode: selective` keeps."""

_CHANCES = {"dropout_p": 0.0, "p_dropout": 0.0, "dropout": 0.0, "keep_prob": 1.0}
"""Argument of an attention kernel that makes it draw random numbers → its value without."""


def is_kept(
    operations: frozenset[str], operation: Operation, args: Sequence[object] = (), kwargs: Mapping[str, object] = {}
) -> bool:
    """Whether the result of a call of an operation is kept.

    Not what writes into its arguments: it has to write twice. Not what draws random numbers: all that draws after it
    would draw something else the second time.
    """
    if _name_of(operation) not in operations:
        return False
    if isinstance(operation, HigherOrderOperator):  # has no schema
        return True
    schema = operation._schema
    return not schema.is_mutable and not _draws(schema, args, kwargs)


@functools.cache
def _name_of(operation: Operation) -> str:
    return str(operation.name()).partition(".")[0]


def _draws(schema: torch.FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    for place, argument in enumerate(schema.arguments):
        if argument.name not in _CHANCES:
            continue
        given = kwargs.get(argument.name, argument.default_value)
        if place < len(args):
            given = args[place]
        return given is not None and given != _CHANCES[argument.name]
    return False


def keep_results(operations: frozenset[str], *, calls: bool = False) -> Contexts | None:
    """What `torch.utils.checkpoint` is to run its passes under; None when nothing is kept.

    Args:
        operations: Names of operations.
        calls: Whether modules inside keep what they return (`keep_calls_of`).
    """
    if calls:
        return functools.partial(_contexts_of_calls, operations)
    if operations:
        return functools.partial(_contexts_of_operations, operations)
    return None


def _contexts_of_operations(operations: frozenset[str]) -> tuple[Context, Context]:
    return _passes(operations, functools.partial(_policy, operations))


def _passes(operations: frozenset[str], policy: Callable[..., CheckpointPolicy]) -> tuple[_FirstPass, _SecondPass]:
    """Torch's modes of the two passes, which see nothing but these operations.

    Torch expects all others twice as well. FSDP does not do that: units inside a recomputed module gather, and note for
    the profiler, in one pass what the other finds gathered.
    """
    first, second = create_selective_checkpoint_contexts(policy)
    again = _SecondPass(operations, policy, second.storage, second.allow_cache_entry_mutation)
    return _FirstPass(operations, policy, first.storage), again


class _SeesSome:
    """A mode that passes on all operations but some. A compiler sees all of them: it plans what is kept."""

    def __init__(self, operations: frozenset[str], *given: object) -> None:
        super().__init__(*given)
        self._operations = operations

    def __torch_dispatch__(self, operation: Any, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if _name_of(operation) in self._operations or _is_compiling(operation, args, kwargs):
            return super().__torch_dispatch__(operation, types, args, kwargs or {})  # type: ignore[misc]
        return operation(*args, **(kwargs or {}))


class _FirstPass(_SeesSome, _CachingTorchDispatchMode): ...


class _SecondPass(_SeesSome, _CachedTorchDispatchMode): ...


def _policy(
    operations: frozenset[str], _context: object, operation: Operation, *args: object, **kwargs: object
) -> CheckpointPolicy:
    if is_kept(operations, operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


# --- results of calls -------------------------------------------------------------------------------------------------


def keep_calls_of(module: nn.Module, key: str) -> None:
    """Let a module keep what it returns whenever it lies in one that is recomputed; elsewhere nothing changes.

    Args:
        module: Its `forward` is replaced on the instance.
        key: The configuration key that asked for it, for errors.
    """
    replace_forward(module, ForwardKind.KEPT_RESULTS, KeptForward(module, key))


class KeptForward:
    """A module's `forward` that runs in the first pass of a recomputed module only."""

    def __init__(self, module: nn.Module, key: str) -> None:
        self._forward: Forward = module.forward
        self._key = key

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """What the module returns, or returned."""
        kept = _CURRENT.get()
        if kept is None:
            return self._forward(*args, **kwargs)
        return kept.call(self._forward, args, kwargs, self._key)


@dataclass(frozen=True)
class _Call:
    """What one call left behind."""

    result: Any
    versions: tuple[int, ...]
    """How often each tensor of the result had been written to."""
    random: dict[str, torch.Tensor]
    """State of the generators after it: what follows draws the same twice."""

    def hand_out(self, key: str) -> object:
        """The result once more.

        Raises:
            ConfigError: It was written to meanwhile.
        """
        if _versions(self.result) != self.versions:
            raise ConfigError(
                "what a layer returned was written over, and cannot be kept for the backward pass",
                key=key,
                way_out="Set it to false.",
            )
        set_rng_state(self.random)
        return self.result


class _KeptCalls:
    """Calls of one recomputed module, in their order.

    Args:
        operations: Whose results are kept outside of the calls.
    """

    def __init__(self, operations: frozenset[str]) -> None:
        self._operations = operations
        self._calls: list[_Call] = []
        self._again: Iterator[_Call] | None = None
        self._watch: _FirstPass | None = None
        self._is_inside = False

    def contexts(self) -> tuple[_Pass, _Pass]:
        """Of the first and of the second pass."""
        first = second = None
        if self._operations:
            first, second = _passes(self._operations, self._policy)
            self._watch = first
        return _Pass(self, first, is_again=False), _Pass(self, second, is_again=True)

    def begin(self, *, is_again: bool) -> None:
        """A pass; there may be several second ones."""
        self._again = iter(self._calls) if is_again else None

    def call(self, forward: Forward, args: Args, kwargs: Kwargs, key: str) -> Any:
        """Run and keep, or hand out what was kept."""
        if self._again is not None:
            return next(self._again).hand_out(key)
        # Torch's checkpoint lets autograd save a promise to compute again instead of tensors. The innermost hooks for
        # saved tensors win: what this call saves stays as it is.
        with saved_tensors_hooks(torch.Tensor.detach, _kept_as_it_is), self._unseen():
            result = forward(*args, **kwargs)
        kept = tree_map_only(torch.Tensor, _alike, result)
        self._calls.append(_Call(kept, _versions(kept), rng_state()))
        return result

    def _policy(self, context: object, operation: Operation, *args: object, **kwargs: object) -> CheckpointPolicy:
        if self._is_inside:  # the call's result is kept as a whole
            return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(self._operations, context, operation, *args, **kwargs)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Operations inside are not counted: the second pass, which finds results by their numbers, has none."""
        counter: dict[object, int] = attribute_at(self._watch, "func_counter", {})
        before, self._is_inside = dict(counter), True
        try:
            yield
        finally:
            self._is_inside = False
            counter.clear()
            counter.update(before)


class _Pass:
    """Context of one pass: its module's kept calls, and torch's own for operations."""

    def __init__(self, calls: _KeptCalls, operations: Context | None, *, is_again: bool) -> None:
        self._calls, self._operations, self._is_again = calls, operations, is_again
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._calls.begin(is_again=self._is_again)
        token = _CURRENT.set(self._calls)
        self._stack.callback(_CURRENT.reset, token)
        if self._operations is not None:
            self._stack.enter_context(self._operations)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


_CURRENT: ContextVar[_KeptCalls | None] = ContextVar("kept_calls", default=None)


def _contexts_of_calls(operations: frozenset[str]) -> tuple[Context, Context]:
    return _KeptCalls(operations).contexts()


def _kept_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without the history: autograd saves for it what it saved the first time."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _versions(result: object) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
