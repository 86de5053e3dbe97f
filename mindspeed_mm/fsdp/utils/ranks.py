"""Steps that all ranks take together: when one fails, every rank raises the same error and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mindspeed_mm.core.errors import CheckpointError, MachineError, MMError
from mindspeed_mm.core.os_errors import explained_os_error

Result = TypeVar("Result")
PATIENCE_S = 60.0
"""How much longer an exchange waits than its limit: the watchdog, which keeps to the limit, can say who is missing."""


class Ranks:
    """The ranks that write or read a checkpoint together, over a gloo group of their own: saving in the background
    must not meet the training's collectives, and object collectives need no device.

    Args:
        timeout_s: Limit on each exchange, as the watchdog keeps it. Making the group is itself an exchange: all ranks
            do it.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            limit = None if timeout_s is None else timedelta(seconds=timeout_s + PATIENCE_S)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.world_size = dist.get_world_size(self.group) if self.group else 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, item: Result) -> list[Result]:
        """Every rank's `item`, by rank, on all ranks.

        Raises:
            MachineError: A rank is gone.
        """
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(items, item, group=self.group)
        except RuntimeError as error:  # a rank is gone, or slower than the limit
            raise MachineError(
                f"rank {self.rank} lost the other ranks: {str(error).splitlines()[0]}",
                way_out="See which rank failed first. If one is only slow, raise training.save_timeout_s.",
            ) from error
        return items

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank and return this rank's own result.

        Args:
            what: Names the step in the message of an unforeseen failure.
            action: May itself be a collective of all ranks.

        Raises:
            MMError: Some rank failed. All ranks raise the error of the lowest rank that did.
        """
        error: MMError | None = None
        try:
            result = action()
        except MMError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001  (the border between ranks: the others are waiting for this one)
            known = explained_os_error(raised) if isinstance(raised, OSError) else None
            error = known or CheckpointError(f"{what} failed on rank {self.rank}: {type(raised).__name__}: {raised}")
            error.__cause__ = raised
        failed = next((e for e in self.gather(error) if e is not None), None)
        if failed is None:
            return result
        if failed is error:
            raise failed
        raise failed from error

    def each(self, what: str, action: Callable[[], Result]) -> list[Result]:
        """`together`, with every rank's result, by rank, on all ranks. For small results: they are sent around."""
        return self.gather(self.together(what, action))

    def first(self, what: str, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0 only and return its small result on every rank; errors as in `together`."""
        return self.each(what, cast(Callable[[], Result], action if self.is_first else lambda: None))[0]
