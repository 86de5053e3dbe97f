"""What a harness found, in the same form whichever it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.core.json_file import read_json_object

_MOST_TOLD = 8


@dataclass(frozen=True)
class Figure:
    """One number in the harness's own unit, with a 95 % interval where the harness gives a standard error."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} (95 % interval {self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class TaskFigures:
    """What was found on one task."""

    figures: Mapping[str, Figure]
    n: int | None = None
    """Questions, where the harness says how many."""
    chief: Sequence[str] = ()
    """Names of the figures that the harness puts first; none: all are alike."""
    trouble: str = ""
    """Why there are no figures."""

    def to_dict(self) -> dict[str, Any]:
        """What `harness.json` holds of a task."""
        figures = {name: asdict(figure) for name, figure in self.figures.items()}
        return {"figures": figures, "n": self.n, "chief": list(self.chief), "trouble": self.trouble}

    def lines(self, task: str) -> list[str]:
        """For people: a line a figure, of many figures only the chief ones."""
        if not self.figures:
            return [f"{task}: no figures: {self.trouble or 'the harness has written none'}"]
        names = list(self.figures)
        if self.chief and len(names) > _MOST_TOLD:
            names = list(self.chief)
        counted = ""
        if self.n is not None:
            counted = f", n={self.n}"
        return [f"{task}, {name}: {self.figures[name]}{counted}" for name in names]


def as_number(value: Any) -> float | None:
    """A number that a harness has written, also as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


Snapshot = Mapping[Path, int]
"""File → when it was changed."""


def snapshot(folder: Path, pattern: str) -> Snapshot:
    """Files below a folder, by the name that they really have."""
    return {path.resolve(): path.stat().st_mtime_ns for path in folder.rglob(pattern) if path.is_file()}


def read_newest(folder: Path, pattern: str, before: Snapshot) -> dict[str, Any]:
    """The newest object that was written or changed since a snapshot; empty where there is none.

    Raises:
        DataError: It is not an object of JSON.
    """
    now = snapshot(folder, pattern)
    changed = [path for path, time_ns in now.items() if before.get(path) != time_ns]
    if not changed:
        return {}
    return read_json_object(max(changed, key=now.__getitem__), DataError)
