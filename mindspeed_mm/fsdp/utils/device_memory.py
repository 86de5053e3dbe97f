"""How much memory a process held at most since it was last asked."""

from __future__ import annotations

import resource
from typing import NamedTuple

import torch

from mindspeed_mm.fsdp.utils.device import get_device_type


class PeakMemory(NamedTuple):
    """Peak memory of this process in bytes, since `take_peak_memory` was last called."""

    allocated: int
    """Bytes held by tensors; on a CPU, by the whole process since it began, because the kernel does not reset it."""
    reserved: int | None
    """Held by the accelerator's allocator for tensors to come; None on a CPU."""


def take_peak_memory() -> PeakMemory:
    """The peaks since the last call, which begin anew. A host number: the device is not waited for."""
    if get_device_type() == "cpu":
        return PeakMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, None)
    peak = PeakMemory(torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved())
    torch.accelerator.reset_peak_memory_stats()
    return peak
