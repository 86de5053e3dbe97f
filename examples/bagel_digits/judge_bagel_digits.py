"""Judges what the bagel_digits example has read, drawn and edited: is it what was asked, and has the rest stayed?

Run `python examples/bagel_digits/judge_bagel_digits.py [FOLDER]` (default `runs/bagel_digits`) after `mm infer`. It
reads `FOLDER/answers.jsonl`, writes `FOLDER/run/eval` for `mm report` and `FOLDER/result.png`, and ends with exit code
1 below the goal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from edits_of_digits import DRAW, EDITS, MAKE, READ, TASKS, on_paper, papers_of  # first: it finds the other examples
from judges import Distances, Judges, as_features, run_judge, stacked, train_judges, verdict, write_results
from PIL import Image
from scans import NAMES, Scan, load_scans, split_scans

from mindspeed_mm.core.artifacts import read_jsonl
from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.sampling.answers.scoring import score

GOAL = 0.9
"""Share of the answers to each task that must be right in every way."""
CLOSE = 0.1
"""Root of the mean squared difference, ink from 0 to 1, up to which a picture is as it must be."""
VARIETY = 0.7
"""Share of the mean distance between two real scans of a digit that two drawn ones must have."""
SHOWN, ENLARGED = 20, 4


@dataclass(frozen=True)
class Answered:
    """A row that was asked, and what the model made of it."""

    id: str
    task: str
    asked: str
    expected: str
    """In words: the digit's name."""
    said: str
    source: np.ndarray | None
    """(8, 8) uint8 of what the question shows."""
    truth: np.ndarray | None
    """The picture of the row's own answer: the right one of an edit that has one, else one of many."""
    drawn: np.ndarray | None
    file: str
    """Of what is drawn, or else of what is shown."""


def read_answers(folder: Path) -> list[Answered]:
    """What was asked, with its answers. Raises `DataError` where rows have none."""
    rows, path = read_jsonl(folder / "data" / "asked.jsonl"), folder / "answers.jsonl"
    answers = {record["row"]: record for record in read_jsonl(path)} if path.exists() else {}
    found = []
    for number, row in enumerate(rows, 1):
        if number not in answers:
            raise DataError(f"row {number} is not answered", where=str(path), way_out="Answer all rows with mm infer.")
        answer, (question, own) = answers[number], row["messages"]
        pictures = [read_picture(folder / "data" / name) for name in row["images"]]
        is_picture = own["content"] == "<image>"
        picture = answer.get("picture")
        found.append(
            Answered(
                id=row["id"],
                task=row["task"],
                asked=question["content"].replace("<image>", ""),
                expected=row["digit"],
                said=answer["answer"],
                source=pictures[0] if len(pictures) > is_picture else None,
                truth=pictures[-1] if is_picture else None,
                drawn=read_picture(folder / picture) if picture else None,
                file=picture or f"data/{row['images'][0]}",
            )
        )
    return found


def read_picture(path: Path) -> np.ndarray:
    """(8, 8) uint8, grey."""
    return np.asarray(Image.open(path).convert("L"))


def problems_of(answered: Sequence[Answered], judges: Judges) -> list[list[str]]:
    """What is wrong with each answer; nothing where all is right.

    Reading: the word. Drawing: the digit by every judge, in white ink on black paper. Making one into another: the
    digit by every judge, on the paper of the source. Other edits: the picture that it must be, pixel by pixel, and
    nearer to that than to those of all other sources.

    Args:
        answered: Rows with their answers.
        judges: Of scans on black paper.
    """
    truths = {task: [each.truth for each in answered if each.task == task] for task in EDITS}
    return [_problems_of(each, judges, truths) for each in answered]


def _problems_of(each: Answered, judges: Judges, truths: dict[str, list[np.ndarray | None]]) -> list[str]:
    if each.task == READ:
        return [] if each.said == each.expected else ["the word"]
    if each.drawn is None or each.truth is None:
        return ["no picture"]
    if each.task in (DRAW, MAKE):
        (paper,), (asked,) = papers_of(each.drawn[None]), papers_of(each.truth[None])
        found = judges.digits(on_paper(each.drawn, paper)[None])
        wrong = [f"the digit, by {name}" for name, (digit,) in found.items() if NAMES[digit] != each.expected]
        return wrong + ["the paper"] * (paper != asked)
    all_truths = np.stack([truth for truth in truths[each.task] if truth is not None])
    apart = root_mean_square(all_truths, each.drawn)
    own = root_mean_square(each.truth[None], each.drawn)[0]
    return ["not close"] * bool(own > CLOSE) + ["nearer to another"] * bool(apart.min() < own)


def root_mean_square(pictures: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(n,) differences of pictures (n, 8, 8) uint8 from one, ink from 0 to 1."""
    differences = (pictures.astype(np.float64) - other) / 255
    return np.sqrt((differences**2).mean(axis=(1, 2)))


def spread(pictures: np.ndarray, digits: Sequence[int]) -> float:
    """Mean Euclidean distance between two pictures of one digit, ink from 0 to 1."""
    features, found = as_features(pictures), []
    for digit in set(digits):
        own = features[np.array(digits) == digit]
        apart = np.sqrt(((own[:, None] - own[None]) ** 2).sum(axis=2))
        found.append(apart[~np.eye(len(own), dtype=bool)].mean())
    return float(np.mean(found))


def drawn_of(answered: Sequence[Answered]) -> tuple[np.ndarray, list[int]]:
    """Pictures (n, 8, 8) that were drawn from words alone, and what was asked for."""
    drawn = [each for each in answered if each.task == DRAW and each.drawn is not None]
    return np.stack([each.drawn for each in drawn if each.drawn is not None]), [
        NAMES.index(each.expected) for each in drawn
    ]


def judge(folder: Path) -> int:
    """Score the answers, write the results, print them; returns the exit code.

    Args:
        folder: Of the example.
    """
    answered, splits = read_answers(folder), split_scans(load_scans())
    judges = train_judges(*stacked(splits["judge"]))
    for name, ceiling in judges.scores(*stacked(splits["train"] + splits["validation"])).items():
        print(f"on real scans that it never saw: {name} {ceiling}")
    problems = problems_of(answered, judges)
    outcomes = {
        task: [not wrong for each, wrong in zip(answered, problems, strict=True) if each.task == task] for task in TASKS
    }
    scores = {task: score(right) for task, right in outcomes.items()}
    pictures, digits = drawn_of(answered)
    distances = Distances.to_nearest(stacked(splits["train"])[0], pictures, stacked(splits["judge"])[0])
    samples = [
        {
            "id": each.id,
            "task": each.task,
            "image": each.file,
            "question": each.asked,
            "expected": each.expected,
            "given": ", ".join(f"wrong: {what}" for what in wrong) or "as asked",
            "correct": not wrong,
        }
        for each, wrong in zip(answered, problems, strict=True)
    ]
    write_results(folder, scores, samples, distances, media_dir=".")
    write_sheet(folder / "result.png", answered)
    return max(verdict(scores, distances, GOAL), check_variety(pictures, digits, splits["judge"]))


def check_variety(pictures: np.ndarray, digits: Sequence[int], real: Sequence[Scan]) -> int:
    """Print how far pictures of one digit are apart; returns the exit code."""
    drawn, scanned = spread(pictures, digits), spread(*stacked(real))
    print(f"distance between two of one digit: {drawn:.2f} drawn, {scanned:.2f} real and held out")
    if drawn >= VARIETY * scanned:
        return 0
    print(f"goal missed: drawn digits vary less than {VARIETY:.0%} of real ones", file=sys.stderr)
    return 1


def write_sheet(path: Path, answered: Sequence[Answered]) -> None:
    """What was drawn, then for each kind of edit the sources above what was made of them, enlarged."""
    drawn = [each for each in answered if each.task == DRAW]
    rows = [[each.drawn for each in drawn[:: max(1, len(drawn) // SHOWN)]]]
    for task in EDITS:
        edited = [each for each in answered if each.task == task]
        chosen = edited[:: max(1, len(edited) // SHOWN)]
        rows += [[each.source for each in chosen], [each.drawn for each in chosen]]
    strips = []
    for row in rows:
        cells = [np.zeros((8, 8), np.uint8) if cell is None else cell for cell in row[:SHOWN]]
        strips.append(np.concatenate([np.pad(cell, 1, constant_values=128) for cell in cells], 1))
    width = min(strip.shape[1] for strip in strips)
    sheet = Image.fromarray(np.concatenate([strip[:, :width] for strip in strips]))
    sheet.resize((sheet.width * ENLARGED, sheet.height * ENLARGED), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    sys.exit(run_judge(judge, "runs/bagel_digits"))
