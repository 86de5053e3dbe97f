"""Records the memory of some steps: the peak by module and category, and on an accelerator the allocator's history,
which https://pytorch.org/memory_viz shows."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.artifacts import make_writable_folder
from mindspeed_mm.fsdp.params.tools_args import MemoryProfile
from mindspeed_mm.fsdp.tools.memory_report import MemoryReport, write_report
from mindspeed_mm.fsdp.tools.memory_tracker import MemoryTracker
from mindspeed_mm.fsdp.utils.device import get_device_type, get_torch_device
from mindspeed_mm.fsdp.utils.settings import setting_of


def allocator_history() -> ModuleType | None:
    """What records the history of this device's allocator; None on a CPU, and on a backend that keeps none."""
    memory: Any = setting_of(get_torch_device(), object, "memory")
    return memory if hasattr(memory, "_record_memory_history") else None


def idle_settings(settings: MemoryProfile) -> list[str]:
    """What of the settings means nothing on this device, in words."""
    if allocator_history() is not None:
        return []
    defaults = MemoryProfile()
    notes = []
    for name in ("stacks", "max_entries"):
        if settings[name] != defaults[name]:
            notes.append(
                f"tools.memory_profile.{name} applies to the history kept by an accelerator's allocator, and has no "
                f"effect on {get_device_type()}"
            )
    return notes


class MemoryProfiler:
    """Records from `start` to `stop`.

    Args:
        settings: The `tools.memory_profile` section.
        folder: Where reports and snapshots go.
        rank: Global rank; part of the files' names.
        model: The assembled model.
        optimizer: Over its parameters.
        device: Whose memory counts.
    """

    def __init__(
        self,
        settings: MemoryProfile,
        folder: Path,
        rank: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self._settings, self._folder, self._rank, self._device = settings, folder, rank, device
        self._tracker = MemoryTracker(model, optimizer, device)
        self._history = allocator_history() if device.type != "cpu" else None
        self._tracking, self._ending = ExitStack(), ExitStack()
        """What has begun and is to be ended: the tracker, and after its report the history."""

    def start(self, next_step: int) -> None:
        """Begin to record, just before step `next_step`. Raises `MachineError` when the folder cannot be written."""
        make_writable_folder(self._folder)
        self._first = next_step
        if self._history is not None:
            self._history._record_memory_history(
                max_entries=self._settings.max_entries or sys.maxsize, stacks=self._settings.stacks
            )
            self._ending.callback(self._history._record_memory_history, enabled=None)
        self._tracking.enter_context(self._tracker)

    def stop(self, last_step: int) -> MemoryReport:
        """End after `last_step` and write what was found.

        Raises:
            OSError: The folder cannot be written.
        """
        self._tracking.close()
        by_module = self._settings.mem_info
        report = MemoryReport(
            rank=self._rank,
            steps=(self._first, last_step),
            device=self._device.type,
            peak=self._tracker.peak(),
            module_peaks=self._tracker.module_peaks() if by_module else {},
            allocated_peaks=self._tracker.allocated_peaks() if by_module else {},
        )
        with self._ending:
            written = write_report(report, self._folder)
            if self._history is not None:
                self._history._dump_snapshot(str(written.with_suffix(".pickle")))
        return report

    def abandon(self) -> None:
        """End without a report: the run has failed. What has not begun needs no end."""
        self._tracking.close()
        self._ending.close()
