"""Forwards in graphs of torch.compile, whose compilations are limited and counted.

The first call is compiled for its sizes; the first call of other sizes is compiled once more, with all sizes as
variables. What neither graph fits, such as a Python number that the code uses as a constant, would be compiled again
and again: where that is not wanted, such calls compute by plain operations.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.ops.forward_stack import Forward

GRAPHS_PER_FORWARD = 32
"""Most graphs of one piece of code: kinds of layers, times static and variable sizes, times training and evaluation."""
Signature = tuple[tuple[str, object], ...]
"""Name of an argument → shape of a tensor, or a number."""
Variant = tuple[bool, ...]
"""Whether gradients are wanted, and for each tensor among the arguments whether it has one."""
_SHOWN = 3
"""Changed arguments that a reason names."""


def most_graphs() -> dict[str, int]:
    """The argument of `torch.compile` for `GRAPHS_PER_FORWARD`. Releases that take no limit for a function have one
    for the process, which is raised."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": GRAPHS_PER_FORWARD}
    import torch._dynamo.config as settings  # a second to import, and compiling is asked for here

    settings.recompile_limit = max(settings.recompile_limit, GRAPHS_PER_FORWARD)
    return {}


class CountedBackend:
    """A compiler's backend that counts the graphs that it made and how often they ran.

    Args:
        name: As torch.compile knows it.
        mode: Of inductor; None: its default.
        forgives: A graph that the backend fails on computes by plain operations; else the failure is raised.
    """

    def __init__(self, name: str, mode: str | None = None, *, forgives: bool = False) -> None:
        self._name, self._mode, self._forgives = name, mode, forgives
        self.graphs = 0
        """Graphs that were compiled."""
        self.runs = 0
        """Calls of compiled graphs."""
        self.failure = ""
        """Why the backend failed on a graph; empty where it did not."""

    def __call__(self, graph: Any, inputs: Sequence[object]) -> Callable[..., Any]:
        """What runs in the place of a traced graph; called by the compiler."""
        try:
            compiled = self._compile(graph, inputs)
        except Exception as error:
            if not self._forgives:
                raise
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            plain: Callable[..., Any] = graph.forward
            return plain
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run

    def _compile(self, graph: object, inputs: Sequence[object]) -> Callable[..., object]:
        from torch._dynamo import lookup_backend  # see `most_graphs`

        backend = lookup_backend(self._name)
        if self._mode is None:
            return backend(graph, inputs)
        from torch._inductor import list_mode_options

        return backend(graph, inputs, config_patches=list_mode_options(self._mode))  # type: ignore[call-arg]


@dataclass
class _Compilations:
    """What was compiled for calls of one variant."""

    first: Signature
    """Arguments of the first call."""
    last: Signature
    """Arguments of the call that was compiled last."""
    number: int = 0
    """Calls in which something was compiled."""
    has_variables: bool = False
    """Whether one of them took sizes as variables."""


@dataclass
class CompiledKind:
    """Blocks that compute alike and share their graphs, and what the compiler made of them.

    Args:
        name: For people.
        backend: Of all of their graphs.
        dynamic: Whether sizes are variables; None: from the second sizes on.
        most: Compilations of a block after which calls that fit no graph compute by plain operations, as all calls
            without gradients do; None: no limit but that of the compiler.
        blocks: How many there are.
    """

    name: str
    backend: CountedBackend
    dynamic: bool | None = None
    most: int | None = None
    blocks: int = 0
    calls: int = 0
    """Calls that a graph was to compute."""
    compiled_calls: int = 0
    """Those in which a graph ran."""
    reason: str = ""
    """Why calls compute by plain operations though blocks are compiled; empty where none does."""
    is_given_up: bool = False
    """Whether the compiler itself failed: nothing more is compiled."""
    _variants: dict[Variant, _Compilations] = field(default_factory=dict)

    @property
    def compilations(self) -> int:
        """Most compilations of a block."""
        return max((variant.number for variant in self._variants.values()), default=0)

    def of_variant(self, variant: Variant, signature: Signature) -> _Compilations:
        """What was compiled for such calls.

        Args:
            variant: Whether gradients are wanted at all, and of which arguments: graphs differ in it.
            signature: Arguments of this call.
        """
        return self._variants.setdefault(variant, _Compilations(signature, ()))

    def is_used_up(self, compiled: _Compilations) -> bool:
        """Whether nothing may be compiled any more for such calls."""
        return self.most is not None and compiled.number >= self.most

    def gives_up(self, error: Exception, runs: int) -> bool:
        """Whether a call that ended with this error is to be made once more, by plain operations: the compiler failed,
        nobody asked for it, and no graph had run."""
        from torch._dynamo.exc import TorchDynamoException  # see `most_graphs`

        if self.most is None or self.backend.runs > runs or not isinstance(error, TorchDynamoException):
            return False
        self.is_given_up, self.reason = True, f"{type(error).__name__}: {error}".splitlines()[0]
        return True

    def note(self, compiled: _Compilations, signature: Signature, graphs: int, runs: int) -> None:
        """Count a call.

        Args:
            compiled: What was compiled for such calls before.
            signature: Its arguments.
            graphs: Graphs of the backend before the call.
            runs: Runs of its graphs before the call.
        """
        self.calls += 1
        if self.backend.graphs > graphs:
            compiled.number += 1
            compiled.last = signature
        if self.backend.runs > runs:
            self.compiled_calls += 1
        elif self.backend.failure:
            self.reason = self.backend.failure
        elif self.is_used_up(compiled) and not self.reason:
            self.reason = f"{compiled.number} compilations do not fit it: {_changes(compiled.last, signature)}"


def _changes(before: Signature, now: Signature) -> str:
    """Which arguments differ, in words."""
    known = dict(before)
    changed = [f"{name} {known.get(name, 'absent')} → {value}" for name, value in now if known.get(name) != value]
    if not changed:
        return "something that it reads beside its arguments changes"
    return ", ".join(changed[:_SHOWN]) + (" …" if len(changed) > _SHOWN else "")


class CompiledForward:
    """A block's forward in the graphs of its kind. A deep copy of the block takes its own along.

    Args:
        forward: Bound to the block.
        kind: Shared by blocks that compute alike.
    """

    def __init__(self, forward: Forward, kind: CompiledKind) -> None:
        self._forward, self._kind = forward, kind
        of = {"backend": kind.backend, **most_graphs()}
        self._fixed = torch.compile(forward, dynamic=kind.dynamic or False, **of)  # type: ignore[call-overload]
        self._variable = torch.compile(forward, dynamic=kind.dynamic is not False, **of)  # type: ignore[call-overload]
        from torch._dynamo import run  # see `most_graphs`

        self._known = run(forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return what the forward returns for these arguments."""
        kind, with_gradients = self._kind, torch.is_grad_enabled()
        if torch.compiler.is_compiling() or (kind.most is not None and not with_gradients):
            return self._forward(*args, **kwargs)
        kwargs = _without_mark(kwargs)
        if kind.is_given_up:  # what was computed by a graph is computed again by the same one
            return self._known(*args, **kwargs)
        found = list(_found(args, kwargs))
        signature = tuple((name, value) for name, value, _ in found)
        variant = (with_gradients, *(with_gradients and has_gradient for _, _, has_gradient in found))
        compiled = kind.of_variant(variant, signature)
        graphs, runs = kind.backend.graphs, kind.backend.runs
        try:
            output = self._compute(compiled, signature, args, kwargs)
        except Exception as error:
            if not kind.gives_up(error, runs):
                raise
            return self._forward(*args, **kwargs)
        kind.note(compiled, signature, graphs, runs)
        return output

    def _compute(
        self, compiled: _Compilations, signature: Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        kind = self._kind
        if kind.is_used_up(compiled):
            return self._known(*args, **kwargs)
        if compiled.first == signature:
            return self._fixed(*args, **kwargs)
        if compiled.has_variables:
            return self._variable(*args, **kwargs)
        graphs = kind.backend.graphs
        with _sizes_told_apart():
            output = self._variable(*args, **kwargs)
        compiled.has_variables = kind.backend.graphs > graphs
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self._forward, memo), copy.deepcopy(self._kind, memo))


def _without_mark(kwargs: dict[str, Any]) -> JsonObject:
    """A packed row of one document comes without a mask, others with an empty one, which says nothing beside borders:
    without it, they share graphs."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.numel() == 0 and kwargs.get("cu_seq_lens_q") is not None:
        return kwargs | {"attention_mask": None}
    return kwargs


def _sizes_told_apart() -> AbstractContextManager[None]:
    """Inside, sizes that happen to be equal in the call that is compiled are variables of their own: a document that
    fills its row is not taken for a rule."""
    import torch.fx.experimental._config as settings

    patched: AbstractContextManager[None] = settings.patch(use_duck_shape=False)
    return patched


Found = tuple[str, object, bool]
"""Name of an argument, its shape or value, and whether it has a gradient."""


def _found(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Iterator[Found]:
    for place, value in enumerate(args):
        yield from _within(f"argument {place + 1}", value)
    for name, value in kwargs.items():
        yield from _within(name, value)


def _within(name: str, value: object) -> Iterator[Found]:
    if isinstance(value, torch.Tensor):
        yield name, tuple(value.shape), value.requires_grad
    elif isinstance(value, int | float | str | None):
        yield name, value, False
    elif isinstance(value, tuple | list):
        for place, inner in enumerate(value):
            yield from _within(f"{name}[{place}]", inner)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _within(f"{name}[{key}]", inner)
