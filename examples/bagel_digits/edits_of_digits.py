"""What the bagel_digits example asks of its model, in words, and what a right answer is."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path += [str(EXAMPLES / "digits_flux"), str(EXAMPLES / "digits_edit")]  # the scans, their papers and the judges

from edits import PAPERS, on_paper, papers_of  # noqa: E402
from scans import NAMES, Scan  # noqa: E402

__all__ = ["DRAW", "EDITS", "INVERT", "MAKE", "READ", "TASKS", "TURN", "Row", "asked_rows", "on_paper", "papers_of",
           "training_rows"]  # fmt: skip

READ, DRAW, MAKE, INVERT, TURN = "read", "draw", "make", "invert", "turn"
EDITS = (MAKE, INVERT, TURN)
TASKS = (READ, DRAW, *EDITS)
QUESTION, INVERTED, TURNED = "which digit is this ?", "invert it", "turn it upside down"
EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {INVERT: lambda picture: 255 - picture, TURN: np.flipud}
"""Edits that have one right answer, of pictures (…, 8, 8) or (8, 8) uint8: for `np.flipud` one picture."""


class Row(NamedTuple):
    """A question with a right answer."""

    task: str
    digit: int
    """Of the answer."""
    asked: str
    source: tuple[str, np.ndarray] | None
    """Name and picture (8, 8) uint8 of what the question shows."""
    answer: tuple[str, np.ndarray] | None
    """The same of an answer that is a picture; None: the answer is the digit's name."""


def reading(scan: Scan, name: str, picture: np.ndarray) -> Row:
    """What does this picture of a scan show?"""
    return Row(READ, scan.digit, QUESTION, (name, picture), None)


def drawing(scan: Scan) -> Row:
    """Draw what this scan shows, in white ink on black paper."""
    return Row(DRAW, scan.digit, f"draw a {NAMES[scan.digit]}", None, shown(scan, "black"))


def making(source: Scan, target: Scan, paper: str) -> Row:
    """Make the one into the other's digit, on the paper of the one."""
    return Row(MAKE, target.digit, f"make it a {NAMES[target.digit]}", shown(source, paper), shown(target, paper))


def exact(task: str, scan: Scan, paper: str) -> Row:
    """Invert the picture of a scan, or turn it upside down."""
    name, picture = shown(scan, paper)
    asked = {INVERT: INVERTED, TURN: TURNED}[task]
    return Row(task, scan.digit, asked, (name, picture), (f"{name}-{task}", EXACT[task](picture)))


def shown(scan: Scan, paper: str) -> tuple[str, np.ndarray]:
    """Name and picture of a scan on a paper."""
    return f"{scan.index:04d}-{paper}", on_paper(scan.picture, paper)


def jittered(picture: np.ndarray, draw: random.Random) -> np.ndarray:
    """White ink on black paper, turned by up to 8 degrees and moved by up to 0.7 pixels each way."""
    shift = (draw.uniform(-0.7, 0.7), draw.uniform(-0.7, 0.7))
    turned = Image.fromarray(picture).rotate(draw.uniform(-8, 8), Image.Resampling.BILINEAR, translate=shift)  # type: ignore[arg-type]  # parts of pixels are taken
    return np.asarray(turned)


def training_rows(scans: list[Scan], draw: random.Random, rounds: int) -> Iterator[Row]:
    """Every scan is read, drawn, the result of another, inverted and turned.

    Args:
        scans: All of them.
        draw: Chooses papers, what is made into what, and how scans that are read are moved.
        rounds: How often each is read, and the result of another.
    """
    for scan in scans:
        yield drawing(scan)
        for number in range(rounds):
            paper = draw.choice(PAPERS)
            picture = jittered(scan.picture, draw) if number else scan.picture
            name = f"{scan.index:04d}-{paper}" + f"-moved{number}" * bool(number)
            yield reading(scan, name, on_paper(picture, paper))
            yield making(draw.choice(scans), scan, draw.choice(PAPERS))
        for paper in PAPERS:
            yield exact(INVERT, scan, paper)
            yield exact(TURN, scan, paper)


def asked_rows(unread: list[Scan], sources: list[Scan], draws: int) -> Iterator[Row]:
    """What is judged, of scans that were never trained on.

    Args:
        unread: Scans that are read.
        sources: Scans that are edited, each in every way.
        draws: How often each digit is drawn.
    """
    for number, scan in enumerate(unread):
        yield reading(scan, *shown(scan, PAPERS[number % 2]))
    for digit in range(len(NAMES)):
        of_digit = [scan for scan in unread if scan.digit == digit]
        for number in range(draws):
            yield drawing(of_digit[number % len(of_digit)])
    by_digit = [[scan for scan in sources if scan.digit == digit] for digit in range(len(NAMES))]
    for number, scan in enumerate(sources):
        wanted = by_digit[(scan.digit + 1 + number % 9) % 10]
        yield making(scan, wanted[number % len(wanted)], PAPERS[number % 2])
        yield exact(INVERT, scan, PAPERS[number % 2])
        yield exact(TURN, scan, PAPERS[number % 2])
