"""A run as Python sees it: its metrics as a table, its checkpoints, its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mindspeed_mm.checkpoint.choice import best_of
from mindspeed_mm.checkpoint.layout import checkpoint_folder, list_iterations
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.train.run.trackers import TrackedRun, Tracker
from mindspeed_mm.tasks.report.data import read_run

if TYPE_CHECKING:
    import pandas
    from torch import nn

Record = dict[str, Any]


@dataclass(frozen=True, repr=False)
class Run:
    """One run, while its process lives or from its folder afterwards."""

    folder: Path | None
    """`training.save`; None for a run that keeps nothing."""
    records: Sequence[Record] = ()
    """Logged steps and validations in the order of their steps, under the names of `metrics.jsonl`."""
    facts: JsonMapping = field(default_factory=dict)
    """`run.json`: versions, machine, data, how it ended."""
    model: nn.Module | None = None
    """The trained model, in the process that trained it; None where no step was left to do."""

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row for each step that was logged or validated, a column for each number: step, loss, lr, val_loss …"""
        import pandas  # a third of a second

        by_step: dict[int, Record] = {}
        for record in self.records:
            by_step.setdefault(record["step"], {}).update(record)
        return pandas.DataFrame([by_step[step] for step in sorted(by_step)])

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Folders of the run's checkpoints by step, in ascending order; empty for a run without a folder."""
        if self.folder is None:
            return {}
        return {step: checkpoint_folder(self.folder, step) for step in list_iterations(self.folder)}

    @property
    def last(self) -> Path | None:
        """Folder of the newest checkpoint; None where the run has no checkpoint."""
        return next(reversed(self.checkpoints.values()), None)

    @property
    def best(self) -> Path | None:
        """The best checkpoint that the run keeps (`training.evaluate.best_metric`), which `infer`, `export` and
        `evaluate` take; else, of those that were validated, the one with the lowest validation loss. None when there is
        none."""
        if self.folder is not None and (kept := best_of(self.folder)) is not None:
            return self.checkpoints[kept[0]]
        # What words and pictures are trained by together, where there is such a sum.
        name = "val_total" if any("val_total" in record for record in self.records) else "val_loss"
        losses = {record["step"]: record[name] for record in self.records if _is_finite(record.get(name))}
        validated = [step for step in self.checkpoints if step in losses]
        if validated:
            return self.checkpoints[min(validated, key=lambda step: losses[step])]
        return None

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed` or `running`, as `run.json` has it; empty when there is none."""
        return str(self.facts.get("status", ""))

    def __repr__(self) -> str:
        """Folder, status and the table of steps as text; long lines are left as they are."""
        head, rows = self._shown()
        table = [_COLUMNS, *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
        if not rows:
            return head
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        """The same as an HTML table, which notebooks show."""
        head, rows = self._shown()
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        titles = "".join(f"<th>{title}</th>" for title in _COLUMNS)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        shown = f"<p>{escape(head)}</p>"
        if rows:
            shown += f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
        return shown

    def _shown(self) -> tuple[str, list[tuple[str, ...]]]:
        """A line about the run, and the rows of the table: steps spread over the run, the best and the newest
        checkpoint among them."""
        by_step: dict[int, Record] = {}
        for record in self.records:
            by_step.setdefault(record["step"], {}).update(record)
        step_of = {path: step for step, path in self.checkpoints.items()}
        marks: dict[int, list[str]] = {}
        for name, path in (("best", self.best), ("newest", self.last)):
            if path is not None:
                marks.setdefault(step_of[path], []).append(name)
        steps = sorted(by_step)
        stride = max(1, -(-len(steps) // _MOST_ROWS))
        chosen = sorted({*steps[::stride], *steps[-1:], *marks})
        rows = []
        for step in chosen:
            record = by_step.get(step, {})
            losses = (_number(record.get(name)) for name in ("loss", "val_loss"))
            rows.append((f"{step:,}", *losses, ", ".join(marks.get(step, ()))))
        where = str(self.folder or "without a folder")
        return "  ".join(filter(None, (f"Run {where}", self.status))), rows

    def __fspath__(self) -> str:
        """The folder: a run can be given wherever a path to a run can."""
        if self.folder is None:
            raise TypeError("this run has no folder: set training.save")
        return str(self.folder)


_COLUMNS = ("step", "loss", "validation loss", "checkpoint")
_MOST_ROWS = 10
"""Steps in the table of a run, beside those of checkpoints and the last one."""


def _number(value: object) -> str:
    if _is_finite(value):
        return f"{value:.4f}"
    return ""


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def load_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        DataError: It is not a run folder, or its files are broken.
    """
    found = read_run(folder)
    return Run(folder, sorted([*found.steps, *found.validations], key=lambda record: record["step"]), found.facts)


def run_of(save: str | None, records: Sequence[Record], model: nn.Module | None) -> Run:
    """The run that this process has trained: as its folder has it, else as `records` have it."""
    if save is None:
        return Run(None, records, model=model)
    run = load_run(Path(save))
    return Run(run.folder, run.records, run.facts, model)


class RecordsInMemory(Tracker):
    """Keeps the numbers of a run that has no folder."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def begin(self, run: TrackedRun) -> None:
        """Do nothing, because memory needs no preparation for a run."""

    @override
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.records.append({"step": step, **numbers})
