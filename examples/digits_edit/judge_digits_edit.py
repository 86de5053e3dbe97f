"""Judges what the digits_edit example has drawn: the digit that was asked for, on the paper of the source?

Run `python examples/digits_edit/judge_digits_edit.py [FOLDER]` (default `runs/digits_edit`) after `mm infer`. It reads
`FOLDER/samples`, writes `FOLDER/run/eval` for `mm report` and `FOLDER/result.png`, and ends with exit code 1 below the
goal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from edits import on_paper, papers_of  # first: it finds the others
from judges import Distances, Judges, digit_of, read_manifest, run_judge, stacked, train_judges, verdict, write_results
from PIL import Image
from scans import NAMES, load_scans, split_scans

from mindspeed_mm.fsdp.sampling.answers.scoring import score

SHOWN_PAIRS = 20
ENLARGED = 4
GOAL = 0.9
"""Share of pictures that must be right in each way."""


def read_pictures(paths: Sequence[Path]) -> np.ndarray:
    """(n, 8, 8) uint8, grey."""
    return np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])


def judge_pictures(
    judges: Judges, pictures: np.ndarray, digits: Sequence[int], papers: Sequence[str]
) -> dict[str, np.ndarray]:
    """What is right of each picture, (n,) bool.

    Args:
        judges: Of scans on black paper.
        pictures: (n, 8, 8) uint8.
        digits: What was asked for.
        papers: Of the sources.
    """
    found = judges.digits(scans_of(pictures))
    right = {f"{name}, the digit asked for": seen == np.array(digits) for name, seen in found.items()}
    right["paper of the source"] = np.array(papers_of(pictures)) == np.array(papers)
    return right


def scans_of(pictures: np.ndarray) -> np.ndarray:
    """(n, 8, 8): each on black paper."""
    return np.stack([on_paper(each, paper) for each, paper in zip(pictures, papers_of(pictures), strict=True)])


def judge(folder: Path) -> int:
    """Score the samples, write the results, print them; returns the exit code.

    Args:
        folder: Of the example.
    """
    entries, splits = read_manifest(folder / "samples"), split_scans(load_scans())
    digits = [digit_of(entry["prompt"]) for entry in entries]
    papers = [Path(entry["image"]).stem.split("-")[1] for entry in entries]
    pictures = read_pictures([folder / "samples" / entry["file"] for entry in entries])
    (training, _), held_out = stacked(splits["train"]), stacked(splits["judge"])
    judges = train_judges(*held_out)
    real, shown = stacked(splits["train"])
    given = [papers[number % len(papers)] for number in range(len(real))]
    drawn = np.stack([on_paper(picture, paper) for picture, paper in zip(real, given, strict=True)])
    for name, outcomes in judge_pictures(judges, drawn, shown, given).items():
        print(f"on the generator's real scans: {name} {score(outcomes.tolist())}")
    right = judge_pictures(judges, pictures, digits, papers)
    scores = {name: score(outcomes.tolist()) for name, outcomes in right.items()}
    distances = Distances.to_nearest(training, scans_of(pictures), held_out[0])
    samples = [
        {
            "id": Path(entry["file"]).stem,
            "task": NAMES[digit],
            "image": entry["file"],
            "question": f"{entry['prompt']} (from {Path(entry['image']).stem})",
            "expected": f"a {NAMES[digit]} on {paper} paper",
            "given": ", ".join(f"wrong: {name}" for name in right if not right[name][i]) or "as asked",
            "correct": all(outcomes[i] for outcomes in right.values()),
        }
        for i, (entry, digit, paper) in enumerate(zip(entries, digits, papers, strict=True))
    ]
    write_results(folder, scores, samples, distances)
    write_picture(folder / "result.png", read_pictures([Path(entry["image"]) for entry in entries]), pictures)
    return verdict(scores, distances, GOAL)


def write_picture(path: Path, sources: np.ndarray, pictures: np.ndarray) -> None:
    """Sources above what was made of them, enlarged."""
    rows = [
        np.concatenate([np.pad(each, 1, constant_values=128) for each in group[:SHOWN_PAIRS]], 1)
        for group in (sources, pictures)
    ]
    sheet = Image.fromarray(np.concatenate(rows))
    sheet.resize((sheet.width * ENLARGED, sheet.height * ENLARGED), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    sys.exit(run_judge(judge, "runs/digits_edit"))
