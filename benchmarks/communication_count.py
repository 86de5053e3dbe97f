"""Counts the bytes that this rank sends, by process group, while it trains.

Every collective passes torch's dispatcher as an op of `c10d` or `_c10d_functional`, also in backward passes, inside of
`fully_shard` and between pipeline stages; a dispatch mode sees them all. Counted is what a ring algorithm sends:
`benchmarks/communication_formula.py` says what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine

AXES = ("fsdp", "dp_replicate", "tp", "pp", "ring", "ulysses", "efsdp", "edp", "ep")
"""Mesh axes along which something is sent in forward and backward passes."""
CONTROL = "control"
"""What is sent outside of forward and backward passes: counts of a step, losses, the norm of the gradients."""


class Wire(TorchDispatchMode):
    """While active, adds up bytes.

    Args:
        names_by_group: Name of a process group → what it is counted as.
    """

    def __init__(self, names_by_group: Mapping[str, str]) -> None:
        super().__init__()
        self.names_by_group = names_by_group
        self.in_passes = False
        self.sent: dict[str, float] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a collective; run every op."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again as ops on plain tensors
        if func.namespace in ("c10d", "_c10d_functional") and func.__name__.split(".")[0] not in _SILENT:
            group, size = _sent_by(func, args)
            name = self.names_by_group[group.group_name] if self.in_passes else CONTROL
            self.sent[name] = self.sent.get(name, 0.0) + size
        return func(*args, **(kwargs or {}))


class CountedPasses:
    """A forward-backward strategy during which bytes are those of the plan, and the shape of what it was given.

    Args:
        real: The strategy.
        wire: Is told.
    """

    def __init__(self, real: Any, wire: Wire) -> None:
        self._real, self._wire = real, wire
        self.seen: dict[str, int] = {}

    def __call__(self, micro_batches: Sequence[Batch], denominators: Mapping[str, int]) -> Any:
        """As the strategy."""
        shapes = {(batch["input_ids"].numel(), len(batch["_rows"])) for batch in micro_batches}
        if len(shapes) != 1:
            raise ValueError(f"micro-batches differ in tokens and labels: {sorted(shapes)}")
        ((tokens, labelled),) = shapes
        self.seen = {"micro_batches": len(micro_batches), "tokens": tokens, "labelled": labelled}
        self._wire.in_passes = True
        try:
            return self._real(micro_batches, denominators)
        finally:
            self._wire.in_passes = False

    def evaluate(self, micro_batches: Sequence[Batch]) -> Any:
        """As the strategy; what it sends is not a training step's."""
        return self._real.evaluate(micro_batches)


class WireCount(Hook):
    """Counts each step of a run: give it to the trainer."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_train_begin(self, engine: TrainEngine) -> None:
        """Watch from here on."""
        self.wire = Wire(names_of_groups())
        self.passes = CountedPasses(engine.forward_backward, self.wire)
        engine.forward_backward = self.passes
        self.wire.__enter__()

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Keep what the step sent, and the shape of its micro-batches."""
        sent = dict.fromkeys(self.wire.names_by_group.values(), 0.0) | self.wire.sent
        self.steps.append({"step": self.passes.seen, "sent": sent, "loss": result.loss})
        self.wire.sent.clear()

    def on_train_end(self, engine: TrainEngine) -> None:
        """Stop watching."""
        self.wire.__exit__(None, None, None)


def names_of_groups() -> dict[str, str]:
    """Name of each process group of this job → its mesh axis; several, joined by `+`, where axes of the same ranks
    share a group."""
    state = get_parallel_state()
    axes: dict[str, list[str]] = {}
    for axis in AXES:
        mesh = state.axis_mesh(axis)
        if mesh.size() > 1:
            axes.setdefault(mesh.get_group().group_name, []).append(axis)
    return {group: "+".join(names) for group, names in axes.items()}


def _sent_by(func: Any, args: tuple[Any, ...]) -> tuple[dist.ProcessGroup, float]:
    """The group of a collective and the bytes that this rank sends in it."""
    name = func.__name__.split(".")[0]
    if name not in _SENT:
        raise ValueError(f"nobody has said what {func} sends")
    group = _group_of(args)
    return group, _SENT[name](args, group)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, dist.ProcessGroup):
            return arg
    return _resolve_process_group(args[-1])


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(_bytes, tensors))


def _all_reduce(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    return 2 * (group.size() - 1) / group.size() * _bytes(args[0])


def _gather(part: int) -> Callable[[tuple[Any, ...], dist.ProcessGroup], float]:
    return lambda args, group: (group.size() - 1) * _bytes(args[part])


def _reduce_scatter(part: int) -> Callable[[tuple[Any, ...], dist.ProcessGroup], float]:
    return lambda args, group: (group.size() - 1) / group.size() * _bytes(args[part])


def _all_to_all(args: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    outgoing, splits = args[1], args[4]
    if not splits:
        return outgoing.nbytes * (group.size() - 1) / group.size()
    row = outgoing.nbytes / max(1, sum(splits))
    return row * (sum(splits) - splits[group.rank()])


def _send(args: tuple[Any, ...], _group: dist.ProcessGroup) -> float:
    return _bytes(args[0])


_SENT: dict[str, Callable[[tuple[Any, ...], dist.ProcessGroup], float]] = {
    "allreduce_": _all_reduce,
    "all_reduce": _all_reduce,
    "allgather_": _gather(1),
    "_allgather_base_": _gather(1),
    "all_gather_into_tensor": _gather(0),
    "reduce_scatter_": _reduce_scatter(1),
    "_reduce_scatter_base_": _reduce_scatter(1),
    "reduce_scatter_tensor": _reduce_scatter(0),
    "alltoall_base_": _all_to_all,
    "send": _send,
}
"""By op: bytes sent of its arguments. Where the tensor stands that goes out is by the op's schema."""
_SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor"}
"""Ops of which the sender is another rank, or that carry nothing."""
