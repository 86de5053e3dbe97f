"""Scanned digits in white ink on black paper or in black ink on white paper, and how the paper of one is told."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "digits_flux"))  # the scans, the model and the judges

from scans import NAMES

PAPERS = ("black", "white")


def caption(digit: int) -> str:
    """What is asked of a picture; its paper, the source alone says."""
    return f"make it a {NAMES[digit]}"


def on_paper(picture: np.ndarray, paper: str) -> np.ndarray:
    """A scan, or pictures of any shape uint8, on this paper; twice on white paper is the scan again."""
    return picture if paper == "black" else 255 - picture


def papers_of(pictures: np.ndarray) -> list[str]:
    """The paper of each picture, by its first and last column, where scans have hardly any ink.

    Args:
        pictures: (n, 8, 8) uint8.
    """
    edges = np.concatenate([pictures[:, :, :1], pictures[:, :, -1:]], axis=2)
    return [PAPERS[int(bright)] for bright in edges.mean(axis=(1, 2)) > 127]
