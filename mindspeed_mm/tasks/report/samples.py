"""What a generator made while it was trained, as a grid: a prompt and what came of it round by round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.artifacts import RunFolder, read_jsonl
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.tasks.report.media import Shown, show

if TYPE_CHECKING:
    from mindspeed_mm.tasks.report.data import Record

MOST_ROUNDS, MOST_PROMPTS, MOST_OF_EACH = 6, 20, 4
MOST_BYTES = 8_000_000
"""Maximum size of all samples of a run on the page; earlier rounds are left out first."""


@dataclass(frozen=True)
class Round:
    """Samples that a generator made at one step of its training."""

    step: int
    folder: Path
    entries: list[Record]


def read_rounds(run: Path) -> list[Round]:
    """The rounds of a run whose manifests stand, by step."""
    rounds = []
    for manifest in RunFolder(run).sample_manifests():
        entries = [entry for entry in read_jsonl(manifest) if {"number", "sample", "file", "step"} <= entry.keys()]
        if entries:
            rounds.append(Round(entries[0]["step"], manifest.parent, entries))
    return sorted(rounds, key=lambda each: each.step)


def sample_grid(rounds: Sequence[Round]) -> Record | None:
    """What the template shows: `steps`, and `rows` with a `prompt` and, of its `rounds`, steps with pictures; None when
    there is nothing."""
    if not rounds:
        return None
    prompts: dict[int, str] = {}
    for each in rounds:
        for entry in each.entries:
            prompts[entry["number"]] = str(entry.get("prompt", ""))
    numbers = sorted(prompts)[:MOST_PROMPTS]
    columns: list[tuple[int, dict[int, list[Shown]]]] = []
    left_bytes = MOST_BYTES
    for each in reversed(spread(rounds, MOST_ROUNDS)):
        shown = _pictures(each, numbers)
        for picture in chain.from_iterable(shown.values()):
            left_bytes -= len(picture["source"])
        if left_bytes < 0 and columns:
            break
        columns.insert(0, (each.step, shown))
    rows = []
    for number in numbers:
        cells = [(step, shown[number]) for step, shown in columns if number in shown]
        rows.append({"prompt": prompts[number], "rounds": cells})
    return {
        "steps": [step for step, _ in columns],
        "rows": rows,
        "rounds": len(rounds),
        "prompts": len(prompts),
    }


def spread(rounds: Sequence[Round], most: int) -> list[Round]:
    """At most so many, evenly over all, the last one among them and the first if there is room for two."""
    if len(rounds) <= most:
        return list(rounds)
    if most == 1:
        return [rounds[-1]]
    return [rounds[round(place * (len(rounds) - 1) / (most - 1))] for place in range(most)]


def _pictures(each: Round, numbers: Sequence[int]) -> dict[int, list[Shown]]:
    media = MediaLoader(each.folder)
    shown: dict[int, list[Shown]] = {}
    for entry in each.entries:
        if entry["number"] in numbers and len(shown.get(entry["number"], ())) < MOST_OF_EACH:
            shown.setdefault(entry["number"], []).append(show(str(entry["file"]), media))
    return shown
