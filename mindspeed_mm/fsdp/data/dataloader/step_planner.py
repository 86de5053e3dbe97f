"""Plans of steps, one under way while the trainer is at another: where many samples wait, a process makes them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.packing import Groups
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape, StepPlan, plan_step
from mindspeed_mm.fsdp.data.dataloader.shared_slots import SLOT_BYTES, PackedBatch, SharedSlots
from mindspeed_mm.fsdp.data.dataloader.side_process import SideJob, SideProcess

FEWEST_SAMPLES = 1024
"""Fewer are planned by the trainer itself, in some milliseconds."""
_MOST_BYTES = SLOT_BYTES // 2
"""Of the sizes that are asked about: the answer takes up to half as much again."""


class StepPlanner:
    """Answers with the plans of the buffers that it was given, in their order.

    Args:
        shape: What a micro-batch may hold.
        count: Micro-batches of a step.
        beside: Have a process plan where many samples wait; otherwise the trainer does it when it asks for the plan.
        timeout_s: Longest wait for a plan.
    """

    def __init__(self, shape: BatchShape, count: int, *, beside: bool, timeout_s: float) -> None:
        self._shape, self._count, self._beside, self._timeout_s = shape, count, beside, timeout_s
        self._process: _PlanningProcess | None = None
        self._under_way: deque[tuple[np.ndarray, int] | None] = deque()
        """Buffers that are planned here; None: one that the process has."""

    def begin(self, sizes: np.ndarray, overdue: int) -> None:
        """Begin with a buffer; only one at a time.

        Args:
            sizes: (samples, 2) tokens and patches, the oldest first.
            overdue: So many of them, the oldest, an epoch before left over.
        """
        if not self._beside or len(sizes) < FEWEST_SAMPLES or sizes.nbytes > _MOST_BYTES:
            self._under_way.append((sizes, overdue))
            return
        if self._process is None:
            self._process = _PlanningProcess(self._shape, self._count, self._timeout_s)
        self._process.begin(sizes, overdue)
        self._under_way.append(None)

    def wait(self) -> StepPlan:
        """The plan of the buffer that was begun with.

        Raises:
            DataError: The process died, or gives nothing for too long.
        """
        here = self._under_way.popleft()
        if here is not None:
            return plan_step(self._shape, here[0], here[1], self._count)
        assert self._process is not None
        return self._process.wait()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()


class _Question(NamedTuple):
    """A buffer to plan a step of."""

    sizes: PackedBatch
    overdue: int


class _PlanningProcess:
    """Sizes and plans go through memory that both share, one buffer at a time; only notes are sent."""

    def __init__(self, shape: BatchShape, count: int, timeout_s: float) -> None:
        self._slots = SharedSlots(2)
        self._side = SideProcess(_Planning(shape, count, self._slots), timeout_s)
        self.close = self._side.close

    def begin(self, sizes: np.ndarray, overdue: int) -> None:
        note = self._slots.write(0, {"sizes": torch.from_numpy(sizes)})
        assert isinstance(note, PackedBatch)
        self._side.begin(_Question(note, overdue))

    def wait(self) -> StepPlan:
        plan = self._slots.read(self._side.wait())
        return StepPlan(Groups(plan["members"].numpy(), plan["starts"].numpy()), plan["costs"].numpy())


class _Planning(SideJob[_Question, PackedBatch]):
    """Reads sizes from slot 0, writes the plan into slot 1."""

    def __init__(self, shape: BatchShape, count: int, slots: SharedSlots) -> None:
        self._shape, self._count, self._slots = shape, count, slots

    @override
    def __call__(self, asked: _Question) -> PackedBatch:
        sizes = self._slots.read(asked.sizes)["sizes"].numpy()
        plan = plan_step(self._shape, sizes, asked.overdue, self._count)
        arrays = {"members": plan.batches.members, "starts": plan.batches.starts, "costs": plan.costs}
        note = self._slots.write(1, {name: torch.from_numpy(array) for name, array in arrays.items()})
        assert isinstance(note, PackedBatch)
        return note

    @override
    def doing(self, asked: _Question) -> str:
        return f"planning a step of {self._count} micro-batches"

    @override
    def stopped(self, asked: _Question, how: str) -> DataError:
        return DataError(
            f"the process that plans steps {how} at {self._count} micro-batches",
            key="data.dataloader_param.num_workers",
            way_out="One that is killed is mostly out of memory: lower num_workers or prefetch_factor; with "
            "num_workers: 0 the trainer plans by itself.",
        )
