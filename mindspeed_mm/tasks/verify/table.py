"""What a verification found, as rows, as text and as JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TOLERANCE = 1e-9
"""On every deviation, relative to the largest entry of the reference's tensor (at least 1e-3)."""


@dataclass(frozen=True)
class Row:
    """One quantity of one check."""

    check: str
    quantity: str
    tolerance: float = TOLERANCE
    """0: equal to the bit."""
    deviation: float = 0.0
    place: str = ""
    """Step and parameter of the largest deviation."""
    expected: float = 0.0
    found: float = 0.0
    note: str = ""
    """Why nothing was compared; empty when it was."""

    @property
    def is_missed(self) -> bool:
        """Whether it is off. Written so that NaN is."""
        return not self.note and not self.deviation <= self.tolerance

    def to_dict(self) -> dict[str, object]:
        """For JSON, which has neither infinity nor NaN."""
        content: dict[str, object] = asdict(self)
        for name, value in content.items():
            if isinstance(value, float) and not math.isfinite(value):
                content[name] = str(value)
        return content | {"missed": self.is_missed}


@dataclass(frozen=True)
class Verification:
    """Holds what `mm verify` found: the plan, the model, and one row per compared quantity."""

    path: Path
    plan: str
    model: str
    changes: tuple[str, ...]
    rows: tuple[Row, ...]
    seconds: float
    fault: str | None = None

    @property
    def missed(self) -> list[Row]:
        """The rows that are off."""
        return [row for row in self.rows if row.is_missed]

    def to_dict(self) -> dict[str, object]:
        """Return a dictionary for JSON with all rows and the number of those that deviate."""
        return {
            "config": str(self.path),
            "plan": self.plan,
            "model": self.model,
            "changes": list(self.changes),
            "fault": self.fault,
            "seconds": round(self.seconds, 1),
            "rows": [row.to_dict() for row in self.rows],
            "missed": len(self.missed),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text: verdict, plan, changes, table and each row that deviates."""
        lines = [f"{self.path}: {self._verdict()}", f"  plan   {self.plan}", f"  model  {self.model}"]
        lines += ["  changed to make runs comparable:", *(f"    {line}" for line in self.changes)]
        lines += ["", *_table(self.rows), ""]
        lines.append(
            f"tolerance {TOLERANCE:.0e} of the largest entry of each tensor (at least 1e-3 is taken for it), "
            f"0 means to the bit; {self.seconds:.0f} s"
        )
        for row in self.missed:
            lines.append(
                f"off: {row.check}, {row.quantity}, {row.place}: {row.found:.17g} instead of {row.expected:.17g}"
            )
        return lines

    def _verdict(self) -> str:
        count = len(self.missed)
        verdict = "equal"
        if count:
            compared = sum(not row.note for row in self.rows)
            verdict = f"{count} of {compared} quantities deviate"
        if self.fault is not None:
            verdict += f", with '{self.fault}' planted"
            if not count:
                verdict += ": NOT NOTICED"
        return verdict


def worst_rows(of_ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Row by row the largest deviation of all ranks."""
    return [max(rows, key=_badness) for rows in zip(*of_ranks, strict=True)]


def _badness(row: Row) -> float:
    if math.isnan(row.deviation):
        return math.inf
    return row.deviation


def _table(rows: Sequence[Row]) -> list[str]:
    width = max(len(row.quantity) for row in rows) + 4
    lines = [f"{'check':{width}}{'largest deviation':>18}  {'allowed':>8}"]
    check = ""
    for row in rows:
        if row.check != check:
            check = row.check
            lines.append(f"{check}: {row.note}" if row.note else check)
        if row.note:
            continue
        numbers = f"{_number(row.deviation, 1):>18}  {_number(row.tolerance, 0):>8}"
        place = row.place if row.deviation else ""
        if row.is_missed:
            place += "  OFF"
        lines.append(f"  {row.quantity:{width - 2}}{numbers}  {place}".rstrip())
    return lines


def _number(value: float, digits: int) -> str:
    if value:
        return f"{value:.{digits}e}"
    return "0"
