"""Figures with their targets, as they stand in the JSON and in the printed table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number; `at_most` or `at_least` is its target, both None where it is only reported."""

    name: str
    value: float | None
    unit: str
    at_most: float | None = None
    low: float | None = None
    high: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; a number that could not be measured misses it."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None:
            return False
        low = -math.inf if self.at_least is None else self.at_least
        return low <= self.value <= (math.inf if self.at_most is None else self.at_most)

    @property
    def target(self) -> str:
        """As the table shows it."""
        if self.at_most is not None:
            return f"≤ {_number(self.at_most)}"
        return "" if self.at_least is None else f"≥ {_number(self.at_least)}"

    def to_dict(self) -> dict[str, Any]:
        """For the JSON."""
        return {**asdict(self), "met": self.met}


def of_spread(
    name: str, spread: dict[str, Any], unit: str, at_most: float | None = None, at_least: float | None = None
) -> Figure:
    """A figure from `rounds.spread`."""
    return Figure(name, spread["median"], unit, at_most, spread.get("min"), spread.get("max"), at_least)


def table(figures: Sequence[tuple[str, Figure]]) -> str:
    """Lines of (benchmark, figure): value, range, target, and whether it is met."""
    rows = [("benchmark", "figure", "value", "min–max", "target", "met")]
    for benchmark, figure in figures:
        span = "" if figure.low is None else f"{_number(figure.low)}–{_number(figure.high)}"
        met = {None: "", True: "yes", False: "NO"}[figure.met]
        rows.append(
            (benchmark, figure.name, f"{_number(figure.value)} {figure.unit}".strip(), span, figure.target, met)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
