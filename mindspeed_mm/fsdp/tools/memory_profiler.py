"""Records the memory of some steps: the peak by module and category, as a table for the log, a JSON file and a picture,
and on an accelerator the allocator's history, which https://pytorch.org/memory_viz shows."""

from __future__ import annotations

import json
import operator
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.artifacts import atomic_write_text, make_writable_folder
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.patterns import pattern_of
from mindspeed_mm.fsdp.params.tools_args import MemoryProfile
from mindspeed_mm.fsdp.tools.memory_tracker import CATEGORIES, MemoryPeak, MemoryTracker
from mindspeed_mm.fsdp.utils.device import get_device_type, get_torch_device
from mindspeed_mm.fsdp.utils.model_parts import setting_of


def allocator_history() -> ModuleType | None:
    """What records the history of this device's allocator; None on a CPU, and on a backend that keeps none."""
    memory: Any = setting_of(get_torch_device(), object, "memory")
    if hasattr(memory, "_record_memory_history"):
        return memory
    return None


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


# --- what was found, for people ---------------------------------------------------------------------------------------


MIB = 2**20
ROWS = 12
"""Modules in a table and in a picture."""


@dataclass(frozen=True)
class MemoryReport:
    """The peak of some steps on one rank. Bytes."""

    rank: int
    steps: tuple[int, int]
    """First and last."""
    device: str
    peak: MemoryPeak
    module_peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """Module → direction → most held in all while it was at work; empty unless asked for."""
    allocated_peaks: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same as an accelerator's allocator counts it."""

    def to_dict(self) -> JsonObject:
        """Return all fields by name, nested ones too, for a JSON file."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the peak as a table for the log, line by line."""
        first, last = self.steps
        peak = self.peak
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        place = peak.module if peak.direction == "between" else f"the {peak.direction} pass of {peak.module}"
        head = f"memory of {steps} on rank {self.rank}: peak {peak.total_bytes / MIB:,.1f} MiB of tensors, in {place}"
        lines = [head]
        for name, size in sorted(peak.by_category.items(), key=lambda item: -item[1]):
            lines.append(f"  {name:<12}{_cell(size, peak.total_bytes)}  {CATEGORIES[name]}")
        lines.append("  held at the peak, by the module that made it:")
        groups = sorted(grouped(peak.by_module).items(), key=lambda item: -sum(item[1][1].values()))
        for name, (count, kinds) in groups[:ROWS]:
            most = ", ".join(f"{kind} {size / MIB:,.1f}" for kind, size in kinds.most_common(3))
            lines.append(f"  {_cell(sum(kinds.values()), peak.total_bytes)}  {_title(name, count)}: {most}")
        return [*lines, *self._peak_lines()]

    def _peak_lines(self) -> list[str]:
        found = self.allocated_peaks or self.module_peaks
        if not found:
            return []
        source = "the allocator" if self.allocated_peaks else "tensors"
        lines = [f"  most held in all while a module was at work (MiB, by {source}):"]
        lines.append(f"  {'forward':>10}{'backward':>10}")
        ranked = sorted(found.items(), key=lambda item: -max(item[1].values()))
        for name, peaks in ranked[: 2 * ROWS]:
            line = f"  {_mib(peaks.get('forward'))}{_mib(peaks.get('backward'))}  {name}"
            if "between" in peaks:
                line += f" ({_mib(peaks['between']).strip()})"
            lines.append(line)
        return lines


def _cell(size: int, total: int) -> str:
    return f"{size / MIB:>10,.1f} MiB {size / max(total, 1):>6.1%}"


def _mib(size: int | None) -> str:
    if size is None:
        return " " * 9 + "-"
    return f"{size / MIB:>10,.1f}"


def grouped(by_module: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, Counter[str]]]:
    """Modules whose names differ in numbers only, together: `layers.{*}.mlp` → how many, category → bytes."""
    groups: dict[str, tuple[int, Counter[str]]] = {}
    for name, kinds in by_module.items():
        key = pattern_of(name)
        count, total = groups.get(key, (0, Counter()))
        groups[key] = (count + 1, total + Counter(kinds))
    return groups


def write_report(report: MemoryReport, folder: Path) -> Path:
    """Write `memory_rank<R>_step<A>-<B>.json` and a picture beside it; returns the first.

    Raises:
        OSError: The folder cannot be written.
    """
    path = folder / f"memory_rank{report.rank}_step{report.steps[0]}-{report.steps[1]}.json"
    atomic_write_text(path, json.dumps(report.to_dict(), indent=2) + "\n")
    draw(report, path.with_suffix(".png"))
    return path


def _title(name: str, count: int) -> str:
    """What to call a group of so many modules."""
    if count > 1:
        return f"{name} ×{count}"
    return name


def draw(report: MemoryReport, path: Path) -> None:
    """A bar for each group of modules, in the colours of the categories."""
    from matplotlib.figure import Figure  # half a second that a run without this report need not spend

    groups = sorted(grouped(report.peak.by_module).items(), key=lambda item: sum(item[1][1].values()))[-ROWS:]
    figure = Figure(figsize=(10, 0.6 + 0.4 * (len(groups) + 2)), layout="constrained")
    axes = figure.subplots()
    names = [_title(name, count) for name, (count, _) in groups]
    left = [0.0] * len(groups)
    for index, category in enumerate(CATEGORIES):
        widths = [kinds.get(category, 0) / MIB for _, (_, kinds) in groups]
        if any(widths):
            axes.barh(names, widths, left=left, label=category, color=f"C{index}")
            left = list(map(operator.add, left, widths))
    axes.set_xlabel("MiB")
    axes.set_title(f"Rank {report.rank}, peak of {report.peak.total_bytes / MIB:,.1f} MiB: what was held, by module")
    if any(left):
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
