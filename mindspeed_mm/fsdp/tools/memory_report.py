"""What the memory tracker found, for people: a table for the log, a JSON file, a picture."""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm.core.artifacts import atomic_write_text
from mindspeed_mm.fsdp.tools.memory_tracker import CATEGORIES, MemoryPeak

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

    def to_dict(self) -> dict[str, Any]:
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
    return " " * 9 + "-" if size is None else f"{size / MIB:>10,.1f}"


def grouped(by_module: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[int, Counter[str]]]:
    """Modules whose names differ in numbers only, together: `layers.*.mlp` → how many, category → bytes."""
    groups: dict[str, tuple[int, Counter[str]]] = {}
    for name, kinds in by_module.items():
        key = re.sub(r"\.\d+(?=\.|$)", ".*", name)
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
    return f"{name} ×{count}" if count > 1 else name


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
