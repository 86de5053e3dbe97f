"""Judges what the digits_flux example has drawn: are the digits recognised, and are they more than copies?

Run `python examples/digits_flux/judge_digits.py [FOLDER]` (default `runs/digits_flux`) after `mm infer`. It reads
`FOLDER/samples`, writes `FOLDER/run/eval` for `mm report`, and ends with exit code 1 below the goal.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from judges import (
    Distances,
    Judges,
    digit_of,
    read_manifest,
    run_judge,
    stacked,
    train_judges,
    verdict,
    write_results,
)
from PIL import Image
from scans import NAMES, generators_scans, load_scans, split_scans


def read_pictures(folder: Path, entries: list[dict[str, Any]]) -> np.ndarray:
    """(n, 8, 8) uint8, grey."""
    return np.stack([np.asarray(Image.open(folder / entry["file"]).convert("L")) for entry in entries])


def judge(folder: Path) -> int:
    """Score the samples, write the results, print them; returns the exit code.

    Args:
        folder: Of the example.
    """
    entries = read_manifest(folder / "samples")
    pictures, meant = read_pictures(folder / "samples", entries), [digit_of(entry["prompt"]) for entry in entries]
    splits = split_scans(load_scans())
    training, held_out = stacked(splits["train"])[0], stacked(splits["judge"])
    judges = train_judges(*held_out)
    for name, ceiling in judges.scores(*stacked(generators_scans(splits))).items():
        print(f"on the generator's real scans: {name} {ceiling}")
    scores = judges.scores(pictures, meant)
    distances = Distances.to_nearest(training, pictures, held_out[0])
    write_results(folder, scores, describe(entries, judges, pictures, meant), distances)
    return verdict(scores, distances)


def describe(
    entries: list[dict[str, Any]], judges: Judges, pictures: np.ndarray, meant: list[int]
) -> list[dict[str, Any]]:
    """One entry a sample for the report; right when all judges are."""
    found = judges.digits(pictures)
    seen = [{name: NAMES[digits[i]] for name, digits in found.items()} for i in range(len(entries))]
    return [
        {
            "id": Path(entry["file"]).stem,
            "task": NAMES[digit],
            "image": entry["file"],
            "question": entry["prompt"],
            "expected": NAMES[digit],
            "given": ", ".join(f"{words} ({name})" for name, words in each.items()),
            "correct": set(each.values()) == {NAMES[digit]},
        }
        for entry, digit, each in zip(entries, meant, seen, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(run_judge(judge, "runs/digits_flux"))
