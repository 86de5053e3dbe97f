"""Figures in tables of documents are those of the measurement that lies beside them."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest

from benchmarks.machine import ROOT

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
COMMAND = re.compile(r"`python -m benchmarks (\w+)`")
SCALES = (1, 100, 1000)
"""What a value of the JSON may be multiplied by: shares are shown in per cent, GB in MB."""


def rows() -> list[tuple[str, str]]:
    """Benchmark, and what the table shows of ours."""
    found = []
    for line in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 8 and (command := COMMAND.fullmatch(cells[6])):
            found.append((command[1], cells[2]))
    return found


def values_of(benchmark: str) -> list[float]:
    """All values of its figures, with the ends of their ranges."""
    record = json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text(encoding="utf-8"))
    keys = product(record["figures"], ("value", "low", "high"))
    return [figure[key] for figure, key in keys if figure[key] is not None]


def unknown(text: str, values: list[float]) -> list[str]:
    """Numbers of a text that no value is rounded to."""
    found = []
    for number in NUMBER.findall(text):
        shown = number.replace(",", "")
        decimals = len(shown.partition(".")[2])
        if all(f"{value * scale:.{decimals}f}" != shown for value, scale in product(values, SCALES)):
            found.append(number)
    return found


@pytest.mark.parametrize(("benchmark", "ours"), rows())
def test_a_row_shows_what_was_measured(benchmark: str, ours: str) -> None:
    assert unknown(ours, values_of(benchmark)) == []


def test_every_measurement_has_a_row() -> None:
    results = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    elsewhere = {"chunk_loss", "communication", "conversion", "features", "optimizer_states", "plans"}
    assert results - {benchmark for benchmark, _ in rows()} == elsewhere


@pytest.mark.parametrize(
    ("row", "benchmark"),
    [("a training step", "step_time"), ("process start", "startup"), ("a generator's step", "diffusion_step")],
)
def test_the_first_page_repeats_them(row: str, benchmark: str) -> None:
    (line,) = [each for each in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if f"| {row}" in each]
    assert unknown("|".join(line.split("|")[2:]), values_of(benchmark)) == []


def test_an_old_figure_is_noticed() -> None:
    assert unknown("1.12 × (0.99–1.11); 4.0 %", [1.02, 0.987, 1.114, 0.04]) == ["1.12"]
